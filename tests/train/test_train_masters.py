"""With bf16 weights, small updates accumulate in float32 masters, parameters keep their memory, and resuming is
exact."""

from pathlib import Path

import pytest
import torch
from small_models import make_model
from train_cases import same, small_policy, uneven_episodes, weights
from transformers import PreTrainedModel

from rally.chat import tiny_tokenizer
from rally.models.load import load_model, pick_dtype
from rally.train.batch import build_batch
from rally.train.checkpoint.store import CheckpointStore, open_checkpoint
from rally.train.policy import Policy
from rally.train.update import UpdateSettings, update_policy

UPDATE = UpdateSettings(mini_batch_groups=2)
CPU = torch.device("cpu")


def half_model() -> PreTrainedModel:
    """Converts only parameters: as in a loaded model, the buffers of the rotary embedding stay in float32."""
    model = make_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def half_policy(lr: float = 1e-3) -> Policy:
    return small_policy(half_model(), lr=lr, weight_decay=0.0)


def steps(policy: Policy, *seeds: int) -> None:
    for seed in seeds:
        update_policy(policy, build_batch(uneven_episodes(seed)), UPDATE)


def masters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in policy.masters.items()}


def test_parameters_are_the_rounded_masters_and_small_steps_add_up() -> None:
    """A step of 1e-5 is far below half a bf16 unit of a norm's weight 1.0: alone it is rounded away, 300 are not."""
    policy = half_policy(lr=1e-5)
    name = "model.norm.weight"
    parameter = dict(policy.model.named_parameters())[name]
    with policy.training():
        for number in range(1, 301):
            parameter.float().sum().backward()
            policy.optimizer_step()
            if number == 1:
                assert bool((parameter == 1).all()) and bool((policy.masters[name] < 1).all())
    assert bool((parameter < 1).all())
    assert torch.equal(parameter, policy.masters[name].to(torch.bfloat16))


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    policy = half_policy()
    parameter = policy.model.model.norm.weight
    inputs = torch.rand(64, *parameter.shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with policy.training():
        for x in inputs:
            (parameter * x).float().sum().backward()
            assert parameter.grad is None
    assert torch.equal(policy.masters["model.norm.weight"].grad, inputs.float().sum(0))
    assert not torch.equal(policy.masters["model.norm.weight"].grad, inputs.sum(0).float()), "bf16 would do as well"


def test_parameters_stay_where_they_lie_even_inside_a_larger_tensor() -> None:
    model = half_model()
    layer = model.model.layers[0].self_attn
    packed = torch.cat([layer.q_proj.weight.data, layer.k_proj.weight.data])
    split = len(layer.q_proj.weight)
    layer.q_proj.weight.data, layer.k_proj.weight.data = packed[:split], packed[split:]
    policy = small_policy(model, lr=1e-2)
    before, places = packed.clone(), {n: p.data_ptr() for n, p in model.named_parameters()}
    steps(policy, 1, 2)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places
    assert not torch.equal(packed, before)
    assert torch.equal(packed[split:], policy.masters["model.layers.0.self_attn.k_proj.weight"].to(torch.bfloat16))


def test_float32_parameters_need_no_copies() -> None:
    policy = small_policy(make_model())
    assert all(policy.masters[name] is p for name, p in policy.model.named_parameters())
    assert policy.state()["masters"] == {}


def test_outside_of_training_nothing_is_collected() -> None:
    policy = half_policy()
    steps(policy, 1)
    policy.model.model.norm.weight.float().sum().backward()
    assert policy.model.model.norm.weight.grad is not None
    assert all(master.grad is None for master in policy.masters.values())


def save(policy: Policy, folder: Path, step: int) -> Path:
    return CheckpointStore(folder, warn=print).save(step, policy, tiny_tokenizer())


def test_resuming_in_bf16_is_exact(tmp_path: Path) -> None:
    policy = half_policy()
    steps(policy, 1, 2)
    found = open_checkpoint(save(policy, tmp_path, 2))
    steps(policy, 3, 4)
    resumed = small_policy(load_model(str(found.actor), dtype="bfloat16"), lr=1e-3, weight_decay=0.0)
    assert not same(masters(resumed), masters(policy))
    resumed.load_state(found.state())
    steps(resumed, 3, 4)
    assert same(masters(resumed), masters(policy)) and same(weights(resumed.model), weights(policy.model))


def test_a_run_resumed_in_float32_begins_from_the_masters(tmp_path: Path) -> None:
    policy = half_policy()
    steps(policy, 1, 2)
    found = open_checkpoint(save(policy, tmp_path, 2))
    exact = small_policy(load_model(str(found.actor)))
    exact.load_state(found.state())
    assert same(weights(exact.model), masters(policy))
    assert not same(weights(exact.model), {n: w.float() for n, w in weights(policy.model).items()})


def test_bf16_follows_float32() -> None:
    half, whole = half_policy(lr=1e-2), small_policy(make_model(), lr=1e-2, weight_decay=0.0)
    steps(half, 1, 2, 3)
    steps(whole, 1, 2, 3)
    start = torch.cat([w.flatten() for w in weights(make_model()).values()])
    way, expected = (torch.cat([m.flatten() for m in masters(p).values()]) - start for p in (half, whole))
    assert float(torch.cosine_similarity(way, expected, dim=0)) > 0.9


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_dtype_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    assert pick_dtype(name, CPU) == dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_dtype_on_a_gpu() -> None:
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
