"""What a planned step of the engine shows the module: three axes of positions, and the features of its image tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from rally.engines.embedded.scheduler import Plan
from rally.engines.embedded.slots import Ints, Slots
from rally.engines.embedded.vision import Features, Gallery, Seen, joined


class Looking:
    """For a module that sees; features are kept between steps until `weights_changed`."""

    def __init__(self, model: PreTrainedModel, slots: Slots) -> None:
        self.model, self.slots = model, slots
        self.gallery = Gallery(model)

    def weights_changed(self) -> None:
        self.gallery.forget()

    def positions(self, plan: Plan) -> Ints:
        """Of the packed tokens, on three axes."""
        slots = self.slots
        decoding = slots.computed[plan.decodes] - 1 + slots.shift[plan.decodes]
        parts = [np.broadcast_to(decoding, (3, len(decoding)))]
        for chunk in plan.chunks:
            request = slots.requests[chunk.slot]
            assert request is not None
            parts.append(request.rope.between(chunk.start, chunk.start + chunk.tokens))
        return np.concatenate(parts, axis=1)

    def seen(self, plan: Plan) -> Seen | None:
        """The image tokens of a step; None if it has none. A chunk may begin or end inside an image."""
        glimpses = list(self._glimpses(plan))
        if not glimpses:
            return None
        at = np.concatenate([np.arange(g.at, g.at + len(g.features.first_VC)) for g in glimpses])
        return Seen(torch.from_numpy(at).to(self.model.device), joined([g.features for g in glimpses]))

    def _glimpses(self, plan: Plan) -> list[_Glimpse]:
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
