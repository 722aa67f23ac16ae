"""AdamW with moments of 8 bits: codes are unbiased, steps are nearly AdamW's, shards and resumed runs repeat them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from train_cases import calm_model, same, uneven_episodes, weights

from rally.config import load_config
from rally.models import attention
from rally.runs.build.update_settings import optimizer_settings_of
from rally.train import adamw8bit
from rally.train.adamw8bit import BYTES, CODES, AdamW8bit, decode, encode, uniform
from rally.train.batch import build_batch
from rally.train.offload import ON_DEVICE, OffloadSettings
from rally.train.policy import OptimizerSettings, Policy
from rally.train.update import UpdateSettings, update_policy

UPDATE = UpdateSettings(mini_batch_groups=2)
CPU = torch.device("cpu")
KEY = "actor_rollout_ref.actor.optim"


def numbers(name: str, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).pow(3)
    return values if CODES[name].signed else values.square()


def draws(shape: Any, step: int = 1) -> Tensor:
    return uniform(shape, 0, (step, 0), CPU)[0]


@pytest.mark.parametrize("shape", [(3, 700), (5, 256), (4, 7), (2, 3, 300), (6, 1)], ids=str)
@pytest.mark.parametrize("name", CODES)
def test_a_code_is_within_a_step_of_its_number(name: str, shape: tuple[int, ...]) -> None:
    values = numbers(name, *shape)
    codes, scales = encode(CODES[name], values, draws(shape))
    assert codes.dtype.itemsize == 1 and codes.shape == values.shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 256))
    back = decode(CODES[name], codes, scales)
    of_number = scales.repeat_interleave(min(256, shape[-1]), -1)[..., : shape[-1]]
    least = of_number * 2.0 ** (-15.75 if CODES[name].signed else -31.75)  # what is smaller becomes this or 0
    assert ((back - values).abs() <= 0.0906 * values.abs() + least).all()
    assert (back.sign() * values.sign() >= 0).all() and back.abs().amax() == values.abs().amax()
    again = encode(CODES[name], back, draws(shape, 2))
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales), "what is between no codes is not rounded"


@pytest.mark.parametrize("name", CODES)
def test_rounding_is_unbiased(name: str) -> None:
    values = numbers(name, 4, 300)
    total = sum(decode(CODES[name], *encode(CODES[name], values, draws(values.shape, step))) for step in range(3000))
    large = values.abs() > 1e-4 * values.abs().amax(-1, keepdim=True)
    assert ((total / 3000 / values - 1).abs()[large] < 0.006).all()


def test_zero_blocks_stay_zero_and_no_second_moment_becomes_zero() -> None:
    values = torch.zeros(2, 512)
    values[0, 300:] = torch.logspace(-30, 0, 212)
    for code in CODES.values():
        codes, scales = encode(code, values, draws(values.shape))
        assert not codes[0, :256].any() and not codes[1].any() and not decode(code, codes, scales)[1].any()
        assert code.signed or (codes[0, 300:] > 0).all()


def test_random_numbers_are_those_of_the_place() -> None:
    whole = uniform((8, 100), 0, (3, 1), CPU)
    for part in range(8):
        for mine, all_of_it in zip(uniform((1, 100), 100 * part, (3, 1), CPU), whole, strict=True):
            assert torch.equal(mine[0], all_of_it[part])
    many = torch.stack(uniform((1000, 200), 2**32 - 100, (7, 5), CPU)).view(2, -1)
    assert (many.mean(1) - 0.5).abs().max() < 0.005 and (many.std(1) - 12**-0.5).abs().max() < 0.005
    assert torch.corrcoef(many)[0, 1].abs() < 0.01 and many.min() >= 0 and many.max() < 1


def optimized(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int) -> Tensor:
    """Losses of a regression whose inputs have very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-2, 0, 300)
    target, losses = torch.randn(40, 300, generator=generator), []
    weight, bias = nn.Parameter(torch.zeros(40, 300)), nn.Parameter(torch.zeros(40))
    optimizer = make([weight, bias])
    for _ in range(steps):
        inputs = torch.randn(64, 300, generator=generator) * sizes
        loss = (inputs @ weight.T + bias - inputs @ target.T - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


def test_it_learns_what_adamw_learns() -> None:
    plain = optimized(lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.01), 400)
    coded = optimized(lambda p: AdamW8bit(p, lr=0.02, weight_decay=0.01), 400)
    assert plain[-50:].mean() < 0.02 * plain[0]
    assert abs(coded[-50:].mean() / plain[-50:].mean() - 1) < 0.05


def test_the_second_moment_follows_gradients_that_shrink() -> None:
    """Of two numbers of a block one shrinks: nearest codes would keep it where it was."""
    weight = nn.Parameter(torch.zeros(1, 256))
    optimizer = AdamW8bit([weight], lr=0.0, betas=(0.9, 0.99))
    for step in range(700):
        weight.grad = torch.ones(1, 256)
        weight.grad[0, 0] = 1.0 if step < 200 else 0.01
        optimizer.step()
    state = optimizer.state[weight]
    second = decode(CODES["exp_avg_sq"], state["exp_avg_sq"], state["exp_avg_sq_scale"])[0]
    assert second[1:].mean() == pytest.approx(1.0, abs=0.02)
    assert second[0] == pytest.approx(1e-4 + 0.866 * 0.99**500, rel=0.5)


def test_shards_and_chunks_make_the_steps_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    start, gradients = torch.randn(6, 5, 300), [torch.randn(6, 5, 300) for _ in range(3)]

    def stepped(cuts: list[slice], transposed: bool = False) -> Tensor:
        parts = [nn.Parameter(start[cut].clone()) for cut in cuts]
        if transposed:
            parts = [nn.Parameter(part.detach().mT.contiguous().mT) for part in parts]
        made = [AdamW8bit([p], lr=0.1, offsets=[cut.start * 1500]) for p, cut in zip(parts, cuts, strict=True)]
        for gradient in gradients:
            for part, cut, optimizer in zip(parts, cuts, made, strict=True):
                part.grad = gradient[cut]
                optimizer.step()
        return torch.cat([part.detach() for part in parts])

    whole = stepped([slice(0, 6)])
    assert torch.equal(stepped([slice(0, 1), slice(1, 4), slice(4, 6)]), whole)
    assert torch.equal(stepped([slice(0, 6), slice(6, 6)]), whole), "a rank may have no row"
    assert torch.equal(stepped([slice(0, 6)], transposed=True), whole)
    for size in (2000, 700, 10):
        monkeypatch.setattr(adamw8bit, "CPU_CHUNK", size)
        assert torch.equal(stepped([slice(0, 6)]), whole)


@pytest.mark.parametrize("shape", [(6, 5, 300), (2, 3, 4, 50), (7, 100), (900,), (3, 1), (), (0, 4), (4, 0)], ids=str)
def test_a_chunk_is_no_larger_than_asked_for(shape: tuple[int, ...]) -> None:
    """An expert of three dimensions may have a hundred million numbers."""
    places = torch.arange(math.prod(shape)).view(shape)
    chunks = [(places[part], start) for part, start in adamw8bit._chunks(shape, 310)]
    assert all(0 < chunk.numel() <= 310 and int(chunk.flatten()[0]) == start for chunk, start in chunks)
    assert torch.equal(torch.cat([places.new_zeros(0), *(chunk.flatten() for chunk, _ in chunks)]), places.flatten())


class Operations(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_not_waited_for_at_each_parameter() -> None:
    parameters = [nn.Parameter(torch.zeros(4, 300)) for _ in range(5)]
    optimizer = AdamW8bit(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Operations() as done:
        optimizer.step()
    assert done.names.count("log2") == 10
    assert "_local_scalar_dense" not in done.names, "a number is read from the device"
    assert "exp2" not in done.names, "a table is computed on the CPU and copied to the device"


def policy_for(offload: OffloadSettings = ON_DEVICE, moments_8bit: bool = True) -> Policy:
    model = calm_model().bfloat16()
    attention.install(model)
    return Policy(model, OptimizerSettings(lr=1e-3, moments_8bit=moments_8bit), 4, offload=offload)


def updated(policy: Policy, *seeds: int) -> Policy:
    for seed in seeds:
        update_policy(policy, build_batch(uneven_episodes(seed)), UPDATE)
    return policy


def test_a_resumed_policy_makes_the_same_updates_to_the_last_bit() -> None:
    whole = updated(policy_for(), 0, 1, 2)
    first = updated(policy_for(), 0, 1)
    resumed = policy_for()
    resumed.load_state(first.state())
    resumed.model.load_state_dict(first.model.state_dict())
    assert same(weights(updated(resumed, 2).model), weights(whole.model))
    offloaded = updated(policy_for(OffloadSettings(optimizer=True, bucket_bytes=30_000)), 0, 1, 2)
    assert same(weights(offloaded.model), weights(whole.model))
    kinds = offloaded.state()["optimizer"]["state"][0]
    sizes = {name: value.dtype.itemsize for name, value in kinds.items() if value.dim()}
    assert sizes == {"exp_avg": 1, "exp_avg_sq": 1, "exp_avg_scale": 4, "exp_avg_sq_scale": 4}


@pytest.mark.parametrize("moments_8bit", [False, True])
def test_states_of_the_other_optimizer_are_refused(moments_8bit: bool) -> None:
    name = "AdamW" if moments_8bit else "AdamW8bit"
    saved = updated(policy_for(moments_8bit=not moments_8bit), 0).state()
    with pytest.raises(ValueError, match=f"its optimizer is {name}; set optim.optimizer={name}, or begin a new run"):
        policy_for(moments_8bit=moments_8bit).load_state(saved)


def test_bytes_are_those_that_plans_count() -> None:
    weight = nn.Parameter(torch.zeros(64, 1024))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW8bit([weight], lr=1e-3)
    optimizer.step()
    assert sum(value.nbytes for value in optimizer.state[weight].values()) == BYTES * weight.numel() + 4


def test_keys() -> None:
    for package in ("torch.optim", "torchao.optim", "bitsandbytes.optim"):
        config = load_config(overrides=[f"{KEY}.optimizer=AdamW8bit", f"{KEY}.optimizer_impl={package}"])
        assert optimizer_settings_of(config).moments_8bit
    assert not optimizer_settings_of(load_config()).moments_8bit
