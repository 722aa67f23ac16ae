"""The memory formula agrees with measured peaks, and a cheaper run costs less."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from transformers import Qwen2Config, Qwen2ForCausalLM

from rally.config import Config, load_config
from rally.models import attention
from rally.models.lora import LoraSettings
from rally.runs.activation_estimate import activation_bytes, packed_tokens
from rally.runs.build.update_settings import distillation_settings_of, policy_offload_of
from rally.runs.cost_estimate import Hardware, at_once, memory_problem, step_time, training_costs
from rally.runs.host_memory import host_costs, host_memory_problem
from rally.runs.planned_models import size_from
from rally.train import offload as offloading
from rally.train.batch import TrainBatch
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.reference import FrozenModel
from rally.train.teacher import Teachers
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
    assert lora["Adam's two moments"] < full["Adam's two moments"] / 50


def test_fp8_weights_of_the_rollout_are_counted() -> None:
    layers = 28 * (1536 * (2 * 1536 + 2 * 256) + 3 * 1536 * 8960)
    copies = named(f"{R}.quantization=fp8")["the rollout's FP8 weights"]
    assert layers <= copies < 1.001 * layers and "the rollout's FP8 weights" not in named()


def test_a_critic_is_counted_with_its_optimizer() -> None:
    size = size_from(QWEN)
    costs = {one.what: one.bytes for one in training_costs(config_of("algorithm.adv_estimator=gae"), QWEN, size, 2)}
    assert costs["critic with its optimizer"] == 14 * size.parameters
    assert costs["gradients, float32"] == 4 * size.parameters, "one is updated after the other"


def test_a_critic_has_no_output_head() -> None:
    untied = Qwen2Config(**{**QWEN.to_dict(), "tie_word_embeddings": False})
    size, config = size_from(untied), config_of("algorithm.adv_estimator=gae")
    costs = {one.what: one.bytes for one in training_costs(config, untied, size, 2)}
    assert costs["critic with its optimizer"] == 14 * (size.parameters - 151936 * 1536)
    problem = str(memory_problem(config, untied, size, 2, 16 * 10**9))
    assert problem.count("AdamW8bit") == 2 and "set critic.optim.optimizer=AdamW8bit" in problem


def test_the_plan_holds_the_larger_update() -> None:
    """Policy and critic are updated one after the other, each within its own limit."""
    critic, policy = "activations of the critic's update", "activations of the update"
    sizes = ("algorithm.adv_estimator=gae", "data.max_prompt_length=512", "data.max_response_length=512")
    limits = [f"{A}.ppo_max_token_len_per_gpu=8192", "critic.ppo_max_token_len_per_gpu=65536"]
    large = named(*sizes, *limits)
    assert policy not in large and large[critic] == 2 * named(*sizes, limits[0], f"{limits[1][:-5]}32768")[critic]
    assert named(*sizes, limits[0], f"{limits[1][:-5]}4096")[policy] == named(*sizes[1:], limits[0])[policy]
    resting = named(*sizes, *limits, "critic.fsdp_config.param_offload=true")
    assert resting == large, "its weights are there in its update"
    lora = named(*sizes, *limits, size=size_from(QWEN, LoraSettings(rank=16)))
    assert lora["gradients, float32"] == 4 * size_from(QWEN).parameters, "of the critic"
    offload = [f"{one}.fsdp_config.optimizer_offload=true" for one in (A, "critic")]
    keys = config_of(*sizes, *limits, *offload, "critic.model.enable_activation_offload=true")
    problem = str(memory_problem(keys, QWEN, size_from(QWEN), 2, 10**9))
    assert "lower critic.ppo_max_token_len_per_gpu" in problem and "to a smaller model" in problem
    assert "critic.fsdp_config.optimizer_offload=true" not in problem, "it is set"


def test_a_micro_batch_keeps_to_both_limits() -> None:
    sizes = ("data.max_prompt_length=512", "data.max_response_length=512", f"{A}.ppo_max_token_len_per_gpu=8192")
    rows = f"{A}.ppo_micro_batch_size_per_gpu"
    assert packed_tokens(config_of(*sizes)) == 8192 == packed_tokens(config_of(*sizes, f"{rows}=100"))
    assert packed_tokens(config_of(*sizes, f"{rows}=2")) == 2 * 1024
    assert packed_tokens(config_of(*sizes, f"{rows}=100", f"{A}.use_dynamic_bsz=false")) == 100 * 1024


def test_teachers_are_in_both_plans(tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path)
    weights, keys = 2 * size_from(SMALL).parameters, ["distillation.enabled=true"]
    for name in ("one", "two"):
        teacher = f"distillation.teacher_models.{name}"
        keys += [f"{teacher}.key={name}", f"{teacher}.model_path={tmp_path}", f"{teacher}.inference.dtype=bfloat16"]
    what, offload = "teachers of distillation", "distillation.param_offload=true"
    assert named(*keys)[what] == 2 * weights and host(*keys) == host()
    assert named(*keys, offload)[what] == weights and host(*keys, offload) == [2 * weights, *host()]
    assert named(*keys, "distillation.teacher_models.two.inference.dtype=float32")[what] == 3 * weights
    served = ("distillation.teacher_models.two.server.url=http://localhost:1",)
    served = (*served, "distillation.teacher_models.two.inference={name: rally}")
    assert named(*keys, *served)[what] == weights
    sharded = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", *keys[:1], *keys[2:4])
    assert named(*sharded)[what] == weights // 2
    QWEN.save_pretrained(tmp_path)
    size, single = size_from(QWEN), (*keys[:1], *keys[2:4], f"{M}.lora_rank=16")
    lora = size_from(QWEN, LoraSettings(rank=16))
    room = sum(named(f"{M}.lora_rank=16", size=lora).values())
    assert memory_problem(config_of(f"{M}.lora_rank=16"), QWEN, lora, 2, room) is None
    assert "or set distillation.param_offload=true" in str(memory_problem(config_of(*single), QWEN, lora, 2, room // 2))
    assert "let a server answer" in str(memory_problem(config_of(*single, offload), QWEN, lora, 2, room // 2))
    text = str(host_memory_problem(config_of(*single, offload), QWEN, size, 2, 10**9))
    assert "set distillation.param_offload=false" in text


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
    assert four["weights"] == 2 * count // 4 and four["Adam's two moments"] == pytest.approx(2 * count, rel=1e-6)
    assert 0 < four["gathered layers"] < 2 * count / 2
    assert four["engine's copy of the policy"] == 2 * count, "it stays while the policy is updated"
    served = "actor_rollout_ref.rollout.name=vllm"
    gathered = named("trainer.n_gpus_per_node=4", "trainer.device=cpu", f"{A}.fsdp_config.offload_policy=true", served)
    assert set(gathered) == {"gathered layers", "activations of the update"}
    activations = "activations of the update"
    assert named(f"{M}.enable_activation_offload=true")[activations] < plain[activations]


def test_what_cannot_fit_is_one_sentence_with_the_keys_that_help() -> None:
    size = size_from(QWEN)
    assert memory_problem(config_of(), QWEN, size, 2, 80 * 10**9) is None
    problem = memory_problem(config_of(), QWEN, size, 2, 16 * 10**9)
    assert problem is not None and "Adam's two moments" in problem and "optimizer_offload=true" in problem
    assert problem.startswith("an update needs about") and problem.count("optimizer_offload=true") == 1
    assert "or set actor.optim.optimizer=AdamW8bit" in problem
    keys = (f"{A}.fsdp_config.optimizer_offload=true", f"{A}.ppo_max_token_len_per_gpu=4096")
    assert memory_problem(config_of(*keys), QWEN, size, 2, 16 * 10**9) is None


def test_moments_of_8_bits_take_a_quarter() -> None:
    size, key = size_from(QWEN), f"{A}.optim.optimizer=AdamW8bit"
    plain, coded = (
        {cost.what: cost.bytes for cost in training_costs(config_of(*keys), QWEN, size, 2)} for keys in ((), (key,))
    )
    assert coded.pop("Adam's two moments") == pytest.approx(plain.pop("Adam's two moments") * 2.03125 / 8)
    assert coded == plain
    assert host(key) == [int(6.03125 * size.parameters) + 2 * size.parameters]


def host(*keys: str) -> list[int]:
    return [cost.bytes for cost in host_costs(config_of(*keys), QWEN, size_from(QWEN), 2)]


def test_main_memory_that_does_not_suffice_is_one_sentence() -> None:
    size = size_from(QWEN)
    states, weights = 12 * size.parameters, 2 * size.parameters
    offload, wait = f"{A}.fsdp_config.optimizer_offload=true", f"{A}.checkpoint.async_save=false"
    for save_freq in (-1, 5):  # the last step is always saved
        often = f"trainer.save_freq={save_freq}"
        assert host(often) == [states + weights] == host(often, wait)
        assert host(often, offload) == [states, states + weights]
        assert host(often, offload, wait) == [states, weights]
    two = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.launcher=ray")
    assert host(*two, offload, wait) == [states // 2, weights]
    sent = ("trainer.v1.trainer_mode=separate_async", f"{R}.checkpoint_engine.backend=nccl")
    assert host(*sent, wait) == [states + weights, weights]
    config = config_of("trainer.save_freq=5", offload)
    assert host_memory_problem(config, QWEN, size, 2, 40 * 10**9) is None
    assert host_memory_problem(config, QWEN, size, 2, 30 * 10**9) == (
        "the run needs about 37.4 GiB of main memory and 27.9 GiB are free (17.3 GiB what training keeps there, 20.1 "
        "GiB the copy of a checkpoint); set actor.checkpoint.async_save=false, or set "
        "actor.fsdp_config.optimizer_offload=false, or set actor.optim.optimizer=AdamW8bit, or set model.lora_rank, or "
        "use a machine with more main memory"
    )
    assert host_memory_problem(config_of(offload, wait), QWEN, size, 2, 30 * 10**9) is None


def test_replicas_hold_the_same_once_more() -> None:
    """HSDP: four ranks on two nodes, two of which hold everything together."""
    ranks = ("trainer.nnodes=2", "trainer.n_gpus_per_node=2", "trainer.launcher=ray", "trainer.device=cpu")
    hsdp, size = f"{A}.fsdp_config.fsdp_size=2", size_from(QWEN)
    four, two = (
        {cost.what: cost.bytes for cost in training_costs(config_of(*ranks, *keys), QWEN, size, 2)}
        for keys in ((), (hsdp,))
    )
    for what in ("weights", "gradients, float32", "master weights, float32", "Adam's two moments"):
        assert two[what] == pytest.approx(2 * four[what], rel=1e-6)
    states, weights, offload = 12 * size.parameters, 2 * size.parameters, f"{A}.fsdp_config.optimizer_offload=true"
    assert host(*ranks, offload) == [states // 2, states // 2 + weights]
    assert host(*ranks, offload, hsdp) == [states, states + weights], "each node holds one replica of all"
    assert host(*ranks, offload, f"{A}.fsdp_config.fsdp_size=1") == [2 * states, states + weights], "one is written"
    assert host(f"{A}.fsdp_config.fsdp_size=8") == host(), "one process is one shard"


def test_main_memory_holds_weights_at_rest() -> None:
    weights, copy = 2 * size_from(QWEN).parameters, host()[-1]
    assert host(f"{A}.fsdp_config.param_offload=true") == [copy], "the embedded engine samples from them"
    served = ("actor_rollout_ref.rollout.name=vllm", f"{A}.fsdp_config.param_offload=true")
    assert host(*served) == [weights, copy]
    reference = ("actor_rollout_ref.ref.fsdp_config.param_offload=true", f"{A}.use_kl_loss=true")
    assert host(*reference) == [weights, copy] and host(*served, *reference) == [2 * weights, copy]
    assert host(reference[0]) == [copy], "no KL term asks for it"
    critic = ("algorithm.adv_estimator=gae", "critic.fsdp_config.param_offload=true")
    assert host(*critic)[0] == weights


def test_main_memory_holds_the_critics_own_model(tmp_path: Path) -> None:
    """critic.model.path may be much smaller than the policy."""
    SMALL.save_pretrained(tmp_path)
    critic = ("algorithm.adv_estimator=gae", f"critic.model.path={tmp_path}")
    small = size_from(SMALL).parameters
    assert host(*critic) == [host()[0] + 14 * small]
    wide = (*critic, "critic.model.enable_activation_offload=true", "critic.ppo_max_token_len_per_gpu=16384")
    assert host(*wide)[0] == host(*wide, f"{A}.ppo_max_token_len_per_gpu=1024")[0], "it has a limit of its own"
    assert host(*wide)[0] == 2 * host(*wide, "critic.ppo_max_token_len_per_gpu=8192")[0]
    offload = (*critic, "critic.model.enable_activation_offload=true")
    many = host(*offload, "critic.model.recompute_num_layers=6")[0]
    assert many == host(*offload)[0] == host(*offload, f"{M}.enable_gradient_checkpointing=false")[0]
    assert host(*offload, "critic.model.recompute_num_layers=2")[0] > many
    assert host(*offload, f"{M}.recompute_num_layers=2")[0] > many, "without a value of its own it takes the policy's"
    assert many == 6 * 2 ** math.ceil(math.log2(2 * 128 * packed_tokens(config_of(*offload), critic=True)))


def test_main_memory_holds_activations_in_powers_of_two() -> None:
    copy, offload = host()[-1], f"{M}.enable_activation_offload=true"
    sizes = ("data.max_prompt_length=512", "data.max_response_length=512", f"{A}.ppo_max_token_len_per_gpu=16384")
    assert host(*sizes, offload) == [28 * 2**26, copy], "the inputs of 28 layers, of 50 MB each"
    every = host(*sizes, offload, f"{M}.enable_gradient_checkpointing=false")[0]
    # of a layer: 5 hidden states and the queries, the keys and values, and three tensors of the MLP
    assert every == 28 * (6 * 2**26 + 2 * 2**23 + 3 * 2**29)
    assert host(*sizes, offload, f"{M}.recompute_num_layers=21")[0] == 21 * 2**26 + 7 * every // 28
    problem = host_memory_problem(config_of(*sizes, offload), QWEN, size_from(QWEN), 2, 10**9)
    assert problem is not None and "set model.enable_activation_offload=false" in problem


SMALL = Qwen2Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def counted_peak(config: Config, tokens: int, monkeypatch: pytest.MonkeyPatch, teacher: Any = None) -> int:
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
        policy = Policy(
            model,
            OptimizerSettings(),
            2,
            config.model.enable_gradient_checkpointing,
            recompute=config.model.recompute_num_layers,
            offload=offload,
        )
        settings, teachers = UpdateSettings(mini_batch_groups=tokens // 256), None
        if (distilled := distillation_settings_of(config)) is not None:
            frozen = Qwen2ForCausalLM(teacher)
            for parameter in frozen.parameters():
                live.add(parameter)
            attention.install(frozen)
            teachers = Teachers({"all": FrozenModel(frozen)}, distilled, vocabulary=512)
            settings = replace(settings, distillation=distilled)
        live.peak = live.now
        for step in range(2):
            update_policy(policy, batch, settings, step=step, teachers=teachers)
        return live.peak


@pytest.mark.parametrize(
    ("mode", "wide", "checkpointing"),
    [
        ("k3", 1, True),
        ("forward_kl_topk", 1, False),
        ("forward_kl_full", 1, True),
        ("reverse_kl_full", 2, False),
        ("jsd_full", 1, True),
        ("k3", 8, True),
    ],
)
def test_the_plan_knows_what_a_divergence_holds(
    mode: str, wide: int, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher that is eight times as wide holds more in its forward pass than the policy in its backward pass."""
    teacher = Qwen2Config(**{**SMALL.to_dict(), "hidden_size": 128 * wide, "intermediate_size": 512 * wide})
    teacher.save_pretrained(tmp_path)
    sizes = ("data.max_prompt_length=1", "data.max_response_length=256", "data.train_batch_size=8")
    limits = (f"{A}.ppo_max_token_len_per_gpu=2056", f"{A}.ppo_mini_batch_size=8")
    keys = [f"{M}.enable_gradient_checkpointing={checkpointing}", "distillation.enabled=true"]
    keys += [f"distillation.teacher_models.teacher_model.model_path={tmp_path}"]
    config = config_of(*sizes, *limits, *keys, f"distillation.distillation_loss.loss_mode={mode}")
    planned = sum(one.bytes for one in training_costs(config, SMALL, size_from(SMALL), 4))
    assert planned == pytest.approx(counted_peak(config, 2048, monkeypatch, teacher), rel=0.1)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (f"{M}.enable_gradient_checkpointing=false",),
        (f"{M}.recompute_num_layers=3",),
        (f"{M}.enable_activation_offload=true",),
        (f"{A}.fsdp_config.optimizer_offload=true",),
        (f"{A}.fsdp_config.optimizer_offload=true", f"{M}.enable_activation_offload=true"),
    ],
    ids=[
        "checkpointing",
        "all activations",
        "three layers",
        "activations offloaded",
        "optimizer offloaded",
        "both offloaded",
    ],
)
def test_the_plan_is_within_a_tenth_of_the_counted_peak(keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("data.max_prompt_length=1", "data.max_response_length=256", "data.train_batch_size=8")
    limits = (f"{A}.ppo_max_token_len_per_gpu=2056", f"{A}.ppo_mini_batch_size=8")
    config = config_of(*sizes, *limits, *keys)
    planned = sum(one.bytes for one in training_costs(config, SMALL, size_from(SMALL), 4))
    assert planned == pytest.approx(counted_peak(config, 2048, monkeypatch), rel=0.1)
