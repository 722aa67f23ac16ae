"""The inputs of one step of the CUDA runner in one flat buffer, so that a step needs one copy to the device.

Shapes: T packed tokens, B decoding requests (the first tokens), R requests with a chunk, N tiles of chunks, S tokens
to be sampled, P the width of the page table. Sizes may be padded to those of a bucket; padding has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rally.engines.embedded.request_slots import Ints, Slots
from rally.engines.embedded.sampler import uniforms
from rally.engines.embedded.scheduler import StepPlan
from rally.engines.embedded.torch_runner import packed_tokens
from rally.models.kernels.attention_tiles import extend_tiles

SAMPLING = ("last", "slots", "temperature", "uniform")


class Sizes(NamedTuple):
    """The sizes of a step; each CUDA graph has fixed ones. `max_samples` is the maximum of `samples`."""

    tokens: int
    decodes: int
    chunks: int
    tiles: int
    samples: int
    pages: int
    max_samples: int
    axes: int = 1  # of positions

    def fields(self) -> dict[str, tuple[int, ...]]:
        t, s = self.tokens, self.samples
        return {
            "copies": (2, self.max_samples),
            "last": (s,),
            "slots": (s,),
            "temperature": (s,),
            "uniform": (s,),
            "ids": (t,),
            "source": (t,),  # the slot whose last sampled token this is, or -1: it is in ids
            "positions": (t,) if self.axes == 1 else (self.axes, t),
            "places": (t,),
            "lengths": (self.decodes,),
            "table": (self.decodes + self.chunks, self.pages),
            "tiles": (self.tiles, 4),
        }

    def offsets(self) -> dict[str, int]:
        """Where each field begins, in int32 elements, aligned to 16 bytes. The sampling fields come first and have
        their maximum size, so that their offsets are the same in every step."""
        result, at = {}, 0
        for name, shape in self.fields().items():
            result[name] = at
            size = self.max_samples if name in SAMPLING else prod(shape)
            at += -(-size // 4) * 4
        result["end"] = at
        return result


@dataclass(frozen=True)
class StepInputs:
    """The fields on the device."""

    sizes: Sizes
    copies: Tensor
    ids: Tensor
    source: Tensor
    positions: Tensor
    places: Tensor
    lengths: Tensor
    table: Tensor
    tiles: Tensor
    last: Tensor
    slots: Tensor
    temperature: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, buffer: Tensor, sizes: Sizes) -> StepInputs:
        """Views of a flat int32 buffer."""
        offsets = sizes.offsets()
        views = {name: buffer[offsets[name] :][: prod(shape)].view(shape) for name, shape in sizes.fields().items()}
        for name in ("temperature", "uniform"):
            views[name] = views[name].view(torch.float32)
        return cls(sizes, **views)


class Padding(NamedTuple):
    """Where padding writes: an unused place in the KV store, and an unused slot."""

    trash: int
    no_slot: int


def fill(
    buffer: npt.NDArray[np.int32],
    sizes: Sizes,
    plan: StepPlan,
    slots: Slots,
    *,
    page_size: int,
    group: int,
    padding: Padding,
    positions: Ints | None = None,
) -> int:
    """Write the plan into a host buffer; returns the number of int32 elements written. `positions` [axes, T] are given
    if they differ from the token indices."""
    shapes, offsets = sizes.fields(), sizes.offsets()
    buffer[: offsets["end"]] = 0

    def put(name: str, values: npt.NDArray[np.generic], *, pad: int | None = None) -> None:
        at = offsets[name]
        buffer[at : at + values.size] = values.reshape(-1)
        if pad is not None:
            buffer[at + values.size : at + prod(shapes[name])] = pad

    if plan.copies:
        source, target = np.array(plan.copies, np.int32).T
        put("copies", source)
        buffer[offsets["copies"] + sizes.max_samples :][: len(target)] = target
    decodes, tokens = plan.decodes, packed_tokens(plan, slots, page_size)
    computed = slots.computed[decodes]
    put("ids", tokens.ids)
    put("source", np.where(slots.known[decodes] < computed, decodes, -1), pad=-1)  # its token is still on the device
    if positions is None:
        put("positions", tokens.positions)
    else:
        for axis, along in enumerate(positions):
            buffer[offsets["positions"] + axis * sizes.tokens :][: len(along)] = along
    put("places", tokens.places, pad=padding.trash)
    put("lengths", computed)
    put("table", slots.table_SP[decodes, : sizes.pages])
    if plan.chunks:
        table = slots.table_SP[[c.slot for c in plan.chunks], : sizes.pages]
        at = offsets["table"] + sizes.decodes * sizes.pages
        buffer[at : at + table.size] = table.reshape(-1)
    if sizes.tiles:
        put("tiles", tiles(plan, computed, sizes.decodes, group))
    samplers = plan.samplers
    put("last", tokens.last)
    put("slots", samplers, pad=padding.no_slot)
    put("temperature", slots.temperature[samplers].view(np.int32))
    uniform = uniforms(slots.seed[samplers], plan.targets(slots) - slots.prompt[samplers])
    put("uniform", np.minimum(uniform, 1 - 2.0**-24).astype(np.float32).view(np.int32))
    return offsets["end"]


def tiles(plan: StepPlan, computed: Ints, first_row: int, group: int) -> npt.NDArray[np.int32]:
    """The tiles of the attention kernel: one per decoding token, several per chunk (whose rows of the page table begin
    at `first_row`). Long histories come first, so that the last programs to run are short."""
    order = np.argsort(-computed)
    decoding = np.empty((len(order), 4), np.int32)
    decoding[:, 0] = decoding[:, 1] = order
    decoding[:, 2] = 1
    decoding[:, 3] = computed[order] - 1
    if not plan.chunks:
        return decoding
    rows, at = [], len(order)
    for i, chunk in enumerate(plan.chunks):
        rows.append((first_row + i, at, chunk.tokens, chunk.start))
        at += chunk.tokens
    return np.concatenate([extend_tiles(rows, group), decoding])
