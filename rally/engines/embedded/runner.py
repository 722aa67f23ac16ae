"""Runs one step of planned work through the trainer's own module and samples a token per finished chunk.

This is the plain way, for any device: compute at once, read the result back at once. The fast way on a GPU
(fast_runner.py) does the same and is tested against it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from rally.engines.embedded.attention import head_logits, packed_hidden
from rally.engines.embedded.looking import Looking
from rally.engines.embedded.paged import PagedAttention, Rows
from rally.engines.embedded.pages import KVStore
from rally.engines.embedded.sampler import Draw, Sampled, sample
from rally.engines.embedded.scheduler import Plan
from rally.engines.embedded.slots import Ints, Slots
from rally.engines.embedded.vision import tower_of


class Pending(Protocol):
    """A launched step."""

    def result(self) -> Sampled:
        """One token for each of the plan's samplers; waits until the step has run."""
        ...


class Runner(Protocol):
    """Owns no weights: the module is the trainer's. `ahead`: a step may be launched before the last is read back."""

    ahead: bool

    def launch(self, plan: Plan) -> Pending:
        """Copy pages, compute the planned tokens, write their KV, sample."""
        ...

    def weights_changed(self) -> None:
        """A new weight version begins."""
        ...


class Tokens(NamedTuple):
    """The packed tokens of a plan: their ids, their positions in their histories, their places in the KV store, and
    which of them predict a token to be sampled."""

    ids: Ints
    positions: Ints
    places: Ints
    last: Ints


def packed_tokens(plan: Plan, slots: Slots, page_size: int) -> Tokens:
    """Decoding slots first, a token each (already counted as computed), then the chunks."""
    owner, positions, last = plan.decodes, slots.computed[plan.decodes] - 1, np.arange(len(plan.decodes))
    if plan.chunks:
        owner = np.concatenate([owner] + [np.full(c.tokens, c.slot) for c in plan.chunks])
        positions = np.concatenate([positions] + [np.arange(c.start, c.start + c.tokens) for c in plan.chunks])
        ends = len(last) + np.cumsum([c.tokens for c in plan.chunks]) - 1
        last = np.append(last, ends[[c.samples for c in plan.chunks]])
    pages = slots.table_SP[owner, positions // page_size].astype(np.int64)
    return Tokens(
        ids=np.maximum(slots.ids[owner, positions], 0).astype(np.int64),  # an image's token is none of the vocabulary
        positions=positions,
        places=pages * page_size + positions % page_size,
        last=last,
    )


class Done(NamedTuple):
    """A step that has already run."""

    sampled: Sampled

    def result(self) -> Sampled:
        return self.sampled


class ModelRunner:
    """One step at a time, through the module's own forward."""

    ahead = False

    def __init__(self, model: PreTrainedModel, store: KVStore, slots: Slots, stride: int) -> None:
        self.model, self.store, self.slots, self.stride = model, store, slots, stride
        self.looking = Looking(model, slots) if tower_of(model) is not None else None

    def weights_changed(self) -> None:
        if self.looking is not None:
            self.looking.weights_changed()

    @torch.no_grad()
    def launch(self, plan: Plan) -> Done:
        if plan.copies:
            self.store.copy_pages(plan.copies)
        device = self.store.device
        ids, positions, places, last = (
            torch.from_numpy(x).to(device) for x in packed_tokens(plan, self.slots, self.store.page_size)
        )
        context = PagedAttention(self.store, self._rows(plan), places, self.stride)
        seen = None
        if self.looking is not None:
            positions = torch.from_numpy(self.looking.positions(plan)).to(device)
            seen = self.looking.seen(plan)
        hidden = packed_hidden(self.model, ids, positions, context, seen)
        if not len(last):
            nothing = np.empty(0, np.float32)
            return Done(Sampled(np.empty(0, np.int64), nothing, nothing))
        draw = Draw.of(self.slots, plan.samplers)
        return Done(sample(head_logits(self.model, hidden[last]), draw))

    def _rows(self, plan: Plan) -> Rows:
        slots, ones = self.slots, np.ones(len(plan.decodes), np.int64)
        tokens = np.append(ones, [c.tokens for c in plan.chunks]).astype(np.int64)
        starts = np.append(slots.computed[plan.decodes] - 1, [c.start for c in plan.chunks]).astype(np.int64)
        owners = np.append(plan.decodes, [c.slot for c in plan.chunks]).astype(np.int64)
        return Rows(np.cumsum(tokens) - tokens, tokens, starts, slots.table_SP[owners])
