"""The memory formula agrees with measured peaks, and a cheaper run costs less."""

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from rally.config import Config, load_config
from rally.models import attention
from rally.models.lora import LoraSettings
from rally.runs.build.update_settings import policy_offload_of
from rally.runs.cost_estimate import (
    Hardware,
    activation_bytes,
    at_once,
    memory_problem,
    size_from,
    step_time,
    training_costs,
)
from rally.train import offload as offloading
from rally.train.batch import TrainBatch
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.update import UpdateSettings, update_policy

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
QWEN = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
H200 = Hardware("H200", 141 * 10**9, 989e12, 4.8e12)


def config_of(*keys: str) -> Config:
    return load_config(overrides=[f"{R}.n=64", *keys])


@pytest.mark.parametrize(("tokens", "checkpointing", "measured_gb"), [(16384, True, 29.1), (16384, False, 59.1)])
def test_the_formula_lies_a_little_above_the_peaks_of_docs_benchmarks(
    tokens: int, checkpointing: bool, measured_gb: float
) -> None:
    keys = (f"{A}.ppo_max_token_len_per_gpu={tokens}", f"{M}.enable_gradient_checkpointing={checkpointing}")
    costs = training_costs(config_of(*keys), QWEN, size_from(QWEN), 2)
    assert 1.0 < sum(one.bytes for one in costs) / (measured_gb * 1e9) < 1.08


def test_adapters_need_no_optimizer_for_the_base_and_no_reference() -> None:
    size = size_from(QWEN, LoraSettings(rank=16))
    per_layer = 16 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert size.trained == 28 * per_layer
    kl = f"{A}.use_kl_loss=true"
    full = {one.what: one.bytes for one in training_costs(config_of(kl), QWEN, size_from(QWEN), 2)}
    lora = {one.what: one.bytes for one in training_costs(config_of(kl, f"{M}.lora_rank=16"), QWEN, size, 2)}
    assert full["reference policy"] == full["weights"] == lora["weights"] and "reference policy" not in lora
    assert lora["Adam's two moments, float32"] < full["Adam's two moments, float32"] / 50


def test_a_critic_is_counted_with_its_optimizer() -> None:
    size = size_from(QWEN)
    costs = {one.what: one.bytes for one in training_costs(config_of("algorithm.adv_estimator=gae"), QWEN, size, 2)}
    assert costs["critic with its optimizer"] == 18 * size.parameters


def test_time_falls_with_what_the_hardware_can_do_and_grows_with_the_work() -> None:
    config, size = config_of(), size_from(QWEN)
    running = at_once(config, QWEN, 2, 40 * 2**30)
    assert 0 < running <= config.rollout.max_num_seqs
    usual = step_time(config, QWEN, size, H200, running, 2)
    slow = step_time(config, QWEN, size, H200._replace(flops=H200.flops / 2), running, 2)
    longer = step_time(config_of("data.max_response_length=1024"), QWEN, size, H200, running, 2)
    assert slow.update == pytest.approx(2 * usual.update) and longer.total > usual.total
    assert activation_bytes(config_of("data.train_batch_size=1", f"{R}.n=2"), QWEN, 2) < activation_bytes(
        config, QWEN, 2
    )


def named(*keys: str, size: Any = None) -> dict[str, int]:
    return {one.what: one.bytes for one in training_costs(config_of(*keys), QWEN, size or size_from(QWEN), 2)}


def test_the_plan_knows_the_offload_keys_and_the_ranks() -> None:
    count = size_from(QWEN).parameters
    plain, offloaded = named(), named(f"{A}.fsdp_config.optimizer_offload=true")
    assert offloaded["weights"] == plain["weights"] == 2 * count
    assert sum(plain.values()) - sum(offloaded.values()) == 12 * count
    four = named("trainer.n_gpus_per_node=4", "trainer.device=cpu")
    assert four["weights"] == 2 * count // 4 and four["Adam's two moments, float32"] == pytest.approx(
        2 * count, rel=1e-6
    )
    assert 0 < four["gathered layers"] < 2 * count / 2
    gathered = named("trainer.n_gpus_per_node=4", "trainer.device=cpu", f"{A}.fsdp_config.offload_policy=true")
    assert set(gathered) == {"gathered layers", "activations of the update"}
    activations = "activations of the update"
    assert named(f"{M}.enable_activation_offload=true")[activations] < plain[activations]


def test_what_cannot_fit_is_one_sentence_with_the_keys_that_help() -> None:
    size = size_from(QWEN)
    assert memory_problem(config_of(), QWEN, size, 2, 80 * 10**9) is None
    problem = memory_problem(config_of(), QWEN, size, 2, 16 * 10**9)
    assert problem is not None and "Adam's two moments" in problem and "optimizer_offload=true" in problem
    assert problem.startswith("an update needs about") and problem.count("optimizer_offload=true") == 1
    keys = (f"{A}.fsdp_config.optimizer_offload=true", f"{A}.ppo_max_token_len_per_gpu=4096")
    assert memory_problem(config_of(*keys), QWEN, size, 2, 16 * 10**9) is None


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all tensors that operations return, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def add(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        if storage._cdata not in self._known:
            size = storage.nbytes()
            self._known.add(storage._cdata)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def uncounted(self, value: torch.Tensor) -> torch.Tensor:
        """A copy in main memory, which is not the device's."""
        with _disable_current_modes():
            return value.detach().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


SMALL = Qwen2Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def counted_peak(config: Config, tokens: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that two updates held at once, without what was in main memory."""
    offload = replace(policy_offload_of(config), min_activation_bytes=2**16)
    batch = TrainBatch(
        rows=[
            Row(
                ids=np.arange(i, i + 257, dtype=np.int32) % 512,
                sampled=np.arange(1, 257),
                logprobs=np.full(256, -5, np.float32),
                advantages=np.ones(256, np.float32) * (1 - 2 * (i % 2)),
                episode=i,
            )
            for i in range(tokens // 256)
        ],
        rewards_N=torch.zeros(tokens // 256),
        groups_N=torch.arange(tokens // 256),
        tokens_N=torch.full((tokens // 256,), 256),
    )
    with LiveBytes() as live:
        monkeypatch.setattr(offloading, "host_copy", live.uncounted)
        model = Qwen2ForCausalLM(SMALL)
        for parameter in model.parameters():
            live.add(parameter)
        attention.install(model)
        policy = Policy(model, OptimizerSettings(), 2, config.model.enable_gradient_checkpointing, offload=offload)
        live.peak = live.now
        for step in range(2):
            update_policy(policy, batch, UpdateSettings(mini_batch_groups=tokens // 256), step=step)
        return live.peak


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (f"{M}.enable_gradient_checkpointing=false",),
        (f"{M}.enable_activation_offload=true",),
        (f"{A}.fsdp_config.optimizer_offload=true",),
        (f"{A}.fsdp_config.optimizer_offload=true", f"{M}.enable_activation_offload=true"),
    ],
    ids=["checkpointing", "all activations", "activations offloaded", "optimizer offloaded", "both offloaded"],
)
def test_the_plan_is_within_a_tenth_of_the_counted_peak(keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("data.max_prompt_length=1", "data.max_response_length=256", "data.train_batch_size=8")
    limits = (f"{A}.ppo_max_token_len_per_gpu=2056", f"{A}.ppo_mini_batch_size=8")
    config = config_of(*sizes, *limits, *keys)
    planned = sum(one.bytes for one in training_costs(config, SMALL, size_from(SMALL), 4))
    assert planned == pytest.approx(counted_peak(config, 2048, monkeypatch), rel=0.1)
