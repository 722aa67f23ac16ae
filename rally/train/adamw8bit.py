"""AdamW with moments of 8 bits: 2 bytes a parameter instead of 8.

A moment is stored as one code for each number, and one float32 scale for each block of up to 256 numbers of a row.
Codes are logarithmic, with steps of 9 %. Rounding is stochastic and unbiased: rounding to the nearest code would keep a
second moment where it is, because a step changes it by less than a code. The random numbers are a hash of the step, the
parameter and the place in it. So a resumed run draws them again, and shards draw what the whole parameter would.
Moments of vectors stay in float32.

torchao and bitsandbytes have such optimizers, too. They need a compiler or CUDA, and their states are of classes of
their own; these are plain tensors, which shards and checkpoints hold like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rally.models.sharding import ShardPlace

BLOCK = 256
CHUNK, CPU_CHUNK = 2**23, 2**18
"""Numbers that are stepped over at once: on a GPU few kernels, on a CPU what fits into its caches."""
PER_OCTAVE = 8
"""Codes between a power of two and the next."""
SCALE = "_scale"
BYTES = 2 * (1 + 4 / BLOCK)
"""Of both moments, for a number of a parameter."""


class Code(NamedTuple):
    """Code `most` is the largest number of a block, each smaller code is 2^(-1/8) of the one above it, and 0 is 0."""

    dtype: torch.dtype
    most: int
    signed: bool


CODES = {"exp_avg": Code(torch.int8, 127, True), "exp_avg_sq": Code(torch.uint8, 255, False)}


class AdamW8bit(torch.optim.Optimizer):
    """`offsets`: for each parameter, how many numbers of the whole parameter come before this shard of it."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float = 1e-8,
        offsets: Sequence[int] | None = None,
    ) -> None:
        group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "optimizer": type(self).__name__}
        super().__init__(parameters, group)
        self._offsets = offsets

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        [group] = self.param_groups
        chosen = [(number, p) for number, p in enumerate(group["params"]) if p.grad is not None]
        if not chosen:
            return
        states = [self.state[parameter] for _, parameter in chosen]
        for state, (_, parameter) in zip(states, chosen, strict=True):
            if not state:
                state.update(_new_state(parameter))
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        done = torch.stack([step.to(steps[0].device) for step in steps]).tolist()  # waits for a GPU once
        for (number, parameter), state, count in zip(chosen, states, done, strict=True):
            offset = 0 if self._offsets is None else self._offsets[number]
            _step(parameter.detach(), parameter.grad, state, group, (int(count), number), offset)


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    device = parameter.device
    state = {"step": torch.zeros((), device=device)}
    for name, code in CODES.items():
        if parameter.dim() < 2:
            state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
        else:
            state[name] = torch.zeros(parameter.shape, dtype=code.dtype, device=device)
            state[name + SCALE] = torch.zeros(_scale_shape(parameter.shape), device=device)
    return state


def _step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
    seed: tuple[int, int],
    offset: int,
) -> None:
    """A step of AdamW over a parameter, chunk by chunk. It uses the new moments before they are rounded. `seed`: the
    number of the step and that of the parameter."""
    (beta1, beta2), (done, _) = group["betas"], seed
    correction1, correction2 = 1 - beta1**done, 1 - beta2**done
    for part, start in _chunks(parameter.shape, CPU_CHUNK if parameter.device.type == "cpu" else CHUNK):
        p, g = parameter[part], gradient[part]
        first, second = (_read(state, name, part) for name in CODES)
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(first, (second / correction2).sqrt_().add_(group["eps"]), value=-group["lr"] / correction1)
        if parameter.dim() > 1:
            draws = uniform(p.shape, offset + start, seed, p.device)
            for name, moment, draw in zip(CODES, (first, second), draws, strict=True):
                state[name][part], state[name + SCALE][part] = encode(CODES[name], moment, draw)


def _chunks(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int | slice, ...], int]]:
    """Parts with at most `most` numbers, or one row of the last dimension, and how many numbers are before each."""
    if not shape:
        yield (), 0
    elif row := math.prod(shape[1:]):
        if len(shape) > 2 and row > most:  # experts, for example
            for at in range(shape[0]):
                for part, start in _chunks(shape[1:], most):
                    yield (at, *part), at * row + start
        else:
            rows = max(1, most // row)
            for at in range(0, shape[0], rows):
                yield (slice(at, at + rows),), at * row


def _read(state: dict[str, Tensor], name: str, part: Any) -> Tensor:
    """A moment in float32, which the caller may change; that of a vector is the state itself."""
    scales = state.get(name + SCALE)
    return state[name][part] if scales is None else decode(CODES[name], state[name][part], scales[part])


def encode(code: Code, values: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of numbers and the scale of each block. A number between two codes becomes the upper one if its place
    between them is above its draw from [0, 1). Second moments that are not 0 do not become 0: steps divide by them."""
    sizes = values.abs()
    scales = _blocks(sizes).amax(-1)
    sizes /= _of_numbers(scales, values.shape[-1]).clamp(min=torch.finfo(torch.float32).tiny)
    table = _table(code, values.device)
    below = (torch.log2(sizes) * PER_OCTAVE).floor_().add_(code.most).clamp_(0, code.most).to(torch.int32)
    low, high = table[below], table[(below + 1).clamp_(max=code.most)]
    chosen = below + (sizes - low > draws * (high - low)).to(torch.int32)
    chosen.clamp_(max=code.most)
    if code.signed:
        chosen *= values.sign().to(torch.int32)
    else:
        chosen.clamp_(min=(sizes > 0).to(torch.int32))
    return chosen.to(code.dtype), scales


def decode(code: Code, codes: Tensor, scales: Tensor) -> Tensor:
    numbers = codes.to(torch.int32)
    sizes: Tensor = _table(code, codes.device)[numbers.abs()] * _of_numbers(scales, codes.shape[-1])
    return sizes * numbers.sign() if code.signed else sizes


@lru_cache(maxsize=32)
def _table(code: Code, device: torch.device) -> Tensor:
    """The size of each code, where the largest is 1. It is made once, because a GPU is waited for."""
    table = torch.exp2((torch.arange(code.most + 1, dtype=torch.float64) - code.most) / PER_OCTAVE)
    table[0] = 0
    return table.to(device, torch.float32)


def uniform(shape: Sequence[int], start: int, seed: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two random numbers in [0, 1) for each place from `start` on: a hash of place and seed."""
    step, parameter = seed
    at = torch.arange(math.prod(shape), dtype=torch.int32, device=device).view(*shape)
    mixed = at + _signed(start + 0x9E3779B1 * step + 0x85EBCA77 * parameter)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed ^= (mixed >> shift) & ((1 << (32 - shift)) - 1)
        mixed *= _signed(factor)
    mixed ^= (mixed >> 16) & 0xFFFF
    return (mixed & 0xFFFF) / 2**16, ((mixed >> 16) & 0xFFFF) / 2**16


def _signed(number: int) -> int:
    """The last 32 bits as a signed integer."""
    return (number + 2**31) % 2**32 - 2**31


def _blocks(values: Tensor) -> Tensor:
    """Each row as blocks; the last one is filled with zeros."""
    size = min(BLOCK, values.shape[-1])
    return functional.pad(values, (0, -values.shape[-1] % size)).view(*values.shape[:-1], -1, size)


def _of_numbers(scales: Tensor, width: int) -> Tensor:
    """The scale of each number of rows that are `width` wide."""
    return scales.repeat_interleave(min(BLOCK, width), -1)[..., :width]


def _scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def place_of_state(kind: str, place: ShardPlace) -> ShardPlace:
    """The place of a shard of a state, given that of its parameter."""
    if not kind.endswith(SCALE):
        return place
    if place.size[-1] != place.shape[-1]:
        raise ValueError("8-bit moments need whole rows, and a shard has a part of them")
    *offset, _ = place.offset
    return ShardPlace(_scale_shape(place.shape), (*offset, 0), _scale_shape(place.size), place.replica)
