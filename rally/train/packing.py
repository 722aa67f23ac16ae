"""Episodes become packed micro-batches: no padding, and only sampled tokens ever reach a loss.

Shapes: T packed tokens of a micro-batch, M of them sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rally.types import Segment


@dataclass(frozen=True, kw_only=True)
class Row:
    """One segment as the trainer sees it. `episode` numbers the episode it belongs to within the batch."""

    ids: tuple[int, ...]
    sampled: tuple[int, ...]  # positions in ids of sampled tokens; each is predicted from the position before it
    logprobs: tuple[float, ...]  # of those tokens, as the engine recorded them
    episode: int
    advantage: float = 0.0

    @classmethod
    def of(cls, segment: Segment, episode: int, advantage: float) -> Row:
        offset = len(segment.prompt_ids)
        sampled = tuple(offset + i for i, m in enumerate(segment.response_mask) if m)
        assert not sampled or sampled[0] > 0, "the first token of a history cannot have been sampled"
        end = sampled[-1] + 1 if sampled else 0  # what was observed after the last sampled token predicts nothing
        return cls(
            ids=segment.ids[:end],
            sampled=sampled,
            logprobs=tuple(p for p, m in zip(segment.response_logprobs, segment.response_mask, strict=True) if m),
            episode=episode,
            advantage=advantage,
        )


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Several rows side by side in one sequence."""

    ids_T: Tensor
    positions_T: Tensor
    lengths: list[int]
    predict_M: Tensor  # index of the token before each sampled one
    targets_M: Tensor  # the sampled tokens
    old_logp_M: Tensor
    advantages_M: Tensor
    episode_M: Tensor
    row_M: Tensor


def pack(rows: Sequence[Row], device: torch.device) -> PackedRows:
    """Lay rows side by side."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.ids))
    predict = [start + p - 1 for row, start in zip(rows, starts, strict=False) for p in row.sampled]
    counts = torch.tensor([len(row.sampled) for row in rows])
    return PackedRows(
        ids_T=torch.tensor([i for row in rows for i in row.ids], device=device),
        positions_T=torch.cat([torch.arange(len(row.ids)) for row in rows]).to(device),
        lengths=[len(row.ids) for row in rows],
        predict_M=torch.tensor(predict, device=device),
        targets_M=torch.tensor([row.ids[p] for row in rows for p in row.sampled], device=device),
        old_logp_M=torch.tensor([p for row in rows for p in row.logprobs], device=device),
        advantages_M=torch.tensor([row.advantage for row in rows]).repeat_interleave(counts).to(device),
        episode_M=torch.tensor([row.episode for row in rows]).repeat_interleave(counts).to(device),
        row_M=torch.arange(len(rows)).repeat_interleave(counts).to(device),
    )


def by_length(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order that is quickest to train on: neighbours of equal length share an attention call."""
    return sorted(rows, key=lambda row: len(row.ids))


def micro_batches(rows: Sequence[Row], max_tokens: int, max_rows: int | None = None) -> Iterator[list[Row]]:
    """Cut rows, in order, into batches of at most `max_tokens` tokens; a longer row gets a batch of its own."""
    batch: list[Row] = []
    tokens = 0
    for row in rows:
        full = batch and (tokens + len(row.ids) > max_tokens or (max_rows and len(batch) >= max_rows))
        if full:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row.ids)
    if batch:
        yield batch
