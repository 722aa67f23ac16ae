"""Multi-turn supervised fine-tuning: encoding of conversations, the training step and the validation loss.

The loss is on assistant turns only. Conversations are encoded by the codec of the rollout: prompts and tool responses
as an episode would observe them, replies as canonical ids with their end-of-turn token.

Shapes: M supervised tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rally.chat import ChatCodec
from rally.data import batch_indices
from rally.models.sharding import gather_groups
from rally.train.divergence import Tried
from rally.train.forward.logprobs import token_logprobs
from rally.train.loss_inputs import over_rows
from rally.train.micro_batches import MicroBatchLimits, micro_batches_for, share_of
from rally.train.packing import PackedRows, Row
from rally.train.policy import Policy
from rally.train.rank_messages import ComputeLoss, SftStep
from rally.train.update import take_step
from rally.types import Message, RallyError


class SftError(RallyError):
    """A conversation that cannot be trained on."""


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """How conversations are batched and truncated."""

    batch_size: int
    max_length: int = 1024
    truncation: Literal["error", "left", "right"] = "error"
    max_tokens: int = 8192
    max_rows: int | None = None

    @property
    def limits(self) -> MicroBatchLimits:
        return MicroBatchLimits(self.max_tokens, self.max_rows)


class EncodedRow(NamedTuple):
    """An encoded conversation; `truncated`: data.truncation removed a part of it."""

    row: Row
    truncated: bool


def encode_row(
    codec: ChatCodec, messages: Sequence[Message], settings: SftSettings, label: str = "", number: int = 0
) -> EncodedRow:
    """Encode one conversation, `number` in its data set. One that is too long is handled by `truncation`."""
    ids, mask, images = codec.encode_conversation(messages)
    truncated = len(ids) > settings.max_length
    if truncated:
        if images and settings.truncation != "error":
            raise SftError(
                f"conversation {label} has {len(ids)} tokens, more than data.max_length={settings.max_length}, and "
                "contains images, which cannot be truncated; raise data.max_length"
            )
        if settings.truncation == "error":
            raise SftError(
                f"conversation {label} has {len(ids)} tokens, more than data.max_length={settings.max_length}; raise "
                "it, or choose data.truncation=left or right"
            )
        keep = slice(-settings.max_length, None) if settings.truncation == "left" else slice(settings.max_length)
        ids, mask = ids[keep], mask[keep]
    supervised = np.fromiter(mask, np.bool_, len(mask))
    supervised[:1] = False  # nothing predicts the first token
    sampled = np.flatnonzero(supervised).astype(np.int32)
    row = Row(
        ids=np.fromiter(ids, np.int32, len(ids)),
        sampled=sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        episode=number,
        images=images,
    )
    return EncodedRow(row, truncated)


def conversation_row(codec: ChatCodec, messages: Sequence[Message], settings: SftSettings, label: str = "") -> Row:
    """The row alone, for conversations that were not read from a file."""
    return encode_row(codec, messages, settings, label).row


def sft_step(
    policy: Policy, rows: Sequence[Row], settings: SftSettings, *, tokens: int | None = None
) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of the supervised tokens. Only rank 0 has the rows; the
    others get `tokens`, the number of supervised ones."""
    tokens = sum(len(row.sampled) for row in rows) if tokens is None else tokens
    if tokens == 0:
        raise SftError("this batch has no assistant token to train on; raise data.max_length")
    mine, tried = torch.zeros(1, device=policy.device), []
    with policy.ranks.broadcast(SftStep(tokens, torch.initial_seed())), policy.training():
        rounds = micro_batches_for(policy.ranks, rows, settings.limits)
        for part in share_of(policy.ranks, rounds):
            loss_M = -token_logprobs(policy.model, policy.pack(part.rows)).logp_M / tokens
            (loss_M.sum() * part.counts).backward()
            if part.counts:
                mine += loss_M.detach().sum()
                tried.append(Tried(part.rows, loss_M.detach()))
        norm = take_step(policy, rounds, tried)
        total = sum(map(float, gather_groups(policy.ranks, mine)))
    rate = policy.optimizer.param_groups[0]["lr"]
    policy.advance()
    return {
        "train/loss": total,
        "train/grad_norm": norm,
        "train/lr": rate,
        "train/tokens": float(tokens),
        **policy.recomputed(),
    }


def sft_loss(policy: Policy, rows: Sequence[Row], settings: SftSettings) -> float:
    """Mean negative log-likelihood, without training: the validation loss."""

    def forward(packed: PackedRows) -> Tensor:
        return token_logprobs(policy.model, packed).logp_M

    supervised = [row for row in rows if len(row.sampled)]
    with policy.ranks.broadcast(ComputeLoss()):
        logp_M = over_rows(supervised, forward, policy.device, settings.limits, policy.ranks)
    return -float(logp_M.sum(dtype=torch.float64)) / max(1, logp_M.numel())


def sft_batches(
    rows: Sequence[Row], settings: SftSettings, *, steps: range, seed: int, shuffle: bool
) -> Iterator[tuple[int, list[Row]]]:
    """(step, batch) for each step; a batch depends on (seed, step) alone."""
    for step in steps:
        chosen = batch_indices(len(rows), settings.batch_size, seed=seed, step=step, shuffle=shuffle)
        yield step, [rows[i] for i in chosen]
