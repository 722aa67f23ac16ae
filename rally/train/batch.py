"""Scored episodes as a training batch: rows with an advantage for every sampled token.

It also finds the assistant turns of episodes, for rewards per turn, and writes advantages as spans for the record.

Shapes: N episodes, M sampled tokens of all rows, K turns, C reward components.
"""

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
from rally.train.packing import Flags, Row, joined
from rally.types import Episode, Image, RallyError, Segment, Turn


class TurnRewardError(RallyError):
    """The turn rewards of an episode do not match its turns."""


class _Turn(NamedTuple):
    tokens: int
    reward: float
    state: Any  # the last observation before the turn; turns in the same state have equal ones


def turns_of_episodes(episodes: Sequence[Episode]) -> Turns:
    """All assistant turns, episode by episode. The reward of a tool or user turn counts for the assistant turn
    before."""
    turns = [(i, turn) for i, episode in enumerate(episodes) for turn in _turns(episode)]
    states = {state: i for i, state in enumerate(dict.fromkeys(turn.state for _, turn in turns))}
    return Turns(
        episode_K=torch.tensor([i for i, _ in turns], dtype=torch.long),
        tokens_K=torch.tensor([turn.tokens for _, turn in turns], dtype=torch.long),
        rewards_K=torch.tensor([turn.reward for _, turn in turns], dtype=torch.float64),
        states_K=torch.tensor([states[turn.state] for _, turn in turns], dtype=torch.long),
    )


def _turns(episode: Episode) -> list[_Turn]:
    turns = _recorded_turns(episode)
    if sum(turn.tokens for turn in turns) != sum(s.sampled for s in episode.segments):
        turns = _sampled_runs(episode)
    rewards = episode.extra.get("turn_rewards")
    if rewards is None:
        return turns
    if len(rewards) != len(turns):
        raise TurnRewardError(
            f"the agent loop returned {len(rewards)} turn_rewards for an episode of {len(turns)} assistant turns; "
            "return one reward per assistant turn"
        )
    return [turn._replace(reward=turn.reward + float(r)) for turn, r in zip(turns, rewards, strict=True)]


def _recorded_turns(episode: Episode) -> list[_Turn]:
    """The turns that the loop recorded."""
    turns: list[_Turn] = []
    state: Any = None  # the prompt, which the group has in common
    early = 0.0  # rewards of excluded calls before the first turn that is trained on
    for turn in episode.turns:
        earned = turn.reward or 0.0
        if turn.role == "assistant":
            mask = episode.segments[turn.segment].response_mask[turn.start : turn.end]
            if turn.end > turn.start and not any(mask):  # the agent excluded the call; its reward still counts
                if turns:
                    turns[-1] = turns[-1]._replace(reward=turns[-1].reward + earned)
                else:
                    early += earned
                continue
            turns.append(_Turn(sum(mask), earned + early, state))
            early = 0.0
        else:
            state = turn.text, _image_hashes(turn)
            if turns:
                turns[-1] = turns[-1]._replace(reward=turns[-1].reward + earned)
    return turns


def _image_hashes(turn: Turn) -> tuple[str, ...]:
    images = (image for result in turn.tool_results for image in result.response.image or ())
    return tuple(image.hash for image in images if isinstance(image, Image))


def _images(segment: Segment, start: int, end: int) -> tuple[str, ...]:
    return tuple(span.image.hash for span in segment.images if start <= span.start < end)


def _sampled_runs(episode: Episode) -> list[_Turn]:
    """Runs of sampled tokens, for a loop that recorded no turns."""
    turns: list[_Turn] = []
    for segment in episode.segments:
        at, start = 0, len(segment.prompt_ids)
        state: Any = segment.prompt_ids, _images(segment, 0, start)
        for sampled, run in itertools.groupby(segment.response_mask):
            end = at + len(list(run))
            if sampled:
                turns.append(_Turn(end - at, 0.0, state))
            else:
                state = segment.response_ids[at:end], _images(segment, start + at, start + end)
            at = end
    return turns


GREEDY = "remax/greedy_reward"
"""The key under which an episode records the reward of its group's greedy episode."""


class CreditError(RallyError):
    """The advantage estimator does not fit the episodes."""


class ComponentError(RallyError):
    """The reward function did not return a number that the advantage estimator needs."""


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
        """The advantage of every sampled token, row by row; a single 0 if nothing was sampled."""
        advantages = joined((row.advantages for row in self.rows), np.float32)
        return torch.from_numpy(advantages) if advantages.size else torch.zeros(1)

    @property
    def live_share(self) -> float:
        """The share of episodes whose group has a non-zero advantage."""
        live = {int(self.groups_N[row.episode]) for row in self.rows if row.advantages.any()}
        return sum(group in live for group in self.groups_N.tolist()) / max(1, self.groups_N.numel())

    def mini_batches(self, groups: int, order: Sequence[int]) -> list[list[int]]:
        """The episode numbers of each mini-batch of `groups` prompts, with the prompts in `order`."""
        members: dict[int, list[int]] = {}
        for episode, group in enumerate(self.groups_N.tolist()):
            members.setdefault(group, []).append(episode)
        batches = (order[first : first + groups] for first in range(0, len(order), groups))
        return [[e for g in batch for e in members[g]] for batch in batches]


def rows_of(episodes: Sequence[Episode]) -> list[Row]:
    """A row for every segment with a sampled token, without advantages."""
    return [Row.of(segment, i) for i, e in enumerate(episodes) for segment in e.segments if segment.sampled]


def with_stale_tokens(batch: TrainBatch, episodes: Sequence[Episode], version: int) -> TrainBatch:
    """The batch with tokens marked that were not sampled by `version`, or in a turn that began with an older one: the
    KV of such a turn may still be of the older version."""
    segments = [segment for e in episodes for segment in e.segments if segment.sampled]
    rows = [
        replace(row, stale=_stale(segment, version)[row.sampled])
        for row, segment in zip(batch.rows, segments, strict=True)
    ]
    return replace(batch, rows=rows)


def _stale(segment: Segment, version: int) -> Flags:
    """For each token of the segment."""
    prompt, end = len(segment.prompt_ids), -1
    stale = np.ones(prompt + len(segment.response_ids), np.bool_)
    for span in segment.spans:
        if span.version == version and span.start != end:
            stale[prompt + span.start : prompt + span.end] = False
        end = span.end
    return stale


def build_batch(
    episodes: Sequence[Episode],
    credit: CreditSettings | None = None,
    token_rewards_M: Tensor | None = None,
    energies_M: Tensor | None = None,
) -> TrainBatch:
    """The batch of one step's episodes, which must all be scored. `token_rewards_M` are added to the rewards of their
    sampled tokens; `energies_M` are for an optimal token baseline."""
    settings = credit or CreditSettings()
    scored = scored_of(episodes, settings, token_rewards_M)._replace(energies_M=energies_M)
    if settings.estimator == "optimal_token_baseline":
        _check_single_turn(rows_of(episodes))
    return batch_of(rows_of(episodes), scored, token_advantages(scored, settings))


def _check_single_turn(rows: Sequence[Row]) -> None:
    """verl counts the tokens of tools as places too, so the two estimators differ over several turns."""
    whole = all(row.sampled[-1] - row.sampled[0] == len(row.sampled) - 1 for row in rows)
    if not whole or len({row.episode for row in rows}) < len(rows):
        raise CreditError(
            "adv_estimator=optimal_token_baseline compares tokens at the same place of single-turn responses, and "
            "these episodes have several turns; set algorithm.adv_estimator=tir_optimal_token_baseline"
        )


def resampled(batch: TrainBatch, chosen: Sequence[int], group_size: int) -> TrainBatch:
    """The batch with the episodes `chosen`, by number, some of them several times. They form groups of `group_size`, in
    their order, which divide the batch into mini-batches."""
    rows: dict[int, list[Row]] = {}
    for row in batch.rows:
        rows.setdefault(row.episode, []).append(row)
    places = torch.tensor(list(chosen), dtype=torch.long)
    return TrainBatch(
        rows=[replace(row, episode=i) for i, number in enumerate(chosen) for row in rows.get(number, ())],
        rewards_N=batch.rewards_N[places],
        groups_N=torch.arange(len(places)) // group_size,
        tokens_N=batch.tokens_N[places],
    )


def scored_of(episodes: Sequence[Episode], settings: CreditSettings, token_rewards_M: Tensor | None = None) -> Scored:
    """The rewards of the episodes as tensors."""
    assert all(e.reward is not None for e in episodes), "an unscored episode cannot be trained on"
    numbers = {group: i for i, group in enumerate(dict.fromkeys(e.group for e in episodes))}
    by_turn = settings.turn_rewards != "trajectory"  # then the rewards of turns are added from `turns`
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
    """Numbers from the `reward_info` of each episode."""
    for episode in episodes:
        for key in keys:
            if not isinstance(episode.reward_info.get(key), (bool, int, float)):
                raise ComponentError(
                    f"the reward of episode {episode.id} has no number under {key}, which algorithm.gdpo_reward_keys "
                    "names; let the reward function return it"
                )
    return torch.tensor([[float(e.reward_info[key]) for key in keys] for e in episodes], dtype=torch.float64)


def _with_advantages(rows: Sequence[Row], advantages_M: Tensor) -> list[Row]:
    sizes = [len(row.sampled) for row in rows]
    assert len(advantages_M) == sum(sizes), "one advantage for each sampled token"
    parts = advantages_M.float().split(sizes)
    return [replace(row, advantages=part.numpy()) for row, part in zip(rows, parts, strict=True)]


def advantage_spans(
    episodes: Sequence[Episode], rows: Sequence[Row]
) -> dict[str, tuple[tuple[AdvantageSpan, ...], ...]]:
    """Spans of equal advantage by episode id and segment. `rows` are the segments with sampled tokens, in order."""
    following = iter(rows)
    return {
        episode.id: tuple(
            tuple(_spans(next(following), len(segment.prompt_ids))) if segment.sampled else ()
            for segment in episode.segments
        )
        for episode in episodes
    }


def _spans(row: Row, offset: int) -> Iterator[AdvantageSpan]:
    """Contiguous sampled tokens with one advantage, counted from the first response token."""
    places, values = row.sampled, row.advantages
    breaks = np.flatnonzero((np.diff(places) != 1) | (values[1:] != values[:-1])) + 1
    for first, end in pairwise((0, *breaks.tolist(), len(places))):
        # 0.71 and not 0.7099999785423279: the fewest digits that are the same single-precision number.
        value = float(str(values[first]))
        yield AdvantageSpan(value, int(places[first]) - offset, int(places[end - 1]) + 1 - offset)
