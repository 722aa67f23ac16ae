"""The assistant turns of episodes in numbers: every sampled token belongs to exactly one of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rally.algos.credit import Turns
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
