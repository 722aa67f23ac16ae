"""Makes the arguments of a reward function from an episode, and calls the built-in functions in this process.

The built-in functions are pure and linear in the text they read, so they need no worker. A mistake in a row is an error
of the episode, as in a worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rally.rewards.custom_functions import load_reward_function
from rally.rewards.registry import built_in_score
from rally.rewards.score import Score, describe
from rally.types import Episode, Message


def solution_text(episode: Episode) -> str:
    """The text that is scored: all assistant turns, joined by newlines. Of an agent behind the gateway it is the answer
    that the agent returned, or the last reply of its main conversation."""
    scored = episode.extra.get("scored_text")
    return scored if isinstance(scored, str) else "\n".join(_assistant_texts(episode))


def request_of(episode: Episode) -> dict[str, Any]:
    """The four arguments of a reward function. `extra_info` is the row's, extended by facts about the episode."""
    return {
        "data_source": episode.task.data_source,
        "solution_str": solution_text(episode),
        "ground_truth": episode.task.ground_truth,
        "extra_info": {**episode.task.extra_info, **_episode_facts(episode)},
    }


def batch_request_of(episodes: Sequence[Episode], *, with_ids: bool) -> dict[str, Any]:
    """The request of a function that scores a whole batch."""
    requests = []
    for episode in episodes:
        ids = [id for segment in episode.segments for id in segment.response_ids]
        more = {"completion_ids": ids} if with_ids else {}
        requests.append({**request_of(episode), "prompt_messages": len(episode.task.prompt), **more})
    return {"requests": requests}


def _episode_facts(episode: Episode) -> dict[str, Any]:
    rewarded = [(result.call.name, result.reward) for result in episode.tool_results if result.reward is not None]
    by_tool: dict[str, list[float]] = {}
    for tool, reward in rewarded:
        by_tool.setdefault(tool, []).append(reward)
    return {
        "num_turns": episode.extra.get("num_turns", episode.num_turns),  # a user's loop may report its own count
        "turn_scores": [turn.reward for turn in episode.turns if turn.reward is not None],
        "tool_rewards": [reward for _, reward in rewarded],
        "rollout_reward_scores": by_tool,
        "messages": [
            *({"role": message["role"], "text": message_text(message)} for message in episode.task.prompt),
            *({"role": turn.role, "text": turn.text} for turn in episode.turns),
        ],
        "stop_reason": episode.stop_reason.value,
        **_interaction_score(episode),
        **_agent_answer(episode),
        "last_turn": episode.extra.get("scored_text", next(reversed(_assistant_texts(episode)), "")),
    }


def _interaction_score(episode: Episode) -> dict[str, Any]:
    """The score that a simulated user gave the episode, if there was one."""
    interaction = episode.extra.get("interaction")
    return {"interaction_score": interaction.get("score")} if isinstance(interaction, dict) else {}


def _agent_answer(episode: Episode) -> dict[str, Any]:
    """The answer that an agent behind the gateway returned."""
    return {key: episode.extra[key] for key in ("agent_answer",) if key in episode.extra}


def _assistant_texts(episode: Episode) -> list[str]:
    return [turn.text for turn in episode.turns if turn.role == "assistant"]


def message_text(message: Message) -> str:
    """The text of a message, whose content may be a list of text and image parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


class BuiltIn:
    """The built-in reward functions with the keywords of a run."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        load_reward_function(kwargs=kwargs)  # raises for keywords that no function takes
        self._kwargs = kwargs

    def score(self, episode: Episode) -> Score:
        start = time.perf_counter()
        try:
            value = built_in_score(**request_of(episode), **self._kwargs)
        except ValueError as error:
            return Score(error=describe(error), seconds=time.perf_counter() - start)
        return Score.of(value, time.perf_counter() - start)
