"""Layers that keep their activations change no bit, and fill the memory that is free without exceeding it."""

from typing import Any

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from small_models import make_model
from train_cases import same, uneven_episodes, weights
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.architectures import small_model
from rally.algos.distillation import DistillationSettings
from rally.config import ConfigError, load_config, load_sft_config
from rally.models import attention
from rally.models.load import LoadError
from rally.models.lora import LoraSettings, add_adapters
from rally.train import recompute
from rally.train.batch import TrainBatch, build_batch
from rally.train.offload import OffloadSettings
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.reference import FrozenModel
from rally.train.teacher import Teachers
from rally.train.update import UpdateSettings, update_policy

LAYERS = 6
MIB = 2**20
M = "actor_rollout_ref.model"


def policy_of(model: PreTrainedModel, checkpointing: bool = True, **options: Any) -> Policy:
    attention.install(model)
    return Policy(model, OptimizerSettings(lr=1e-3), 4, checkpointing, **options)


def trained(policy: Policy) -> list[dict[str, float]]:
    settings = UpdateSettings(mini_batch_groups=2)
    return [update_policy(policy, build_batch(uneven_episodes(seed)), settings) for seed in range(2)]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_updates_are_equal_to_the_last_bit(count: int, lora: bool) -> None:
    def made(checkpointing: bool, **options: Any) -> Policy:
        model = make_model()
        if lora:
            add_adapters(model, LoraSettings(rank=2), "nowhere")
        return policy_of(model, checkpointing, **options)

    plain, some = made(False), made(True, recompute=count)
    expected, metrics = trained(plain), trained(some)
    layers = min(count, plain.model.config.num_hidden_layers)
    assert [one.pop("perf/recomputed_layers") for one in metrics] == [layers] * 2
    assert metrics == expected and same(weights(plain.model), weights(some.model))


def wide_model(layers: int = LAYERS, vocabulary: int = 512) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def rows(count: int, shared: int, own: int) -> list[Row]:
    """Rows of one prompt of `shared` tokens, and `own` sampled ones."""
    prompt = np.arange(shared) % 509
    return [
        Row(
            ids=np.concatenate([prompt, (np.arange(own) * (i + 2)) % 509]),
            sampled=np.arange(shared, shared + own),
            logprobs=np.full(own, -5, np.float32),
            advantages=np.full(own, 1 - 2 * (i % 2), np.float32),
            episode=i,
        )
        for i in range(count)
    ]


def batch_of(batch_rows: list[Row]) -> TrainBatch:
    count = len(batch_rows)
    return TrainBatch(
        rows=batch_rows,
        rewards_N=torch.zeros(count),
        groups_N=torch.zeros(count, dtype=torch.int64),
        tokens_N=torch.tensor([len(row.sampled) for row in batch_rows]),
    )


def update(policy: Policy, batch_rows: list[Row], step: int = 0) -> int:
    settings = UpdateSettings(mini_batch_groups=1, max_tokens=10**6)
    metrics = update_policy(policy, batch_of(batch_rows), settings, step=step)
    return int(metrics["perf/recomputed_layers"])


@pytest.mark.parametrize("shape", [(4, 1, 256), (16, 256, 48)], ids=["apart", "shared prompt"])
def test_the_free_memory_is_filled_and_not_exceeded(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of all tensors are counted. `memory_left` is what a device of a given size would have."""
    counts, used = [], []
    for room in (40 * MIB, 110 * MIB, 250 * MIB):
        with LiveBytes() as live:
            model = wide_model()
            for parameter in model.parameters():
                live.add(parameter)
            policy = policy_of(model)
            total = live.now + room

            def left(_: object, live: LiveBytes = live, total: int = total) -> int:
                return total - live.now

            monkeypatch.setattr(recompute, "memory_left", left)
            per_step = []
            for step in range(2):
                live.peak = live.now
                per_step.append(update(policy, rows(*shape), step))
                if per_step[-1] < LAYERS:
                    assert live.peak <= total, f"{per_step[-1]} layers of {LAYERS} with {room / MIB:.0f} MiB"
            counts.append(per_step[1])
            used.append(live.peak / total)
    assert counts == sorted(counts, reverse=True) and counts[0] == LAYERS and counts[-1] == 0
    assert 0 < counts[1] < LAYERS and used[1] > 0.6, "memory in between keeps some layers"


@pytest.mark.parametrize("mode", [None, "forward_kl_full", "jsd_full"])
def test_other_functions_of_the_logits_get_their_memory(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head through autograd with the gradient of the entropy, and divergences over the whole vocabulary, hold more
    chunks of logits than the fused head. Here a chunk is larger than what a layer keeps."""
    vocabulary, counts = 8192, []
    distillation = None if mode is None else DistillationSettings(mode=mode)
    settings = UpdateSettings(
        mini_batch_groups=1, max_tokens=10**6, entropy_coeff=0.0 if mode else 0.01, distillation=distillation
    )
    for room in (80, 110, 250):
        with LiveBytes() as live:
            model, teacher = wide_model(2, vocabulary), wide_model(2, vocabulary)
            if mode is None:
                model.lm_head.bias = torch.nn.Parameter(torch.zeros(vocabulary))
            for parameter in (*model.parameters(), *teacher.parameters()):
                live.add(parameter)
            policy, total = policy_of(model), live.now + room * MIB

            def left(_: object, live: LiveBytes = live, total: int = total) -> int:
                return total - live.now

            monkeypatch.setattr(recompute, "memory_left", left)
            live.peak = live.now
            known = None if distillation is None else {"default": FrozenModel(teacher)}
            teachers = None if known is None else Teachers(known, distillation, vocabulary)
            found = update_policy(policy, batch_of(rows(4, 1, 128)), settings, teachers=teachers)
            counts.append(found["perf/recomputed_layers"])
            assert counts[-1] == 2 or live.peak <= total, f"{room} MiB"
    assert counts[0] == 2 and counts[-1] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_a_gpu_is_filled_and_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused layers, in bf16."""
    counts = []
    for room in (100 * MIB, 250 * MIB, 2000 * MIB):
        policy = policy_of(wide_model().bfloat16().to("cuda"))
        total = torch.cuda.memory_allocated() + room
        monkeypatch.setattr(recompute, "memory_left", lambda _, total=total: total - torch.cuda.memory_allocated())
        for step in range(2):
            torch.cuda.reset_peak_memory_stats()
            counts.append(update(policy, rows(16, 1, 1024), step))
            assert counts[-1] == LAYERS or torch.cuda.max_memory_allocated() <= total
    assert counts[1] >= counts[3] >= counts[5] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lora", [False, True])
def test_deterministic_updates_on_a_gpu_repeat_to_the_bit(lora: bool) -> None:
    """Also where some layers are computed again. The gradient of flash attention adds in any order by default."""

    def updated(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = wide_model().bfloat16()
        if lora:
            add_adapters(model, LoraSettings(rank=8), "nowhere")
        policy = policy_of(model.to("cuda"), deterministic=True, **options)
        for step in range(2):
            update(policy, rows(16, 256, 768), step)
        assert not torch.are_deterministic_algorithms_enabled()
        return weights(policy.model)

    first = updated()
    assert same(first, updated()) and same(first, updated(recompute=LAYERS)) and same(first, updated(recompute=2))


def test_a_teacher_that_comes_from_main_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not on the device yet when the update begins."""
    distillation = DistillationSettings(mode="k3")
    settings = UpdateSettings(mini_batch_groups=1, max_tokens=10**6, distillation=distillation)

    def recomputed(room: float, *, offload: bool) -> float:
        monkeypatch.setattr(recompute, "memory_left", lambda _: int(room))
        teachers = Teachers({"default": FrozenModel(wide_model(), offload=offload)}, distillation, 512)
        metrics = update_policy(policy_of(wide_model()), batch_of(rows(4, 1, 256)), settings, teachers=teachers)
        return metrics["perf/recomputed_layers"]

    size = sum(parameter.nbytes for parameter in wide_model().parameters()) / (1 - recompute.RESERVED)
    rooms = [room * MIB for room in range(60, 130, 10)]
    resting = [recomputed(room, offload=True) for room in rooms]
    assert resting == [recomputed(room - size, offload=False) for room in rooms]
    assert resting != [recomputed(room, offload=False) for room in rooms]


def test_a_longer_micro_batch_keeps_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "memory_left", lambda _: 100 * MIB)
    policy = policy_of(wide_model())
    assert update(policy, rows(2, 1, 64)) == 0 < update(policy, rows(8, 1, 512))


def test_probabilities_are_kept_where_memory_is_left_and_bits_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def choices(policy: Policy) -> list[tuple[int, bool]]:
        found = []
        for room in range(90, 200):
            monkeypatch.setattr(recompute, "memory_left", lambda _, room=room: room * MIB)
            with policy.training():
                packed = policy.pack(rows(4, 1, 256))
            found.append((int(policy.recomputed()["perf/recomputed_layers"]), packed.keep_probabilities))
        return found

    free, fixed = choices(policy_of(wide_model())), choices(policy_of(wide_model(), deterministic=True))
    assert [count for count, _ in free] == [count for count, _ in fixed] and not any(keep for _, keep in fixed)
    assert free == sorted(free, key=lambda one: (-one[0], one[1])) and free[0][0] > 0
    assert free.count((0, False)) in (2, 3, 4), "the layers of 1,024 tokens fit, and 2 MiB of probabilities do not"
    assert free[-1] == (0, True)
    beside = policy_of(wide_model())
    beside.leave_free(round(30 * 0.92 * MIB))
    cached = choices(beside)
    assert [count for count, _ in cached] == [count for count, _ in free], "layers are not computed again for it"
    assert cached.count((0, False)) - free.count((0, False)) == 30, "the KV cache comes back without a call for memory"


def test_what_does_not_allow_a_choice_computes_all_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert update(policy_of(wide_model(2)), rows(2, 1, 64)) == 2, "nobody knows the free memory of a CPU"
    monkeypatch.setattr(recompute, "memory_left", lambda _: 10**12)
    assert update(policy_of(wide_model(2)), rows(2, 1, 64)) == 0
    capped = small_model("gemma2")  # attention weights are kept: they grow with the square of the tokens
    assert update(policy_of(capped), rows(2, 1, 16)) == len(policy_of(capped).model.model.layers)
    assert policy_of(wide_model(2), offload=OffloadSettings(activations=True)).recompute is None
    assert policy_of(wide_model(2), checkpointing=False).recompute is None


def test_layers_of_different_sizes_are_kept_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model()
    first = model.model.layers[0].mlp
    first.gate_proj, first.up_proj = torch.nn.Linear(128, 64, bias=False), torch.nn.Linear(128, 64, bias=False)
    first.down_proj = torch.nn.Linear(64, 128, bias=False)
    policy = policy_of(model)
    found = set()
    for room in (60, 220, 500):
        monkeypatch.setattr(recompute, "memory_left", lambda _, room=room: room * MIB)
        found.add(update(policy, rows(4, 1, 512)))
    assert found == {0, LAYERS}


def test_a_count_without_layers_or_without_checkpointing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"{M}\.recompute_num_layers=3 has no effect with"):
        load_config(overrides=[f"{M}.recompute_num_layers=3", f"{M}.enable_gradient_checkpointing=false"])
    with pytest.raises(ConfigError, match=r"model\.recompute_num_layers=3 has no effect with"):
        load_sft_config(overrides=["model.recompute_num_layers=3", "model.enable_gradient_checkpointing=false"])
    model = wide_model(2)
    monkeypatch.setattr(recompute, "body_of", lambda _: object())
    assert policy_of(model).recompute is None
    with pytest.raises(LoadError, match=r"leave model\.recompute_num_layers out"):
        policy_of(model, recompute=1)


def test_checkpointing_shows_no_warning_of_a_library(recwarn: pytest.WarningsRecorder) -> None:
    policy_of(make_model())
    assert not [warning.message for warning in recwarn if "checkpointing_enable" in str(warning.message)]
