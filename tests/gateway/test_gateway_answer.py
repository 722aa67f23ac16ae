"""What an agent returns is what is scored; without an answer it is the last reply of its main conversation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from gateway_cases import black_box, row_of
from langchain_core.messages import AIMessage, HumanMessage
from loop_cases import Reply, hold, said, tiny_codec
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from rally.gateway.black_box_loop import returned_by
from rally.loops import LoopError
from rally.rewards import solution_text
from rally.rewards.score_inputs import BuiltIn, request_of
from rally.types import Episode

CODEC = tiny_codec()
ROUTED, SOLVED, CRITICISED = "the mathematician", "It is 6*12.\n#### 72", "#### 71 would be nicer"


def played(returns: str) -> Episode:
    script = [Reply(said(CODEC, text)) for text in (ROUTED, SOLVED, CRITICISED)]
    task = row_of(CODEC)
    task = replace(task, data_source="openai/gsm8k", ground_truth="72", row={**task.row, "returns": returns})
    return asyncio.run(hold(black_box("is_checked_by_another", CODEC, script), task)).episode


@pytest.mark.drill(
    "reliability",
    "An agent's last model call is not the one that answers",
    "The answer that the agent returned is scored",
)
@pytest.mark.parametrize("returns", ["text", "message", "nothing"])
def test_the_answer_is_scored_and_not_the_call_that_ended_last(returns: str) -> None:
    episode = played(returns)
    assert episode.turns[-1].text == CRITICISED
    assert solution_text(episode) == request_of(episode)["extra_info"]["last_turn"] == SOLVED
    assert ("agent_answer" in episode.extra) is (returns != "nothing")
    assert BuiltIn({}).score(episode).reward == 1.0
    assert [m["text"] for m in request_of(episode)["extra_info"]["messages"][1:]] == [ROUTED, SOLVED, CRITICISED]


class Verdict(BaseModel):
    final_answer: str
    confidence: float = 0.5


class Place(BaseModel):
    city: str


@dataclass
class RunResult:
    """As the OpenAI Agents SDK returns it."""

    final_output: Any
    turns: int = 3


class Result:
    """As Pydantic AI and others return it: an object with methods."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def text(self) -> str:
        return "no answer"


COMPLETION = ChatCompletion.model_validate(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "72"}}],
    }
)


@pytest.mark.parametrize(
    ("value", "answer", "rest"),
    [
        (None, None, None),
        ("", "", None),
        ("72", "72", None),
        ({"answer": 72}, "72", None),
        ({"final_output": "72", "cost": 3}, "72", {"cost": 3}),
        ({"output": None, "content": "72"}, "72", {"output": None}),
        ({"messages": [HumanMessage("?"), AIMessage("72")]}, "72", None),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "72"}]}, "72", None),
        ({"cost": 3}, None, {"cost": 3}),
        (COMPLETION, "72", None),
        (COMPLETION.choices[0].message, "72", None),
        (AIMessage("72"), "72", None),
        (AIMessage([{"type": "text", "text": "7"}, {"type": "text", "text": "2"}]), "72", None),
        ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "72"}], "72", None),
        (RunResult("72"), "72", {"turns": 3}),
        (RunResult(Verdict(final_answer="72")), "72", {"turns": 3}),
        (RunResult(Place(city="Paris")), '{"city":"Paris"}', {"turns": 3}),
        (Result("72"), "72", None),
        (Result(Result({"answer": "72"})), "72", None),
        (Verdict(final_answer="72"), "72", {"confidence": 0.5}),
        (Place(city="Paris"), None, {"city": "Paris"}),
    ],
)
def test_what_agents_return_is_read(value: Any, answer: str | None, rest: dict[str, Any] | None) -> None:
    read = returned_by("mine", value)
    got = {k: v for k, v in (read.rest or {}).items() if k in (rest or {})}
    assert (read.reward, read.answer, got or None) == (None, answer, rest)


def test_a_reward_beside_an_answer_and_what_is_neither() -> None:
    read = returned_by("mine", {"reward": 0.5, "answer": "72", "note": "x"})
    assert (read.reward, read.answer, read.rest) == (0.5, "72", {"note": "x"})
    for value in (["done"], object(), [], {1, 2}):
        with pytest.raises(LoopError, match="which is neither a reward nor an answer; return a number, a text"):
            returned_by("mine", value)
    with pytest.raises(LoopError, match="returned the reward 'much'; return a finite number"):
        returned_by("mine", {"reward": "much"})
    with pytest.raises(LoopError, match="returned the reward nan"):
        returned_by("mine", float("nan"))
    for huge in (10**400, 10**5000):  # no float, and the second has too many digits to be printed
        with pytest.raises(LoopError, match=r"returned the reward .*; return a finite number"):
            returned_by("mine", {"reward": huge})
