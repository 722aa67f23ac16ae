"""Before the first step, the forwards of a run are compared with the model's own, and a difference stops the run."""

import asyncio
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import EASY, Paper, run_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.architectures import MAX_LENGTH, sampled, small_model, trained, words
from rally.chat import tiny_tokenizer
from rally.config import load_sft_config
from rally.data import write_rows
from rally.engines import EmbeddedEngine
from rally.models import attention
from rally.models.fp8 import Fp8Error
from rally.models.load import LoadError, load_model
from rally.models.rope import RopeError, decide_rope
from rally.recipes.arithmetic.data import conversations
from rally.runs.sft import sft
from rally.runs.train import train
from rally.track import RunFolder
from rally.train import startup_check
from rally.train.forward.logprobs import token_logprobs
from rally.train.forward.packed_attention import PackedAttention
from rally.train.packing import pack
from rally.train.policy import OptimizerSettings, Policy
from rally.train.reference import FrozenModel
from rally.train.startup_check import StartupCheckError, check_critic, check_training, compared_rows
from rally.train.value_model import with_value_head

CASES = {
    "llama": ("packed", "exact"),
    "gemma2": ("packed", "exact"),  # caps logits and scores
    "granite": ("packed", "exact"),  # divides its logits
    "mixtral": ("packed", "exact"),  # noise in its router
    "seed_oss+dropout": ("packed", "exact"),
    "phi3+longrope": ("packed", "exact"),
    "gpt_oss": ("packed", "exact"),
    "llama4_text": ("packed", "exact"),  # chunked attention
    "deepseek_v3": ("packed", "exact"),  # latent attention
    "gemma4_text": ("packed", "exact"),
    "diffllama": ("packed", "exact"),
    "nemotron": ("packed", "refused"),  # its layers drop keyword arguments
    "phimoe": ("packed", "exact"),  # samples experts in train mode
    "gpt_neo": ("row by row", "refused"),  # counts its window in packed tokens
    "qwen3_5_text": ("packed", "exact"),  # state
    "lfm2": ("packed", "exact"),
    "nemotron_h": ("packed", "exact"),
    "recurrent_gemma": ("packed", "exact"),
    "cpmant": ("refused", "refused"),
}


@pytest.mark.drill(
    "reliability",
    "A model whose layers keep state, scale logits, drop keywords or add noise",
    "It is trained exactly, if need be row by row, or refused with the numbers",
)
@pytest.mark.parametrize("name", CASES)
def test_architectures_are_exact_or_refused(name: str) -> None:
    model = small_model(name)
    forward = trained(copy.deepcopy(model), copy.deepcopy(model), checkpointing=name == "qwen3_5_text")
    rollout = asyncio.run(sampled(copy.deepcopy(model), model))
    assert (forward.outcome, rollout.outcome) == CASES[name], (forward, rollout)


def test_the_sweep_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that the check accepts and that is wrong on other rows counts as wrong."""
    history = PackedAttention._history

    def forgetful(self: PackedAttention, x_TKD: torch.Tensor) -> torch.Tensor:
        return history(self, x_TKD if len(x_TKD) < 300 else x_TKD.flip(0))

    monkeypatch.setattr(PackedAttention, "_history", forgetful)
    model = small_model("llama")
    assert trained(model, copy.deepcopy(model), checkpointing=False).outcome == "WRONG"


def policy_of(model: Any) -> Policy:
    attention.install(model)
    return Policy(model, OptimizerSettings(), 1)


def test_windows_are_compared_though_the_rows_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral has a window of 128 here, and the compared rows have 70 tokens. A forward without windows differs only
    beyond it."""
    mask = PackedAttention._mask
    monkeypatch.setattr(
        PackedAttention,
        "_mask",
        lambda self, t, length, scores, like: mask(self, t, length, scores._replace(window=None), like),
    )
    notes: list[str] = []
    check_training(policy_of(small_model("mistral")), compared_rows([words(1, 70)], 400), 400, notes.append)
    assert "sliding_window shortened to 16" in notes[0] and "one at a time" in notes[0]
    notes.clear()
    check_training(policy_of(small_model("mistral")), compared_rows([words(1, 70)], 100), 100, notes.append)
    assert not notes, "no row of that run leaves the window"


def test_short_prompts_are_lengthened_and_long_ones_stay_within_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    long = compared_rows([words(1, 120), words(2, 110)], 128)
    assert sorted(len(row.ids) for row in long) == [110, 115, 120, 128]
    assert compared_rows([[5], []], 400) == []
    mask = PackedAttention._mask
    monkeypatch.setattr(
        PackedAttention,
        "_mask",
        lambda self, t, length, scores, like: mask(self, t, length, scores._replace(window=None), like),
    )
    notes: list[str] = []
    rows = compared_rows([words(1, 5), words(2, 7)], 400)
    check_training(policy_of(small_model("mistral")), rows, 400, notes.append)
    assert "sliding_window shortened to 16" in notes[0], "five tokens would not leave the window"


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PackedAttention.attend

    def doubled(self: PackedAttention, *args: Any) -> torch.Tensor:
        output = attend(self, *args)
        return output.detach() + 2 * (output - output.detach())

    monkeypatch.setattr(PackedAttention, "attend", doubled)
    notes: list[str] = []
    check_training(policy_of(small_model("llama")), compared_rows([words(1, 70)], MAX_LENGTH), MAX_LENGTH, notes.append)
    assert "the gradient of LlamaForCausalLM is not computed correctly" in notes[0]


class Undetermined(torch.autograd.Function):
    """An operation whose gradient has no deterministic form on a GPU."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("fast_backward_cuda does not have a deterministic implementation")
        return gradient


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_an_operation_without_a_deterministic_form_is_found(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; on a CPU nothing is to be turned on."""

    @contextmanager
    def turned_on(_: torch.device) -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    model = small_model("llama")
    monkeypatch.setattr(startup_check, "deterministic_algorithms", turned_on)
    norm = model.base_model.norm
    norm.register_forward_hook(lambda _, inputs, output: Undetermined.apply(output))
    body = with_value_head(model.base_model) if role == "critic" else model
    attention.install(body)
    rows, notes = compared_rows([words(1, 70)], MAX_LENGTH), list[str]()
    check = check_critic if role == "critic" else check_training
    check(Policy(body, OptimizerSettings(), 1), rows, MAX_LENGTH, notes.append)
    with pytest.raises(StartupCheckError, match=r"fast_backward_cuda.*; set rollout\.deterministic=false"):
        check(Policy(body, OptimizerSettings(), 1, deterministic=True), rows, MAX_LENGTH, notes.append)
    assert not notes and not torch.are_deterministic_algorithms_enabled()


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Log-probabilities that are 1 % off."""

    async def generate(*args: Any, **kwargs: Any) -> Any:
        generation = await function(*args, **kwargs)
        return replace(generation, logprobs=tuple(1.01 * p for p in generation.logprobs))

    return generate


@pytest.mark.drill(
    "reliability",
    "An engine that records other log-probabilities than the model's",
    "The run stops before its first step and states the numbers",
)
def test_a_run_with_a_wrong_engine_stops_before_its_first_step(
    home: Path, tmp_path: Path, paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedEngine, "generate", scaled(EmbeddedEngine.generate))
    short = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "data.val_files=null")
    with pytest.raises(StartupCheckError, match=r"does not sample from Qwen2ForCausalLM .* differs by at most .*mean"):
        train(run_config(home, tmp_path / "a", *short), paper.console)
    assert not RunFolder(tmp_path / "a").read_metrics()
    train(run_config(home, tmp_path / "b", *short, "trainer.startup_check=false"), paper.console)


def test_a_run_says_what_it_compared(home: Path, tmp_path: Path, paper: Paper) -> None:
    short = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "data.val_files=null")
    train(run_config(home, tmp_path, *short), paper.console)
    assert "start-up check: the training forward differs by at most" in paper.text
    assert "start-up check: the rollout differs by at most" in paper.text


def test_a_run_in_fp8_says_what_it_measured(home: Path, tmp_path: Path, paper: Paper) -> None:
    short = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "data.val_files=null")
    fp8 = "actor_rollout_ref.rollout.quantization=fp8"
    train(run_config(home, tmp_path / "a", *short, fp8), paper.console)
    assert "linear layers of the rollout compute in FP8" in paper.text
    assert "start-up check: the rollout in FP8 differs by at most" in paper.text
    assert "rollout.quantization=fp8 without algorithm.rollout_correction" in paper.text
    [row] = [row for row in RunFolder(tmp_path / "a").read_metrics() if row.step == 1]
    assert 1e-6 < row.metrics["actor/rollout_mismatch_kl"] < 0.3

    corrected = Paper()
    train(run_config(home, tmp_path / "b", *short, fp8, CORRECTED), corrected.console)
    assert "without algorithm.rollout_correction" not in corrected.text
    [row] = [row for row in RunFolder(tmp_path / "b").read_metrics() if row.step == 1]
    assert row.metrics["rollout_corr/k3_kl"] > 1e-6


CORRECTED = "algorithm.rollout_correction.rollout_is=token"


def test_experts_in_fp8_are_refused_before_weights_are_loaded(
    home: Path, tmp_path: Path, paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rally.runs.build.models.load_model", lambda *_, **__: pytest.fail("weights are loaded"))
    Qwen3MoeConfig().save_pretrained(tmp_path / "model")
    fp8 = (f"actor_rollout_ref.model.path={tmp_path / 'model'}", "actor_rollout_ref.rollout.quantization=fp8")
    with pytest.raises(Fp8Error, match=r"rollout.quantization=fp8 does not support qwen3_moe, which has experts"):
        train(run_config(home, tmp_path / "run", *fp8), paper.console)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with linear attention, its tokenizer, and conversations."""
    folder, tokenizer = tmp_path_factory.mktemp("recurrent"), tiny_tokenizer()
    small = small_model("qwen3_5_text").config
    config = CONFIG_MAPPING["qwen3_5_text"](**{**small.to_diff_dict(), "vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(conversations(8, {"good": 1.0}, EASY, 0), folder / "train.parquet")
    return folder


@pytest.mark.drill(
    "reliability",
    "`rally sft` of a recurrent model with 1 and with 8 rows per micro-batch",
    "Both give the same losses",
)
def test_losses_of_a_recurrent_model_do_not_depend_on_packing(recurrent: Path, tmp_path: Path, paper: Paper) -> None:
    losses = []
    for rows in (1, 8):
        out = tmp_path / str(rows)
        overrides = [
            f"model.path={recurrent / 'model'}",
            f"data.train_files={recurrent / 'train.parquet'}",
            f"data.micro_batch_size_per_gpu={rows}",
            "data.train_batch_size=8",
            "data.use_dynamic_bsz=false",
            "trainer.total_training_steps=2",
            "optim.lr=1e-3",
            f"trainer.default_local_dir={out}",
        ]
        sft(load_sft_config(overrides=overrides), paper.console)
        losses.append([row.metrics["train/loss"] for row in RunFolder(out).read_metrics()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert "computed one at a time" not in paper.text


@pytest.mark.drill(
    "reliability",
    "A model that cannot be packed, with a frozen reference for the KL",
    "The reference computes its rows in the same way; before the first update the KL is 0",
)
@pytest.mark.parametrize("name", ["gpt_neo", "nemotron"])
def test_a_reference_computes_rows_as_the_policy_does(name: str) -> None:
    model = small_model(name)
    rows = compared_rows([words(1, 70), words(2, 70)], MAX_LENGTH)
    twin = copy.deepcopy(model)
    attention.install(model)
    policy = Policy(model, OptimizerSettings(), 1)
    warnings: list[str] = []
    check_training(policy, rows, MAX_LENGTH, warnings.append)
    assert "exact and slower" in warnings[0]
    packed = pack(rows, policy.device)
    reference = FrozenModel(twin, like=model)(packed, 1.0)
    torch.testing.assert_close(reference, token_logprobs(model, packed).logp_M.detach(), atol=1e-5, rtol=0)
    assert (FrozenModel(small_model(name))(packed, 1.0) - reference).abs().max() > 0.1  # packed, it is wrong


def test_longrope_is_decided_by_the_longest_history() -> None:
    """A row's log-probabilities must not depend on the row beside it, nor its cached keys on how long it becomes."""
    for length, long in ((64, False), (400, True)):
        model = small_model("phi3+longrope")
        short = model.model.rotary_emb.inv_freq.clone()
        decide_rope(model, length)
        alone = model(input_ids=torch.tensor([words(1, 40)])).logits[0]
        beside = model(input_ids=torch.tensor([words(1, 40) + words(2, 40)])).logits[0, :40]
        assert torch.allclose(alone, beside, atol=1e-5)
        assert torch.equal(model.model.rotary_emb.inv_freq, short) != long


def test_dynamic_rope_beyond_its_first_length_is_refused() -> None:
    with pytest.raises(RopeError, match=r"beyond 512 tokens, and this run allows 600; lower the lengths to 512"):
        decide_rope(small_model("llama+dynamic"), 600)


def test_dropout_by_the_user_is_refused(home: Path) -> None:
    with pytest.raises(LoadError, match=r"attention_dropout.*trained without dropout"):
        load_model(str(home / "model"), overrides={"attention_dropout": 0.1})
