"""A whole small run: its files, how it resumes, and its errors."""

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from train_cases import EASY, Paper, run_config, same, weights
from transformers import AutoModelForCausalLM

from rally.chat import ChatCodec, tiny_tokenizer
from rally.data import DataError, load_tasks, write_rows
from rally.loops import Job
from rally.recipes.arithmetic import data as arithmetic
from rally.rewards import RewardError
from rally.runs import build
from rally.runs.build.run_inputs import RunError
from rally.runs.dry_run import dry_run
from rally.runs.evaluate import evaluate
from rally.runs.row_checks import fitting
from rally.runs.train import train
from rally.track import MetricsRow, RunFolder
from rally.train.forward import logprobs
from rally.train.rollout.rollout import Rollout, RolloutError, RolloutResult
from rally.train.trainer import Trainer
from rally.types import Episode, RallyError

KNOWN_NAMES = (
    *("critic/rewards/mean", "critic/score/max", "critic/advantages/mean", "response_length/mean", "num_turns/mean"),
    *("prompt_length/mean", "response_length/clip_ratio", "tool/calls", "stop/length", "failures/loop"),
    *("timing_s/gen", "timing_s/update_actor", "timing_s/step", "perf/throughput", "perf/total_num_tokens"),
    *("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac", "actor/lr"),
    *("response_length_non_aborted/mean", "response/aborted_ratio", "prompt_length/clip_ratio"),
    *("timing_s/agent_loop/slowest/generate_sequences", "timing_per_token_ms/gen", "timing_per_token_ms/update_actor"),
    *("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", "training/rollout_probs_diff_std"),
    *("training/rollout_actor_probs_pearson_corr", "perf/cpu_memory_used_gb"),
    *("actor/rollout_mismatch_kl", "training/global_step", "training/epoch", "reward/length/mean"),
)
NO_VALIDATION = ("data.val_files=null", "trainer.val_before_train=false")


@pytest.fixture(scope="module")
def finished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run of three steps. Only read; `copy_of` makes one that may be changed."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(run_config(home, folder), Paper().console)
    return folder


@pytest.fixture
def copy_of_finished(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics_of(folder: Path, step: int) -> dict[str, float]:
    [row] = [row for row in RunFolder(folder).read_metrics() if row.step == step]
    assert isinstance(row, MetricsRow)
    return row.metrics


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("global_step_*"))


def actor(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return weights(AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"global_step_{step}" / "actor"))


def rewards(episodes: Sequence[Episode]) -> list[float | None]:
    return [episode.reward for episode in episodes]


def test_a_run_leaves_everything_in_its_folder(finished: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["trainer"]["total_training_steps"] == 3 and config["actor_rollout_ref"]["rollout"]["n"] == 4
    assert json.loads((finished / "versions.json").read_text())["torch"] == version("torch")
    assert [line["step"] for line in lines(finished)] == [0, 1, 2, 3]
    folder = RunFolder(finished)
    assert folder.episode_steps() == [1, 2, 3] and folder.episode_steps(validate=True) == [0, 3]
    assert checkpoints(finished) == ["global_step_1", "global_step_2", "global_step_3"]


def test_the_metrics_have_the_names_users_know(finished: Path) -> None:
    for step in (1, 2, 3):
        missing = [name for name in KNOWN_NAMES if name not in metrics_of(finished, step)]
        assert missing == []
    last = metrics_of(finished, 3)
    assert last["training/global_step"] == 3 and last["critic/rewards/mean"] > 0 and last["episodes/count"] == 12
    for step in (0, 3):
        assert f"val-core/{arithmetic.DATA_SOURCE}/reward/mean@1" in metrics_of(finished, step)
    assert f"val-core/{arithmetic.DATA_SOURCE}/reward/mean@1" not in metrics_of(finished, 1)


def test_rollout_and_trainer_see_the_same_policy_at_every_step(finished: Path) -> None:
    for step in (1, 2, 3):
        metrics = metrics_of(finished, step)
        assert metrics["actor/rollout_mismatch_kl"] <= 1e-6 and metrics["actor/rollout_mismatch_max"] <= 1e-4
        assert metrics["actor/grad_norm"] > 0


def test_the_metrics_are_those_of_the_recorded_episodes(finished: Path) -> None:
    for step in (1, 2, 3):
        episodes = RunFolder(finished).read_episodes(step)
        values = [episode.reward for episode in episodes]
        assert len(episodes) == 12 and len({episode.group for episode in episodes}) == 3
        assert metrics_of(finished, step)["critic/rewards/mean"] == pytest.approx(sum(map(float, values)) / 12)
        versions = {span.version for e in episodes for s in e.segments for span in s.spans}
        assert versions == {step - 1}, "each step samples from the weights of the step before"


def test_every_step_changed_the_weights(finished: Path) -> None:
    assert not same(actor(finished, 1), actor(finished, 2)) and not same(actor(finished, 2), actor(finished, 3))


def test_a_resumed_run_goes_on_as_the_first_one_did(home: Path, copy_of_finished: Path, paper: Paper) -> None:
    first = RunFolder(copy_of_finished).read_episodes(3)
    shutil.rmtree(copy_of_finished / "checkpoints" / "global_step_3")
    outcome = train(run_config(home, copy_of_finished), paper.console)
    assert outcome.steps == 3 and f"{copy_of_finished / 'checkpoints' / 'global_step_2'}, step 2" in paper.text
    assert [line["step"] for line in lines(copy_of_finished)] == [0, 1, 2, 3]
    assert [line["step"] for line in lines(copy_of_finished / "rewound-1")] == [3]
    assert (copy_of_finished / "rewound-1" / "episodes" / "train_000003.jsonl").is_file()
    again = RunFolder(copy_of_finished).read_episodes(3)
    assert [e.segments[0].response_ids for e in again] == [e.segments[0].response_ids for e in first]
    assert rewards(again) == rewards(first)


def test_in_deterministic_mode_a_resumed_run_ends_with_the_same_bits(home: Path, tmp_path: Path) -> None:
    mode = "actor_rollout_ref.rollout.deterministic=true"
    for name in ("whole", "again", "cut"):
        train(run_config(home, tmp_path / name, mode, *NO_VALIDATION), Paper().console)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "global_step_3")
    train(run_config(home, tmp_path / "cut", mode, *NO_VALIDATION), Paper().console)
    whole = actor(tmp_path / "whole", 3)
    for name in ("again", "cut"):
        other = actor(tmp_path / name, 3)
        assert all(torch.equal(whole[key], other[key]) for key in whole), name
        for metric in ("actor/pg_loss", "actor/grad_norm", "actor/rollout_mismatch_kl", "critic/rewards/mean"):
            assert metrics_of(tmp_path / "whole", 3)[metric] == metrics_of(tmp_path / name, 3)[metric]


def test_a_run_cut_off_before_its_first_checkpoint_begins_again_and_counts_no_step_twice(
    home: Path, copy_of_finished: Path, paper: Paper
) -> None:
    shutil.rmtree(copy_of_finished / "checkpoints")
    train(run_config(home, copy_of_finished, "trainer.total_training_steps=1"), paper.console)
    assert [line["step"] for line in lines(copy_of_finished)] == [0, 1]
    assert [line["step"] for line in lines(copy_of_finished / "rewound-1")] == [0, 1, 2, 3]
    assert RunFolder(copy_of_finished).episode_steps() == [1]


def test_a_run_cut_off_while_it_writes_its_metrics_loses_no_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise KeyboardInterrupt
        log(trainer, step, metrics)

    log = Trainer._log
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_log", cut_off)
        train(run_config(home, tmp_path, *NO_VALIDATION), Paper().console)
    train(run_config(home, tmp_path, *NO_VALIDATION), Paper().console)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_step_does_not_depend_on_random_numbers_drawn_before_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, as in some families: otherwise a resumed run would draw other numbers than the first one."""
    hidden = logprobs.hidden_states
    monkeypatch.setattr(
        logprobs, "hidden_states", lambda model, *rest: F.dropout(hidden(model, *rest), 0.2, model.training)
    )
    for seed in (1, 2):
        torch.manual_seed(seed)
        out = tmp_path / str(seed)
        unchecked = "trainer.startup_check=false"  # which would refuse the dropout
        train(run_config(home, out, "trainer.total_training_steps=1", unchecked, *NO_VALIDATION), Paper().console)
    assert metrics_of(tmp_path / "1", 1)["actor/rollout_mismatch_kl"] > 1e-4, "dropout must have been there"
    for name, value in actor(tmp_path / "1", 1).items():
        assert torch.allclose(value, actor(tmp_path / "2", 1)[name], atol=1e-6), name


def test_a_command_that_cannot_go_on_leaves_the_configuration_as_it_was(home: Path, copy_of_finished: Path) -> None:
    written = (copy_of_finished / "config.yaml").read_text(encoding="utf-8")
    with pytest.raises(RallyError, match="was trained without LoRA"):
        train(
            run_config(home, copy_of_finished, "actor_rollout_ref.model.lora_rank=2", "trainer.total_training_steps=4"),
            Paper().console,
        )
    assert (copy_of_finished / "config.yaml").read_text(encoding="utf-8") == written


def test_a_finished_run_cannot_go_on_and_says_what_to_do(home: Path, finished: Path, paper: Paper) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"is already at step 3 of 3, so there is nothing left to train; raise"):
        train(run_config(home, finished), paper.console)
    with pytest.raises(RunError, match="resume_mode=disable would overwrite them; choose another"):
        train(run_config(home, finished, "trainer.resume_mode=disable"), paper.console)
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_another_run_may_start_from_a_checkpoint_by_name(home: Path, finished: Path, tmp_path: Path) -> None:
    overrides = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={finished / 'checkpoints' / 'global_step_2'}",
        *NO_VALIDATION,
    )
    train(run_config(home, tmp_path / "other", *overrides), Paper().console)
    assert [line["step"] for line in lines(tmp_path / "other")] == [3]
    assert rewards(RunFolder(tmp_path / "other").read_episodes(3)) == rewards(RunFolder(finished).read_episodes(3))


def test_evaluation_writes_metrics_and_episodes_and_trains_nothing(home: Path, finished: Path, tmp_path: Path) -> None:
    name = f"val-core/{arithmetic.DATA_SOURCE}/reward/mean@1"
    for out, run, overrides in (
        ("eval", evaluate, ("data.train_files=null",)),
        ("val_only", train, ("trainer.val_only=true",)),
    ):
        outcome = run(run_config(home, tmp_path / out, *overrides), Paper().console)
        assert outcome.steps == 0 and outcome.metrics[name] == metrics_of(finished, 0)[name]
        folder = RunFolder(outcome.folder)
        assert metrics_of(outcome.folder, 0)[name] == outcome.metrics[name]
        assert len(folder.read_episodes(0, validate=True)) == 4 and folder.episode_steps() == []
        assert not (tmp_path / out / "checkpoints").exists()
    with pytest.raises(RunError, match=r"nothing to evaluate: data.val_files is not set"):
        evaluate(run_config(home, tmp_path / "none", "data.val_files=null"), Paper().console)


def test_evaluating_in_a_run_folder_leaves_what_training_wrote(home: Path, copy_of_finished: Path) -> None:
    before = {path: path.read_bytes() for path in copy_of_finished.rglob("*") if path.is_file()}
    checkpoint = copy_of_finished / "checkpoints" / "global_step_3" / "actor"
    config = run_config(home, copy_of_finished, f"actor_rollout_ref.model.path={checkpoint}")
    metrics = evaluate(config, Paper().console).metrics
    name = f"val-core/{arithmetic.DATA_SOURCE}/reward/mean@1"
    assert metrics[name] == metrics_of(copy_of_finished, 3)[name], "what was saved is what was validated"
    assert {path: path.read_bytes() for path in before} == before


def test_a_sampled_validation_keeps_greedy_beside_it(home: Path, tmp_path: Path) -> None:
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    overrides = (f"{kwargs}.temperature=1.0", f"{kwargs}.do_sample=true", f"{kwargs}.n=3", "data.val_batch_size=2")
    outcome = evaluate(run_config(home, tmp_path, *overrides), Paper().console)
    metrics = outcome.metrics
    core = f"val-core/{arithmetic.DATA_SOURCE}/reward"
    assert {f"{core}/mean@3", f"{core}/best@3/mean", f"{core}/mean@1/greedy"} <= metrics.keys()
    assert metrics[f"{core}/best@3/mean"] > metrics[f"{core}/mean@3"]
    recorded = RunFolder(outcome.folder).read_episodes(0, validate=True)
    greedy = [episode for episode in recorded if episode.group.endswith("-greedy")]
    assert (len(recorded), len(greedy)) == (4 * 3 + 4, 4) and len({episode.id for episode in recorded}) == 16
    assert sum(e.reward or 0 for e in greedy) / 4 == pytest.approx(metrics[f"{core}/mean@1/greedy"])


def test_validation_runs_all_rows_at_once_unless_told_otherwise(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    collect = Rollout.collect

    async def counted(rollout: Rollout, jobs: Sequence[Job], *rest: Any, **named: Any) -> RolloutResult:
        sizes.append(len(jobs))
        return await collect(rollout, jobs, *rest, **named)

    monkeypatch.setattr(Rollout, "collect", counted)
    for number, override in enumerate(("data.val_batch_size=null", "data.val_batch_size=3", "data.val_max_samples=2")):
        outcome = evaluate(run_config(home, tmp_path / str(number), override), Paper().console)
    assert sizes == [4, 3, 1, 2]
    ids = [episode.task.id for episode in RunFolder(outcome.folder).read_episodes(0, validate=True)]
    assert ids == ["test:0", "test:1"], "without validation_shuffle the first rows are taken, at every step the same"


def test_a_kl_loss_starts_at_zero_and_grows(home: Path, tmp_path: Path) -> None:
    actor_key = "actor_rollout_ref.actor"
    overrides = (f"{actor_key}.use_kl_loss=true", f"{actor_key}.kl_loss_coef=0.1", "trainer.total_training_steps=2")
    train(run_config(home, tmp_path, *overrides, *NO_VALIDATION), Paper().console)
    first, second = (metrics_of(tmp_path, step)["actor/kl_loss"] for step in (1, 2))
    assert first == pytest.approx(0, abs=1e-9) and second > 1e-7


def test_reward_kwargs_arrive_and_episodes_also_go_where_asked(home: Path, tmp_path: Path) -> None:
    overrides = (
        "custom_reward_function.reward_kwargs.bonus=2.0",
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        f"trainer.validation_data_dir={tmp_path / 'validations'}",
        "data.max_prompt_length=10",
        "data.truncation=left",
    )
    train(run_config(home, tmp_path / "run", *overrides), Paper().console)
    assert metrics_of(tmp_path / "run", 1)["critic/rewards/min"] >= 2.0
    for name, validate in (("rollouts", False), ("validations", True)):
        assert RunFolder(tmp_path / name).read_episodes(1, validate) == RunFolder(tmp_path / "run").read_episodes(
            1, validate
        )
    assert not RunFolder(tmp_path / "rollouts").episode_steps(validate=True)
    assert {len(e.segments[0].prompt_ids) for e in RunFolder(tmp_path / "run").read_episodes(1)} == {10}


def test_a_reward_that_fails_stops_the_run_with_its_own_words(home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def compute_score(**kwargs):\n    raise KeyError('no such field')\n", encoding="utf-8")
    config = run_config(home, tmp_path / "run", f"custom_reward_function.path={broken}", *NO_VALIDATION)
    with pytest.raises(RolloutError, match=r"12 of 12 episodes failed, more than rollout.max_failed_share=0.1") as stop:
        train(config, Paper().console)
    assert "no such field" in str(stop.value)


def test_a_step_without_signal_says_so_and_changes_nothing(home: Path, tmp_path: Path, paper: Paper) -> None:
    flat = tmp_path / "flat.py"
    flat.write_text("def compute_score(**kwargs):\n    return 1.2\n", encoding="utf-8")
    config = run_config(
        home,
        tmp_path / "run",
        f"custom_reward_function.path={flat}",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
        "trainer.guards.patience=1",
        *NO_VALIDATION,
    )
    train(config, paper.console)
    assert "every reward of the first 1 steps was 1.2, so nothing can be learned yet" in paper.text
    metrics = metrics_of(tmp_path / "run", 1)
    assert metrics["groups/live_share"] == 0 and metrics["critic/advantages/max"] == 0
    assert metrics["actor/trained_tokens"] == 0
    assert same(actor(tmp_path / "run", 1), weights(AutoModelForCausalLM.from_pretrained(home / "model")))
    assert [line["step"] for line in lines(tmp_path / "run")] == [1], "without validation there is no step 0"


def test_the_dry_run_shows_the_prompt_and_writes_nothing(home: Path, tmp_path: Path, paper: Paper) -> None:
    dry_run(run_config(home, tmp_path / "none"), paper.console)
    for words in (
        "all observed (mask 0)",
        "calculator",
        "3 of 3 prompts x 4 episodes",
        "memory plan",
        "What is ",
        "a rollout can use",
    ):
        assert words in paper.text
    assert "the rollout's FP8 weights" not in paper.text
    dry_run(run_config(home, tmp_path / "none", "actor_rollout_ref.rollout.quantization=fp8"), paper.console)
    assert "the rollout's FP8 weights" in paper.text
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", [dry_run, train, evaluate])
def test_a_reward_function_that_cannot_be_loaded_ends_a_run_before_weights_are(
    home: Path, tmp_path: Path, paper: Paper, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for load in ("trainer_of", "model_of"):
        monkeypatch.setattr(build, load, lambda *_, **__: pytest.fail("weights were loaded"))
    (tmp_path / "reward.py").write_text("import no_such_module\n")
    config = run_config(home, tmp_path / "none", f"custom_reward_function.path={tmp_path / 'reward.py'}")
    with pytest.raises(RewardError, match="no_such_module"):
        command(config, paper.console)


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), "hermes")


@pytest.fixture
def long_rows(home: Path, tmp_path: Path) -> Path:
    """Twelve short prompts with one long one in the middle."""
    rows = list(arithmetic.rows(12, 0, "train", EASY))
    rows.insert(5, {**rows[0], "prompt": [{"role": "user", "content": "What is 1" + "+1" * 40 + "?"}]})
    write_rows(rows, tmp_path / "long.parquet")
    return tmp_path / "long.parquet"


def test_prompts_too_long_are_an_error_that_names_the_first(
    home: Path, long_rows: Path, codec: ChatCodec, paper: Paper
) -> None:
    tasks = load_tasks(long_rows)
    config = run_config(home, long_rows.parent / "run")
    with pytest.raises(DataError, match=r"1 of 13 prompts exceed data.max_prompt_length=32 .*raise it, set") as error:
        fitting(tasks, codec, config, paper.console)
    assert tasks[5].id in str(error.value)


def test_prompts_too_long_can_be_left_out_or_cut(home: Path, long_rows: Path, codec: ChatCodec, paper: Paper) -> None:
    tasks, out = load_tasks(long_rows), long_rows.parent / "run"
    kept = fitting(tasks, codec, run_config(home, out, "data.filter_overlong_prompts=true"), paper.console)
    assert [t.id for t in kept] == [t.id for i, t in enumerate(tasks) if i != 5]
    assert "1 of 13 prompts exceed" in paper.text and "they are left out" in paper.text
    assert len(fitting(tasks, codec, run_config(home, out, "data.truncation=middle"), paper.console)) == 13
    assert "they are truncated (middle)" in paper.text
    exact = f"data.max_prompt_length={len(codec.encode_prompt(tasks[0].prompt))}"
    assert (
        len(fitting(tasks, codec, run_config(home, out, exact, "data.filter_overlong_prompts=true"), paper.console))
        == 12
    )
    none_fit = run_config(home, out, "data.filter_overlong_prompts=true", "data.max_prompt_length=2")
    with pytest.raises(DataError, match=r"13 of 13 prompts exceed .* so filtering leaves none"):
        fitting(tasks, codec, none_fit, paper.console)


def test_rows_without_tools_kwargs_are_refused_where_they_are_needed(
    home: Path, long_rows: Path, codec: ChatCodec, paper: Paper
) -> None:
    config = run_config(home, long_rows.parent / "run", "data.need_tools_kwargs=true")
    with pytest.raises(DataError, match=r"has no extra_info.tools_kwargs, which data.need_tools_kwargs=true requires"):
        fitting(load_tasks(long_rows), codec, config, paper.console)
