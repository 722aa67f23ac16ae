"""Scored episodes become one training batch: rows with advantages, and the weights of their tokens in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rally.algos import advantages
from rally.train.packing import Row
from rally.types import Episode


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """N episodes of one step, grouped by prompt. `rows` are their segments, in the order of the episodes."""

    rows: list[Row]
    rewards_N: Tensor
    advantages_N: Tensor
    groups_N: Tensor
    tokens_N: Tensor  # sampled tokens of each episode, over all its segments

    @property
    def num_groups(self) -> int:
        return int(self.groups_N.max()) + 1 if self.groups_N.numel() else 0

    @property
    def live_share(self) -> float:
        """Share of episodes whose group carries a signal."""
        live = advantages.group_statistics(self.rewards_N, self.groups_N).std_N > 0
        return float(live.double().mean()) if live.numel() else 0.0

    def mini_batches(self, groups: int, order: Sequence[int]) -> list[list[int]]:
        """Episode numbers of each mini-batch of `groups` prompts, the prompts taken in `order`."""
        members: dict[int, list[int]] = {}
        for episode, group in enumerate(self.groups_N.tolist()):
            members.setdefault(group, []).append(episode)
        batches = (order[first : first + groups] for first in range(0, len(order), groups))
        return [[e for g in batch for e in members[g]] for batch in batches]


def build_batch(episodes: Sequence[Episode], *, by_std: bool = True) -> TrainBatch:
    """Group-relative advantages over the episodes of one step. Every episode must be scored."""
    assert all(e.reward is not None for e in episodes), "an unscored episode cannot be trained on"
    numbers = {group: i for i, group in enumerate(dict.fromkeys(e.group for e in episodes))}
    groups = torch.tensor([numbers[e.group] for e in episodes], dtype=torch.long)
    rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
    advantage = advantages.grpo(rewards, groups, by_std=by_std)
    rows = [
        Row.of(segment, i, a)
        for i, (episode, a) in enumerate(zip(episodes, advantage.tolist(), strict=True))
        for segment in episode.segments
        if segment.sampled
    ]
    tokens = torch.tensor([sum(s.sampled for s in e.segments) for e in episodes])
    return TrainBatch(rows=rows, rewards_N=rewards, advantages_N=advantage, groups_N=groups, tokens_N=tokens)
