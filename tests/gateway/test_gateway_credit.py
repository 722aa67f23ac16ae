"""Credit by the agent: rewards of calls and branches, calls that are not trained on, and mistakes that are refused."""

import asyncio
from typing import Any

import openai
import pytest
from gateway_cases import row_of
from loop_cases import Held, Reply, hold, make_runner, said, tiny_codec

from rally.algos.credit_assignment import CreditSettings
from rally.chat import ChatCodec
from rally.gateway import AgentClient, BlackBoxAgentLoop
from rally.loops import LoopSpec
from rally.rewards.shaping import outcome
from rally.train.batch import build_batch, turns_of_episodes
from rally.types import RallyError, StopReason


@pytest.fixture(scope="module")
def tiny() -> ChatCodec:
    return tiny_codec()


TEXTS = ["first", "a summary", "second", "third"]


async def ask(llm: Any, *messages: str) -> Any:
    roles = ("user", "assistant")
    sent = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return await llm.chat.completions.create(model="policy", messages=sent)


async def credited(row: Any, client: AgentClient) -> float:
    llm = client.openai()
    first = await ask(llm, "question")
    summary = await ask(llm, "summarise this")
    second = await ask(llm, "question", "first", "go on")
    client.credit(first, 0.25)
    client.credit(second.id, 0.5)
    client.credit(second, 1.0, branch=True)
    client.exclude(summary)
    return 2.0


async def without_reward(row: Any, client: AgentClient) -> None:
    client.credit(await ask(client.openai(), "question"), 1.0)


async def over_http(row: Any, client: AgentClient) -> float:
    llm = client.openai(max_retries=0)
    done = await ask(llm, "question")
    for body, words in (
        ({"call": "other"}, "no call 'other'"),
        ({"call": done.id, "reward": "x"}, "finite number"),
        ({"call": done.id, "reward": 10**400}, "finite number"),
        ({"call": done.id, "rewards": 1}, "unknown field rewards"),
    ):
        with pytest.raises(openai.APIStatusError, match=words):
            await llm.post("/episode/credit", body=body, cast_to=object)
    await llm.post("/episode/credit", body={"call": done.id, "reward": 0.25}, cast_to=object)
    response = await llm.responses.create(model="policy", input="question")
    await llm.post("/episode/credit", body={"call": response.id, "reward": 0.25}, cast_to=object)
    return 0.0


async def crashes(row: Any, client: AgentClient) -> None:
    await ask(client.openai(), "question")
    raise RuntimeError("lost")


def played(tiny: ChatCodec, agent: str) -> Held:
    options = {"agent": f"{__name__}:{agent}"}
    script = [Reply(said(tiny, text)) for text in TEXTS]
    runner = make_runner(tiny, script, loops={"black_box": LoopSpec(BlackBoxAgentLoop, options)}, loop="black_box")
    return asyncio.run(hold(runner, row_of(tiny)))


def test_rewards_of_calls_are_rewards_of_turns_and_excluded_calls_have_no_mask(tiny: ChatCodec) -> None:
    episode = played(tiny, "credited").episode
    assert episode.error is None and episode.reward == 2.0 + 1.75 and outcome(episode) == 2.0
    main, summary = sorted(episode.segments, key=lambda segment: -segment.sampled)
    assert summary.sampled == 0 and summary.response_logprobs == (0.0,) * len(summary.response_ids)
    assert main.sampled == len(said(tiny, "first")) + len(said(tiny, "second"))
    assert {turn.text: turn.reward for turn in episode.turns if turn.role == "assistant"} == {
        "first": 0.25,
        "a summary": None,
        "second": 1.5,
    }
    assert episode.extra["agent"]["excluded_calls"] == 1
    turns = turns_of_episodes([episode])
    assert turns.rewards_K.tolist() == [0.25, 1.5], "an excluded call is no turn of the policy"
    batch = build_batch([episode], CreditSettings(turn_rewards="returns"))
    assert batch.tokens_N.tolist() == [main.sampled] and len(batch.rows) == 1


def test_rewards_of_calls_need_a_reward_of_the_episode(tiny: ChatCodec) -> None:
    episode = played(tiny, "without_reward").episode
    assert "gave rewards to calls but returned no reward; return a number" in str(episode.error)


def test_credit_over_http_and_what_it_refuses(tiny: ChatCodec) -> None:
    episode = played(tiny, "over_http").episode
    assert (
        episode.error is None
        and episode.reward == 0.5
        and [turn.reward for turn in episode.turns if turn.reward] == [0.25, 0.25]
    )


def test_the_transcript_of_a_crashed_agent_is_kept(tiny: ChatCodec) -> None:
    episode = played(tiny, "crashes").episode
    assert episode.stop_reason is StopReason.ERROR and "RuntimeError: lost" in str(episode.error)
    assert [turn.text for turn in episode.turns] == ["first"] and episode.segments[0].sampled


def test_a_call_of_another_episode_is_refused_by_the_client() -> None:
    from rally.gateway.credit import CallCredits

    client = AgentClient(base_url="http://x", api_key="k", episode_id="e", _credits=CallCredits())
    with pytest.raises(RallyError, match="no call 'chatcmpl-1' in this episode"):
        client.credit("chatcmpl-1", 1.0)
