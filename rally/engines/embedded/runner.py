"""Runs one step of planned work through the trainer's own module and samples a token per finished chunk.

This is the plain way, for any device: compute at once, read the result back at once. The fast way on a GPU
(fast_runner.py) does the same and is tested against it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from rally.engines.embedded.attention_torch import BatchRows, PagedAttention
from rally.engines.embedded.kv_cache import KVStore
from rally.engines.embedded.request_slots import Ints, Slots
from rally.engines.embedded.sampler import Draw, SampledBatch, sample
from rally.engines.embedded.scheduler import StepPlan
from rally.models.attention import head_logits, packed_hidden
from rally.models.vision import FeatureCache, Features, SeenImages, joined, tower_of


class ImageInputs:
    """For a module that sees; features are kept between steps until `weights_changed`."""

    def __init__(self, model: PreTrainedModel, slots: Slots) -> None:
        self.model, self.slots = model, slots
        self.gallery = FeatureCache(model)

    def weights_changed(self) -> None:
        self.gallery.forget()

    def positions(self, plan: StepPlan) -> Ints:
        """Of the packed tokens, on three axes."""
        slots = self.slots
        decoding = slots.computed[plan.decodes] - 1 + slots.shift[plan.decodes]
        parts = [np.broadcast_to(decoding, (3, len(decoding)))]
        for chunk in plan.chunks:
            request = slots.requests[chunk.slot]
            assert request is not None
            parts.append(request.rope.between(chunk.start, chunk.start + chunk.tokens))
        return np.concatenate(parts, axis=1)

    def seen(self, plan: StepPlan) -> SeenImages | None:
        """The image tokens of a step; None if it has none. A chunk may begin or end inside an image."""
        glimpses = list(self._glimpses(plan))
        if not glimpses:
            return None
        at = np.concatenate([np.arange(g.at, g.at + len(g.features.first_VC)) for g in glimpses])
        return SeenImages(torch.from_numpy(at).to(self.model.device), joined([g.features for g in glimpses]))

    def _glimpses(self, plan: StepPlan) -> list[_Glimpse]:
        found, packed = [], len(plan.decodes)
        for chunk in plan.chunks:
            request = self.slots.requests[chunk.slot]
            assert request is not None
            for span in request.images:
                first, last = max(span.start, chunk.start), min(span.end, chunk.start + chunk.tokens)
                if first < last:
                    features = self.gallery.features(span.image).rows(slice(first - span.start, last - span.start))
                    found.append(_Glimpse(packed + first - chunk.start, features))
            packed += chunk.tokens
        return found


class _Glimpse(NamedTuple):
    """Part of an image, at a place among the packed tokens."""

    at: int
    features: Features


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> SampledBatch:
        """One token for each of the plan's samplers; waits until the step has run."""
        ...


class StepRunner(Protocol):
    """Owns no weights: the module is the trainer's. `ahead`: a step may be launched before the last is read back."""

    ahead: bool

    def launch(self, plan: StepPlan) -> PendingStep:
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


def packed_tokens(plan: StepPlan, slots: Slots, page_size: int) -> Tokens:
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


class FinishedStep(NamedTuple):
    """A step that has already run."""

    sampled: SampledBatch

    def result(self) -> SampledBatch:
        return self.sampled


class ModelRunner:
    """One step at a time, through the module's own forward."""

    ahead = False

    def __init__(self, model: PreTrainedModel, store: KVStore, slots: Slots, stride: int) -> None:
        self.model, self.store, self.slots, self.stride = model, store, slots, stride
        self.looking = ImageInputs(model, slots) if tower_of(model) is not None else None

    def weights_changed(self) -> None:
        if self.looking is not None:
            self.looking.weights_changed()

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> FinishedStep:
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
            return FinishedStep(SampledBatch(np.empty(0, np.int64), nothing, nothing))
        draw = Draw.of(self.slots, plan.samplers)
        return FinishedStep(sample(head_logits(self.model, hidden[last]), draw))

    def _rows(self, plan: StepPlan) -> BatchRows:
        slots, ones = self.slots, np.ones(len(plan.decodes), np.int64)
        tokens = np.append(ones, [c.tokens for c in plan.chunks]).astype(np.int64)
        starts = np.append(slots.computed[plan.decodes] - 1, [c.start for c in plan.chunks]).astype(np.int64)
        owners = np.append(plan.decodes, [c.slot for c in plan.chunks]).astype(np.int64)
        return BatchRows(np.cumsum(tokens) - tokens, tokens, starts, slots.table_SP[owners])
