"""Scored episodes become one training batch: rows in the order of the episodes, an advantage per sampled token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rally.algos.credit import CreditSettings, Scored, token_advantages
from rally.rewards import outcome
from rally.train.packing import Row
from rally.train.turns import turns_of_episodes
from rally.types import Episode, RallyError

GREEDY = "remax/greedy_reward"
"""Where an episode records what the greedy one of its group earned."""


class ComponentError(RallyError):
    """A reward function that does not report what an estimator needs."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """N episodes of one step, grouped by prompt. `rows` are their segments, in the order of the episodes."""

    rows: list[Row]
    rewards_N: Tensor
    groups_N: Tensor
    tokens_N: Tensor  # sampled tokens of each episode, over all its segments

    @property
    def num_groups(self) -> int:
        return int(self.groups_N.max()) + 1 if self.groups_N.numel() else 0

    @property
    def advantages_M(self) -> Tensor:
        """Of every sampled token, row by row; a single 0 where nothing was sampled."""
        found = np.fromiter(itertools.chain.from_iterable(row.advantages for row in self.rows), np.float32)
        return torch.from_numpy(found) if found.size else torch.zeros(1)

    @property
    def live_share(self) -> float:
        """Share of episodes whose group carries a signal."""
        taught = {int(self.groups_N[row.episode]) for row in self.rows if any(row.advantages)}
        return sum(group in taught for group in self.groups_N.tolist()) / max(1, self.groups_N.numel())

    def mini_batches(self, groups: int, order: Sequence[int]) -> list[list[int]]:
        """Episode numbers of each mini-batch of `groups` prompts, the prompts taken in `order`."""
        members: dict[int, list[int]] = {}
        for episode, group in enumerate(self.groups_N.tolist()):
            members.setdefault(group, []).append(episode)
        batches = (order[first : first + groups] for first in range(0, len(order), groups))
        return [[e for g in batch for e in members[g]] for batch in batches]


def rows_of(episodes: Sequence[Episode]) -> list[Row]:
    """Every segment with something sampled, without advantages yet."""
    return [Row.of(segment, i) for i, e in enumerate(episodes) for segment in e.segments if segment.sampled]


def build_batch(
    episodes: Sequence[Episode],
    credit: CreditSettings | None = None,
    token_rewards_M: Tensor | None = None,
) -> TrainBatch:
    """Advantages over the episodes of one step, which must all be scored. `token_rewards_M` are added to what their
    sampled tokens earn."""
    settings = credit or CreditSettings()
    scored = scored_of(episodes, settings, token_rewards_M)
    return batch_of(rows_of(episodes), scored, token_advantages(scored, settings))


def scored_of(episodes: Sequence[Episode], settings: CreditSettings, token_rewards_M: Tensor | None = None) -> Scored:
    """What the episodes earned, in numbers."""
    assert all(e.reward is not None for e in episodes), "an unscored episode cannot be trained on"
    numbers = {group: i for i, group in enumerate(dict.fromkeys(e.group for e in episodes))}
    by_turn = settings.turn_rewards != "trajectory"  # then what is recorded on turns is added up from there
    rewards = [outcome(e) if by_turn else e.reward for e in episodes]
    return Scored(
        rewards_N=torch.tensor(rewards, dtype=torch.float64),
        groups_N=torch.tensor([numbers[e.group] for e in episodes], dtype=torch.long),
        tokens_N=torch.tensor([sum(s.sampled for s in e.segments) for e in episodes]),
        token_rewards_M=token_rewards_M,
        turns=turns_of_episodes(episodes) if settings.needs_turns else None,
        baselines_N=_reported(episodes, [GREEDY])[:, 0] if settings.needs_greedy else None,
        components_NC=_reported(episodes, settings.components) if settings.components else None,
    )


def batch_of(rows: Sequence[Row], scored: Scored, advantages_M: Tensor) -> TrainBatch:
    """Rows of scored episodes, with the advantage of each sampled token."""
    return TrainBatch(
        rows=_with_advantages(rows, advantages_M),
        rewards_N=scored.rewards_N,
        groups_N=scored.groups_N,
        tokens_N=scored.tokens_N,
    )


def _reported(episodes: Sequence[Episode], keys: Sequence[str]) -> Tensor:
    """Numbers that were recorded with the reward of each episode."""
    for episode in episodes:
        for key in keys:
            if not isinstance(episode.reward_info.get(key), (bool, int, float)):
                raise ComponentError(
                    f"the reward of episode {episode.id} came without a number under {key}, which "
                    "algorithm.gdpo_reward_keys names; let the reward function return it"
                )
    return torch.tensor([[float(e.reward_info[key]) for key in keys] for e in episodes], dtype=torch.float64)


def _with_advantages(rows: Sequence[Row], advantages_M: Tensor) -> list[Row]:
    assert len(advantages_M) == sum(len(row.sampled) for row in rows), "one advantage for each sampled token"
    left = iter(advantages_M.tolist())
    return [replace(row, advantages=tuple(itertools.islice(left, len(row.sampled)))) for row in rows]
