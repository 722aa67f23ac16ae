"""The built-in reward functions score an episode where it is, and a mistake in its row is a named error as in a worker.

They are ours, pure, and linear in the text they read: there is nothing to kill, so nothing is sent anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rally.rewards.custom import load_reward_function
from rally.rewards.registry import built_in_score
from rally.rewards.score import Score, describe
from rally.types import Episode, Message


def solution_text(episode: Episode) -> str:
    """The assistant turns' text, one after the other, separated by newlines."""
    return "\n".join(_assistant_texts(episode))


def request_of(episode: Episode) -> dict[str, Any]:
    """The four arguments of a reward function. `extra_info` is the row's, and on top of it what happened."""
    return {
        "data_source": episode.task.data_source,
        "solution_str": solution_text(episode),
        "ground_truth": episode.task.ground_truth,
        "extra_info": {**episode.task.extra_info, **_happened(episode)},
    }


def _happened(episode: Episode) -> dict[str, Any]:
    rewarded = [(result.call.name, result.reward) for result in episode.tool_results if result.reward is not None]
    by_tool: dict[str, list[float]] = {}
    for tool, reward in rewarded:
        by_tool.setdefault(tool, []).append(reward)
    return {
        "num_turns": episode.extra.get("num_turns", episode.num_turns),  # a user's loop may count in its own way
        "turn_scores": [turn.reward for turn in episode.turns if turn.reward is not None],
        "tool_rewards": [reward for _, reward in rewarded],
        "rollout_reward_scores": by_tool,
        "messages": [
            *({"role": message["role"], "text": _text(message)} for message in episode.task.prompt),
            *({"role": turn.role, "text": turn.text} for turn in episode.turns),
        ],
        "stop_reason": episode.stop_reason.value,
        **_judged(episode),
        **_returned(episode),
        "last_turn": next(reversed(_assistant_texts(episode)), ""),
    }


def _judged(episode: Episode) -> dict[str, Any]:
    """What a simulated user gave the whole exchange, where there was one."""
    held = episode.extra.get("interaction")
    return {"interaction_score": held.get("score")} if isinstance(held, dict) else {}


def _returned(episode: Episode) -> dict[str, Any]:
    """What an agent behind the gateway gave as its answer, under a name that no row's own fields have."""
    return {key: episode.extra[key] for key in ("agent_answer",) if key in episode.extra}


def _assistant_texts(episode: Episode) -> list[str]:
    return [turn.text for turn in episode.turns if turn.role == "assistant"]


def _text(message: Message) -> str:
    """The words of a message whose content may also be a list of parts, some of them images."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


class BuiltIn:
    """The functions of this package with a run's keywords."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        load_reward_function(kwargs=kwargs)  # refuses keywords that no function takes
        self._kwargs = kwargs

    def score(self, episode: Episode) -> Score:
        start = time.perf_counter()
        try:
            value = built_in_score(**request_of(episode), **self._kwargs)
        except ValueError as error:
            return Score(error=describe(error), seconds=time.perf_counter() - start)
        return Score.of(value, time.perf_counter() - start)
