"""Runs one step of planned work through the trainer's own module and returns a sampled token per finished chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rally.engines.embedded.attention import head_logits, packed_hidden
from rally.engines.embedded.paged import PagedAttention, Row
from rally.engines.embedded.pages import KVStore
from rally.engines.embedded.sampler import Sampled, sample
from rally.engines.embedded.scheduler import Work


class ModelRunner:
    """Owns no weights: the module is the trainer's."""

    def __init__(self, model: PreTrainedModel, store: KVStore) -> None:
        self.model = model
        self.store = store

    @torch.no_grad()
    def run(self, plan: Sequence[Work]) -> Sampled:
        """Compute the planned tokens, write their KV, and sample for every work that `samples`, in plan order."""
        device = self.store.keys[0].device
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[Row] = []
        last: list[int] = []
        for request, start, count in plan:
            rows.append(Row(len(ids), count, start, request.pages))
            ids.extend(request.ids[start : start + count])
            positions.extend(range(start, start + count))
            slots.extend(self._slots(request.pages, start, count))
            last.append(len(ids) - 1)
        context = PagedAttention(self.store, rows, torch.tensor(slots, device=device))
        hidden = packed_hidden(
            self.model, torch.tensor(ids, device=device), torch.tensor(positions, device=device), context
        )
        chosen = [(work.request, at) for work, at in zip(plan, last, strict=True) if work.samples]
        if not chosen:
            return Sampled([], [], [])
        logits = head_logits(self.model, hidden[torch.tensor([at for _, at in chosen], device=device)])
        requests = [request for request, _ in chosen]
        return sample(logits, [r.params for r in requests], [r.seed for r in requests], [r.sampled for r in requests])

    def _slots(self, pages: Sequence[int], start: int, count: int) -> list[int]:
        size = self.store.page_size
        return [pages[p // size] * size + p % size for p in range(start, start + count)]
