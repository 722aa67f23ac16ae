"""What every sampled token was given, as spans of equal advantage: a person can see what an episode was taught."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rally.algos.credit_assignment import CreditSettings, Scored, Turns, token_advantages
from rally.rewards import outcome
from rally.track import AdvantageSpan
from rally.train.packing import Row
from rally.types import Episode, Image, RallyError, Segment, Turn


class TurnRewardError(RallyError):
    """Rewards of turns that do not fit the turns."""


class _Turn(NamedTuple):
    tokens: int
    reward: float
    answers: Any  # what the turn was shown last; equal for turns in the same state


def turns_of_episodes(episodes: Sequence[Episode]) -> Turns:
    """All turns, episode by episode. What a tool or a user's turn earned belongs to the assistant turn before it."""
    turns = [(i, turn) for i, episode in enumerate(episodes) for turn in _turns(episode)]
    states = {answers: i for i, answers in enumerate(dict.fromkeys(turn.answers for _, turn in turns))}
    return Turns(
        episode_K=torch.tensor([i for i, _ in turns], dtype=torch.long),
        tokens_K=torch.tensor([turn.tokens for _, turn in turns], dtype=torch.long),
        rewards_K=torch.tensor([turn.reward for _, turn in turns], dtype=torch.float64),
        states_K=torch.tensor([states[turn.answers] for _, turn in turns], dtype=torch.long),
    )


def _turns(episode: Episode) -> list[_Turn]:
    turns = _told_turns(episode)
    if sum(turn.tokens for turn in turns) != sum(s.sampled for s in episode.segments):
        turns = _runs(episode)
    given = episode.extra.get("turn_rewards")
    if given is None:
        return turns
    if len(given) != len(turns):
        raise TurnRewardError(
            f"the agent loop gave {len(given)} turn_rewards to an episode of {len(turns)} assistant turns; give one "
            "reward for each assistant turn"
        )
    return [turn._replace(reward=turn.reward + float(r)) for turn, r in zip(turns, given, strict=True)]


def _told_turns(episode: Episode) -> list[_Turn]:
    """As the loop recorded them."""
    turns: list[_Turn] = []
    seen: Any = None  # the prompt, which the group has in common
    for turn in episode.turns:
        earned = turn.reward or 0.0
        if turn.role == "assistant":
            mask = episode.segments[turn.segment].response_mask[turn.start : turn.end]
            turns.append(_Turn(sum(mask), earned, seen))
        else:
            seen = turn.text, _shown(turn)
            if turns:
                turns[-1] = turns[-1]._replace(reward=turns[-1].reward + earned)
    return turns


def _shown(turn: Turn) -> tuple[str, ...]:
    images = (image for result in turn.tool_results for image in result.response.image or ())
    return tuple(image.hash for image in images if isinstance(image, Image))


def _images(segment: Segment, start: int, end: int) -> tuple[str, ...]:
    return tuple(span.image.hash for span in segment.images if start <= span.start < end)


def _runs(episode: Episode) -> list[_Turn]:
    """Runs of sampled tokens, for a loop that did not tell its turns."""
    turns: list[_Turn] = []
    for segment in episode.segments:
        at, start = 0, len(segment.prompt_ids)
        seen: Any = segment.prompt_ids, _images(segment, 0, start)
        for sampled, run in itertools.groupby(segment.response_mask):
            end = at + len(list(run))
            if sampled:
                turns.append(_Turn(end - at, 0.0, seen))
            else:
                seen = segment.response_ids[at:end], _images(segment, start + at, start + end)
            at = end
    return turns


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


def advantage_spans(
    episodes: Sequence[Episode], rows: Sequence[Row]
) -> dict[str, tuple[tuple[AdvantageSpan, ...], ...]]:
    """By episode id, the spans of each segment. `rows` are the segments with something sampled, in order."""
    following = iter(rows)
    return {
        episode.id: tuple(
            tuple(_spans(next(following), len(segment.prompt_ids))) if segment.sampled else ()
            for segment in episode.segments
        )
        for episode in episodes
    }


def _spans(row: Row, offset: int) -> Iterator[AdvantageSpan]:
    """Unbroken runs of sampled tokens with one advantage, counted from the first response token."""
    places, values = row.sampled, row.advantages
    neighbours = zip(places, places[1:], values, values[1:], strict=False)
    breaks = [i for i, (p, q, a, b) in enumerate(neighbours, start=1) if q - p != 1 or a != b]
    for first, end in pairwise((0, *breaks, len(places))):
        # 0.71 and not 0.7099999785423279: the fewest digits that are the same single-precision number.
        value = float(str(np.float32(values[first])))
        yield AdvantageSpan(value, places[first] - offset, places[end - 1] + 1 - offset)
