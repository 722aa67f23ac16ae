"""Runs one planned step through the trainer's module and samples a token for each finished chunk.

`ModelRunner` is the reference: any device, one step at a time, result read back at once. `CudaRunner` (cuda_runner.py)
is tested against it. Both use `packed_tokens` and `ImageInputs` from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.engines.embedded.attention_torch import BatchRows, PagedAttention
from rally.engines.embedded.kv_cache import KVStore
from rally.engines.embedded.request_slots import Ints, Slots
from rally.engines.embedded.sampler import Draw, SampledBatch, sample
from rally.engines.embedded.scheduler import StepPlan
from rally.engines.embedded.state_cache import StateStore, StepStates
from rally.models.attention import packed_hidden
from rally.models.fp8 import Fp8Linears, forward_in_fp8
from rally.models.lm_head import head_logits
from rally.models.routing import RouteRecorder, routed
from rally.models.vision import FeatureCache, Features, SeenImages, joined, patches_of


class ImageInputs:
    """Positions and image features of a step, for vision models. Features are cached until `weights_changed`."""

    def __init__(self, model: PreTrainedModel, slots: Slots) -> None:
        self.model, self.slots = model, slots
        self.feature_cache = FeatureCache(model)

    def weights_changed(self) -> None:
        self.feature_cache.forget()

    def positions(self, plan: StepPlan) -> Ints:
        """[3, T] positions of the packed tokens."""
        slots = self.slots
        decoding = slots.computed[plan.decodes] - 1 + slots.shift[plan.decodes]
        parts = [np.broadcast_to(decoding, (3, len(decoding)))]
        for chunk in plan.chunks:
            request = slots.requests[chunk.slot]
            assert request is not None
            parts.append(request.rope.between(chunk.start, chunk.start + chunk.tokens))
        return np.concatenate(parts, axis=1)

    def seen(self, plan: StepPlan) -> SeenImages | None:
        """The image tokens of a step and their features; None without any. A chunk may begin or end inside an image."""
        parts = self._image_parts(plan)
        if not parts:
            return None
        at = np.concatenate([np.arange(part.at, part.at + len(part.features.first_VC)) for part in parts])
        return SeenImages(torch.from_numpy(at).to(self.model.device), joined([part.features for part in parts]))

    def _image_parts(self, plan: StepPlan) -> list[_ImagePart]:
        parts, packed = [], len(plan.decodes)
        for chunk in plan.chunks:
            request = self.slots.requests[chunk.slot]
            assert request is not None
            for span in request.images:
                first, last = max(span.start, chunk.start), min(span.end, chunk.start + chunk.tokens)
                if first < last:
                    features = self.feature_cache.features(span.image).rows(
                        slice(first - span.start, last - span.start)
                    )
                    parts.append(_ImagePart(packed + first - chunk.start, features))
            packed += chunk.tokens
        return parts


class _ImagePart(NamedTuple):
    """Features of part of an image, at index `at` of the packed tokens."""

    at: int
    features: Features


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> SampledBatch:
        """One token for each row of the plan's samplers; waits until the step has run."""
        ...


class StepRunner(Protocol):
    """Runs steps. `ahead`: a step may be launched before the previous one is read back."""

    ahead: bool

    def launch(self, plan: StepPlan) -> PendingStep:
        """Copy pages, compute the planned tokens, write their KV and sample."""
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
    """One token for each decoding slot (already counted as computed), then the chunks."""
    owner, positions, last = plan.decodes, slots.computed[plan.decodes] - 1, np.arange(len(plan.decodes))
    if plan.chunks:
        owner = np.concatenate([owner] + [np.full(c.tokens, c.slot) for c in plan.chunks])
        positions = np.concatenate([positions] + [np.arange(c.start, c.start + c.tokens) for c in plan.chunks])
        ends = len(last) + np.cumsum([c.tokens for c in plan.chunks])
        sampled = [np.arange(end - c.samples, end) for c, end in zip(plan.chunks, ends, strict=True)]
        last = np.concatenate([last, *sampled])
    pages = slots.table_SP[owner, positions // page_size].astype(np.int64)
    return Tokens(
        ids=np.maximum(slots.ids[owner, positions], 0).astype(np.int64),  # image tokens have negative ids
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

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        slots: Slots,
        stride: int,
        states: StateStore | None = None,
        fp8: Fp8Linears | None = None,
    ) -> None:
        self.fp8 = fp8
        self.model, self.store, self.slots, self.stride, self.states = model, store, slots, stride, states
        self.image_inputs = ImageInputs(model, slots) if patches_of(model) is not None else None

    def weights_changed(self) -> None:
        if self.image_inputs is not None:
            self.image_inputs.weights_changed()

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> FinishedStep:
        if plan.copies:
            self.store.copy_pages(plan.copies)
        device = self.store.device
        ids, positions, places, last = (
            torch.from_numpy(x).to(device) for x in packed_tokens(plan, self.slots, self.store.page_size)
        )
        rows = step_rows(plan, self.slots)
        context = PagedAttention(self.store, rows, places, self.stride)
        if self.states is not None:
            self.states.copy(plan.saves)
            self.states.copy(plan.loads)
            context.use_states(step_states(self.states, plan, rows))
        seen = None
        if self.image_inputs is not None:
            positions = torch.from_numpy(self.image_inputs.positions(plan)).to(device)
            seen = self.image_inputs.seen(plan)
        with recorded_routes(self.store, places), forward_in_fp8(self.fp8):
            hidden = packed_hidden(self.model, ids, positions, context, seen)
        if self.states is not None:
            self.states.copy(plan.snapshots)
        if not len(last):
            nothing = np.empty(0, np.float32)
            return FinishedStep(SampledBatch(np.empty(0, np.int64), nothing, nothing))
        draw = Draw.of(self.slots, plan.samplers, plan.targets(self.slots))
        return FinishedStep(sample(head_logits(self.model, hidden[last]), draw))


@contextmanager
def recorded_routes(store: KVStore, places_T: Tensor) -> Iterator[None]:
    """Store the experts that a forward chooses for its tokens, if the store has room for them."""
    if store.routes is None:
        yield
        return
    with routed(recorder := RouteRecorder()):
        yield
    store.routes.index_copy_(0, places_T, recorder.recorded())


def step_rows(plan: StepPlan, slots: Slots) -> BatchRows:
    """The requests of a step in the order of their tokens."""
    tokens = np.append(np.ones(len(plan.decodes), np.int64), [c.tokens for c in plan.chunks]).astype(np.int64)
    starts = np.append(slots.computed[plan.decodes] - 1, [c.start for c in plan.chunks]).astype(np.int64)
    owners = np.append(plan.decodes, [c.slot for c in plan.chunks]).astype(np.int64)
    return BatchRows(np.cumsum(tokens) - tokens, tokens, starts, slots.table_SP[owners])


def step_states(store: StateStore, plan: StepPlan, rows: BatchRows) -> StepStates:
    owners = np.append(plan.decodes, [c.slot for c in plan.chunks]).astype(np.int64)
    return StepStates(store, owners, rows.start, rows.tokens)
