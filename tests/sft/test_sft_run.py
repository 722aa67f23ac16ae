"""Supervised fine-tuning trains only on assistant tokens, lowers the loss, and resumes like training."""

import json
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from train_cases import EASY, Paper, same, weights, write_model
from transformers import AutoModelForCausalLM

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import SftConfig, load_sft_config
from rally.data import write_rows
from rally.models import attention
from rally.models.load import load_model
from rally.recipes.arithmetic import data as arithmetic
from rally.recipes.arithmetic.data import conversation, conversations
from rally.runs import sft as sft_run
from rally.runs.build.run_inputs import RunError
from rally.runs.sft import sft, show
from rally.sft.training import SftError, SftSettings, conversation_row, sft_loss, sft_step
from rally.track import RunFolder
from rally.train.forward import logprobs
from rally.train.interrupt_signals import RunStopped
from rally.train.packing import Row
from rally.train.policy import DivergedError, OptimizerSettings, Policy

PROBLEM = arithmetic.ArithmeticProblem("2+3*4", 14, "What is 2+3*4?")
SETTINGS = SftSettings(batch_size=8)


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), "hermes")


@pytest.fixture(scope="module")
def sft_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    write_model(folder / "model")
    mix = {"good": 0.8, "guess": 0.2}
    write_rows(conversations(24, mix, EASY, 0), folder / "train.parquet")
    write_rows(conversations(6, mix, EASY, 1, "test"), folder / "test.parquet")
    return folder


def policy(home: Path, lr: float = 5e-3) -> Policy:
    model = load_model(str(home / "model"))
    attention.install(model)
    return Policy(model, OptimizerSettings(lr=lr, weight_decay=0.0), 100)


def rows(codec: ChatCodec, count: int) -> list[Row]:
    rng = random.Random(0)
    problems = arithmetic.draws(rng, "train", EASY)
    return [conversation_row(codec, conversation(next(problems), "good", rng), SETTINGS) for _ in range(count)]


def test_exactly_the_assistant_turns_are_learned(codec: ChatCodec) -> None:
    row = conversation_row(codec, conversation(PROBLEM, "good", random.Random(0)), SETTINGS)
    learned = codec.decode(row.ids[row.sampled].tolist())
    others = codec.decode(row.ids[~row.mask].tolist())
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3*4"}}\n</tool_call>'
    assert learned.replace("<|im_end|>", "|") in (f"{call}|#### 14|", f"{call.replace(chr(10), '')}|#### 14|")
    assert "What is 2+3*4?" in others and "<tool_response>14</tool_response>" in others and "####" not in others


def test_the_loss_is_the_mean_over_assistant_tokens(codec: ChatCodec, sft_home: Path) -> None:
    """Compared with an ordinary forward, row by row."""
    given, one = rows(codec, 3), policy(sft_home)
    plain = AutoModelForCausalLM.from_pretrained(sft_home / "model").eval()
    terms = []
    for row in given:
        with torch.no_grad():
            logp = torch.log_softmax(plain(input_ids=torch.tensor([row.ids.tolist()])).logits[0], -1)
        terms += [-logp[i - 1, row.ids[i]].item() for i in row.sampled]
    expected = sum(terms) / len(terms)
    assert sft_loss(one, given, SETTINGS) == pytest.approx(expected, abs=1e-5)
    metrics = sft_step(one, given, SETTINGS)
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["train/tokens"] == len(terms)


def test_micro_batches_change_nothing(codec: ChatCodec, sft_home: Path) -> None:
    given = rows(codec, 5)
    whole, cut = policy(sft_home), policy(sft_home)
    sft_step(whole, given, SETTINGS)
    sft_step(cut, given, SftSettings(batch_size=8, max_tokens=80, max_rows=2))
    for name, value in weights(whole.model).items():
        assert torch.allclose(value, weights(cut.model)[name], atol=1e-4), name


def test_training_lowers_the_loss_on_conversations_never_seen(codec: ChatCodec, sft_home: Path) -> None:
    one, given = policy(sft_home), rows(codec, 48)
    train, test = given[:40], given[40:]
    before = sft_loss(one, test, SETTINGS)
    for step in range(20):
        sft_step(one, train[step % 5 * 8 : step % 5 * 8 + 8], SETTINGS)
    assert sft_loss(one, test, SETTINGS) < 0.5 * before
    assert not one.model.training


def test_a_conversation_too_long_follows_truncation(codec: ChatCodec) -> None:
    messages = conversation(PROBLEM, "good", random.Random(0))
    full = conversation_row(codec, messages, SETTINGS)
    most = len(full.ids) - 10
    with pytest.raises(SftError, match=rf"conversation 7 has {len(full.ids)} tokens, more than data.max_length={most}"):
        conversation_row(codec, messages, SftSettings(batch_size=1, max_length=most), label="7")
    left = conversation_row(codec, messages, SftSettings(batch_size=1, max_length=most, truncation="left"))
    right = conversation_row(codec, messages, SftSettings(batch_size=1, max_length=most, truncation="right"))
    assert left.ids.tolist() == full.ids[10:].tolist() and right.ids.tolist() == full.ids[:most].tolist()
    assert left.ids[left.sampled].tolist() == full.ids[full.sampled].tolist()
    assert right.sampled.tolist() == [i for i in full.sampled if i < most]


def test_a_batch_with_nothing_to_learn_is_an_error(codec: ChatCodec, sft_home: Path) -> None:
    short = SftSettings(batch_size=1, max_length=3, truncation="right")
    row = conversation_row(codec, conversation(PROBLEM, "good", random.Random(0)), short)
    with pytest.raises(SftError, match="this batch has no assistant token to train on"):
        sft_step(policy(sft_home), [row], short)


def test_a_gradient_that_is_not_finite_stops_the_run(codec: ChatCodec, sft_home: Path) -> None:
    one = policy(sft_home)
    one.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(one.model)
    with pytest.raises(DivergedError, match="the step was not applied"):
        sft_step(one, rows(codec, 2), SETTINGS)
    assert same(before, weights(one.model))


def config(home: Path, out: Path, *overrides: str) -> SftConfig:
    return load_sft_config(
        overrides=list(overrides),
        base={
            "data": {
                "train_files": str(home / "train.parquet"),
                "val_files": str(home / "test.parquet"),
                "train_batch_size": 8,
            },
            "model": {"path": str(home / "model"), "enable_gradient_checkpointing": False},
            "optim": {"lr": 5e-3},
            "trainer": {
                "default_local_dir": str(out),
                "total_epochs": 2,
                "save_freq": 2,
                "test_freq": "after_each_epoch",
            },
        },
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_ends_with_the_step_under_way_saved(
    sft_home: Path, tmp_path: Path, paper: Paper, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupted(*given: Any) -> dict[str, float]:
        signal.raise_signal(number)
        return sft_step(*given)

    with monkeypatch.context() as patch, pytest.raises(RunStopped):
        patch.setattr(sft_run, "sft_step", interrupted)
        sft(config(sft_home, tmp_path), paper.console)
    assert f"after step 1 of 6, which is saved; to resume: rally sft {tmp_path / 'config.yaml'}\n" in paper.text
    assert steps_of(tmp_path) == ["global_step_1"]
    sft(load_sft_config(tmp_path / "config.yaml"), paper.console)
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["train/loss"]) for line in map(json.loads, lines)]


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("global_step_*"))


def final_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return weights(AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"global_step_{step}" / "actor"))


@pytest.fixture(params=[0.0, 0.2], ids=["plain", "dropout"])
def dropout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with dropout, as some families have."""
    hidden = logprobs.hidden_states
    monkeypatch.setattr(
        logprobs, "hidden_states", lambda model, *rest: F.dropout(hidden(model, *rest), request.param, model.training)
    )


@pytest.mark.usefixtures("dropout")
def test_a_whole_run_and_its_resumption(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    unchecked = "trainer.startup_check=false"  # which would refuse the dropout
    outcome = sft(config(sft_home, tmp_path / "whole", unchecked), paper.console)
    assert outcome.steps == 6 and outcome.metrics["val/loss"] > 0
    assert steps_of(outcome.folder) == ["global_step_2", "global_step_4", "global_step_6"]
    whole = losses(outcome.folder)
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6] and whole[-1][1] < whole[0][1]
    validated = [row.step for row in RunFolder(outcome.folder).read_metrics() if "val/loss" in row.metrics]
    assert validated == [3, 6]
    assert (outcome.folder / "config.yaml").is_file() and (outcome.folder / "versions.json").is_file()

    # Stop the same run after step 5, as a kill would. Its last checkpoint is that of step 4.
    cut = tmp_path / "cut"
    (tmp_path / "whole").rename(cut)
    shutil.rmtree(cut / "checkpoints" / "global_step_6")
    sft(config(sft_home, cut, unchecked), paper.console)
    assert f"resuming from {cut / 'checkpoints' / 'global_step_4'}, step 4" in paper.text
    assert losses(cut) == whole, "the same steps, each once, with the same losses bit for bit"
    assert [row["step"] for row in _aside(cut)] == [5, 6]


def _aside(folder: Path) -> Sequence[dict[str, float]]:
    return [json.loads(line) for line in (folder / "rewound-1" / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_says_so(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    once = config(sft_home, tmp_path, "trainer.total_training_steps=1", "data.val_files=null", "trainer.test_freq=-1")
    sft(once, paper.console)
    with pytest.raises(RunError, match=r"is already at step 1 of 1; raise trainer.total_training_steps"):
        sft(once, paper.console)
    with pytest.raises(RunError, match="resume_mode=disable would overwrite them"):
        sft(config(sft_home, tmp_path, "trainer.total_training_steps=2", "trainer.resume_mode=disable"), paper.console)
    sft(
        config(
            sft_home,
            tmp_path / "other",
            "trainer.total_training_steps=2",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={tmp_path / 'checkpoints' / 'global_step_1'}",
        ),
        paper.console,
    )
    assert [step for step, _ in losses(tmp_path / "other")] == [2]
    assert not same(final_weights(tmp_path, 1), final_weights(tmp_path / "other", 2))


def test_the_dry_run_shows_what_is_learned(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    show(config(sft_home, tmp_path / "none"), paper.console)
    assert "supervised" in paper.text and "####" in paper.text and "nothing was trained" in paper.text
    assert not (tmp_path / "none").exists()


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [row.metrics for row in RunFolder(folder).read_metrics()]


def test_what_a_step_tells(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    sft(config(sft_home, tmp_path), paper.console)
    told = metrics_of(tmp_path)
    assert all(step["train/tokens_per_s"] > 0 and step["train/truncated_share"] == 0 for step in told)
    assert [step["training/epoch"] for step in told] == [0, 0, 0, 1, 1, 1]
    assert all(
        {"train/loss", "train/lr", "train/grad_norm", "train/tokens", "timing_s/step"} <= step.keys() for step in told
    )
    assert "tokens/s=" in paper.text


def test_what_truncation_cuts_is_counted(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    keys = ["data.max_length=30", "data.truncation=right", "data.val_files=null", "trainer.test_freq=-1"]
    sft(config(sft_home, tmp_path, *keys, "trainer.total_training_steps=1"), paper.console)
    [told] = metrics_of(tmp_path)
    cut = round(told["train/truncated_share"] * 24)
    assert 0 < cut <= 24 and f"{cut} of 24 conversations were truncated to data.max_length=30 tokens" in paper.text


def test_a_row_that_cannot_be_encoded_is_named(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    question = {"role": "user", "content": "?"}
    write_rows([{"messages": [{"role": "assistant", "content": "Hi"}, question]}], tmp_path / "odd.jsonl")
    with pytest.raises(SftError, match=r"odd, row 0: a training conversation must not begin .* run rally sft --check"):
        sft(config(sft_home, tmp_path / "run", f"data.train_files={tmp_path / 'odd.jsonl'}"), paper.console)


def test_a_format_that_does_not_read_the_calls_of_the_rows_is_refused(
    sft_home: Path, tmp_path: Path, paper: Paper
) -> None:
    with pytest.raises(SftError, match=r"data\.tool_format=glm45 does not parse calls .* set it to hermes"):
        sft(config(sft_home, tmp_path, "data.tool_format=glm45"), paper.console)


def test_questions_and_answers_by_their_columns(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    rows = [{"extra_info": {"question": f"What is {i}+0?", "answer": f"#### {i}"}} for i in range(8)]
    write_rows(rows, tmp_path / "pairs.parquet")
    columns = (
        "prompt_key: extra_info, prompt_dict_keys: question, response_key: extra_info, response_dict_keys: [answer]"
    )
    given = config(
        sft_home,
        tmp_path / "run",
        f"data={{{columns}, train_files: {tmp_path / 'pairs.parquet'}, val_files: null}}",
        "trainer.test_freq=-1",
    )
    show(given, paper.console)
    assert "#### 0" in paper.text
    assert sft(given, paper.console).metrics["train/tokens"] == sum(len(row.sampled) for row in pair_rows(8))


def pair_rows(count: int) -> list[Row]:
    codec = ChatCodec(tiny_tokenizer(), "hermes")
    asked = [{"role": "user", "content": f"What is {i}+0?"} for i in range(count)]
    return [
        conversation_row(codec, [question, {"role": "assistant", "content": f"#### {i}"}], SETTINGS)
        for i, question in enumerate(asked)
    ]


def test_a_diverged_step_keeps_its_conversations(sft_home: Path, tmp_path: Path, paper: Paper) -> None:
    keys = ["trainer.guards.max_grad_norm=1e-9", "data.train_batch_size=4"]
    with pytest.raises(DivergedError, match=r"diverged/step_000001\.safetensors"):
        sft(config(sft_home, tmp_path, *keys), paper.console)
    told = json.loads((tmp_path / "diverged" / "step_000001.json").read_text())
    assert len(told["sources"]) == 4
    assert all(source["conversation"] == f"train, row {i}" for i, source in told["sources"].items())
