"""Every episode of an agent ends with one named stop reason, and with a message if it is an error."""

import asyncio
import time
from dataclasses import dataclass

import httpx
import numpy as np
import openai
import pytest
from agents_of_users import KEPT
from gateway_cases import black_box, held_by, row_of
from loop_cases import Reply, ScriptedEngine, Talker, asking, check_sampled_once, check_tiling, hold, said, tiny_codec

from rally.gateway import BlackBoxAgentLoop, session
from rally.gateway.agent_runner import AgentThread, RunningAgent
from rally.gateway.black_box_loop import returned_by
from rally.gateway.server import gateway_at
from rally.interactions import Interactions
from rally.loops import LoopError
from rally.tools.invoke import CallEnd
from rally.types import Generation, RallyError, StopReason

CODEC = tiny_codec()


def test_an_agent_that_never_asks_is_an_error_that_says_so() -> None:
    episode = held_by("never_asks", CODEC).episode
    assert episode.stop_reason is StopReason.ERROR and episode.error is not None
    assert (
        "agents_of_users:never_asks returned without a completion; it must send requests to client.base_url"
        in episode.error
    )


def test_an_agent_that_dies_is_an_error_with_its_own_words() -> None:
    episode = held_by("dies", CODEC).episode
    assert episode.stop_reason is StopReason.ERROR
    assert episode.error == "LoopError: the agent agents_of_users:dies failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("agent", "turns", "abandoned"),
    [("hangs", 1, 0), ("hangs_at_once", 0, 0), ("hangs_in_a_thread", 1, 1), ("blocks_the_loop", 0, 1)],
)
def test_an_agent_that_hangs_ends_at_the_deadline_with_what_there_is(agent: str, turns: int, abandoned: int) -> None:
    held = held_by(agent, CODEC, episode_timeout=1.0)
    assert held.episode.stop_reason is StopReason.DEADLINE and held.episode.error is None
    assert len(held.episode.turns) == turns and held.episode.extra["agent"]["abandoned"] == abandoned
    assert held.episode.timings["total"] < 15
    check_tiling(held.episode)
    again = held_by("asks_ten_times", CODEC)
    assert again.episode.stop_reason is StopReason.STOP, "who comes later must not wait for the one that hangs"


def test_each_answer_gives_the_time_of_another_turn() -> None:
    slow = [Reply(said(CODEC, "done"), seconds=0.15)] * 10
    held = held_by("asks_ten_times", CODEC, slow, timeout_per_turn=1.0)
    assert held.episode.stop_reason is StopReason.STOP and held.episode.timings["total"] > 1.4
    late = held_by("asks_ten_times", CODEC, [*slow[:2], Reply(said(CODEC, "late"), seconds=60.0)], timeout_per_turn=1.0)
    assert late.episode.stop_reason is StopReason.DEADLINE and len(late.episode.turns) == 3


@pytest.mark.parametrize(
    ("reason", "settings", "answers"),
    [
        (StopReason.MAX_TURNS, {"max_assistant_turns": 4}, 4),
        (StopReason.MAX_USER_TURNS, {"max_user_turns": 2}, 3),
        (StopReason.LENGTH, {"response_length": 60}, 4),
    ],
)
def test_limits_end_an_episode_and_the_agent_is_told(
    reason: StopReason, settings: dict[str, int], answers: int
) -> None:
    held = held_by("asks_ten_times", CODEC, **settings)
    assert held.episode.stop_reason is reason and held.episode.error is None
    assert sum(turn.role == "assistant" for turn in held.episode.turns) == answers
    assert sum(len(s.response_ids) for s in held.episode.segments) <= settings.get("response_length", 10_000)
    check_tiling(held.episode)
    check_sampled_once(held)
    content = held_by("asks_ten_times_or_gives_up", CODEC, **settings).episode
    assert content.stop_reason is reason and content.reward == 0.25 and content.extra["returned"] == {"gave_up": True}
    assert "this episode is over: " in content.extra["agent_answer"] and "410" in content.extra["agent_answer"]


@pytest.mark.parametrize("last_words", [30.0, 0.05])
def test_limits_on_turns_hold_for_requests_that_come_at_once(
    last_words: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FINAL_SECONDS", last_words)
    slow = [Reply(said(CODEC, "done"), seconds=0.3)] * 8
    held = held_by("asks_at_once", CODEC, slow, max_assistant_turns=3)
    assert held.episode.stop_reason is StopReason.MAX_TURNS and len(held.engine.calls) == 3
    assert len(held.episode.turns) == 3, "what is being answered when the limit is met is answered to the end"
    check_sampled_once(held)


def test_a_turn_cut_by_the_budget_ends_an_episode_by_length_and_by_the_agents_own_limit_does_not() -> None:
    long = [Reply(said(CODEC, "word " * 50))]
    assert held_by("wants_to_be_cold", CODEC, long, response_length=20).episode.stop_reason is StopReason.LENGTH
    held = held_by("wants_to_be_cold", CODEC, long)
    assert held.episode.stop_reason is StopReason.STOP
    (call,) = held.engine.calls
    assert call.params.temperature == 1.0 and held.episode.extra["agent"]["overruled"] == 1


def test_messages_that_do_not_fit_are_refused_and_shorter_ones_are_not() -> None:
    held = held_by("shortens_itself", CODEC, max_model_len=200)
    assert held.episode.stop_reason is StopReason.STOP and len(held.engine.calls) == 1
    reason = "this model's maximum context length is 200 tokens including the answer; shorten them"
    assert reason in held.episode.extra["agent_answer"]
    assert held.episode.extra["agent"]["refused"] == 1
    full = held_by("asks_ten_times", CODEC, max_model_len=60).episode
    assert full.stop_reason is StopReason.CONTEXT and full.error is None


def test_an_answer_that_nobody_waited_for_is_counted_and_no_turn() -> None:
    held = held_by("is_impatient", CODEC, [Reply(said(CODEC, "late"), seconds=3600.0)])
    assert held.episode.stop_reason is StopReason.STOP and held.episode.extra["agent_answer"] == "done"
    assert len(held.episode.turns) == 1 and held.episode.extra["agent"]["gone"] == 1


def test_a_tool_whose_calls_could_not_be_read_is_refused_before_anything_is_sampled() -> None:
    held = held_by("offers_no_function", CODEC)
    assert "tools.0 is not a function with a name" in held.episode.extra["agent_answer"]
    assert held.episode.extra["agent_answer"].endswith("/ done") and len(held.engine.calls) == 1


def test_an_agent_that_is_cancelled_before_it_begins_has_ended() -> None:
    begun: list[bool] = []

    async def work() -> None:
        begun.append(True)

    async def cancelled() -> CallEnd:
        thread = AgentThread()
        thread.loop.call_soon_threadsafe(time.sleep, 0.1)  # another agent is running
        running = RunningAgent(thread, work)
        running.cancel()
        return await asyncio.wait_for(running.ended, 10)

    assert isinstance(asyncio.run(cancelled()).error, asyncio.CancelledError) and not begun


def test_what_cannot_be_honoured_is_refused_in_a_sentence() -> None:
    error = held_by("wants_three", CODEC).episode.error
    assert error is not None and "n must be 1, not 3; send one request for each completion" in error


def test_an_engine_that_gives_up_or_fails_is_never_an_agents_success(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = held_by("asks_ten_times_or_gives_up", CODEC, [Reply(said(CODEC, "half"), finish="abort")]).episode
    assert aborted.stop_reason is StopReason.CANCELLED and len(aborted.turns) == 1

    @dataclass
    class Broken(ScriptedEngine):
        async def generate(self, *args: object, **kwargs: object) -> Generation:
            raise RallyError("no server is left")

    monkeypatch.setattr(session, "FINAL_SECONDS", 0.2)
    for agent in ("asks_ten_times_or_gives_up", "asks_for_ever"):
        runner = black_box(agent, CODEC)
        runner.engine = Broken(CODEC, [])
        episode = asyncio.run(asyncio.wait_for(hold(runner, row_of(CODEC)), 20)).episode
        assert episode.stop_reason is StopReason.ERROR and episode.error == "RallyError: no server is left"


def test_a_finished_episodes_key_and_a_strangers_are_told_apart() -> None:
    KEPT.clear()
    held_by("keeps_its_client", CODEC)
    (client,) = KEPT
    question = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    late = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
    with pytest.raises(openai.APIStatusError, match="this episode has ended, so its API key is invalid") as gone:
        late.chat.completions.create(**question)  # type: ignore[call-overload]
    assert gone.value.status_code == 410
    for key in ("nobody", client.api_key[:-1] + "x", "rally-"):
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{client.base_url}/chat/completions", json=question, headers=headers)
        assert answer.status_code == 401 and "belongs to no episode" in answer.json()["error"]["message"]


def test_what_a_run_names_wrongly_is_said_before_it_begins() -> None:
    cases = {
        None: "must name a function, such as my_agent.py:run, but is not set",
        "agents_of_users": "must name a function, such as my_agent.py:run, not 'agents_of_users'",
        "agents_of_users:nobody": "agents_of_users has no function nobody",
        "nowhere.py:run": "the agent nowhere.py:run cannot be imported",
        "agents_of_users:value_of": "must take a row and a client, as in run",
    }
    for agent, told in cases.items():
        with pytest.raises(LoopError, match=told):
            BlackBoxAgentLoop.prepare({"agent": agent})
    with pytest.raises(LoopError, match="unexpected keyword argument 'agnet'"):
        BlackBoxAgentLoop.prepare({"agnet": "agents_of_users:dies"})
    for host in ("0.0.0.0", "::"):
        with pytest.raises(LoopError, match="to an address of this machine"):
            gateway_at(host, 0)
    assert gateway_at("127.0.0.2", 0).base_url.startswith("http://127.0.0.2:")


def test_an_agent_that_does_not_hear_that_it_is_over_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FINAL_SECONDS", 0.2)
    episode = held_by("asks_for_ever", CODEC, max_assistant_turns=3).episode
    assert episode.stop_reason is StopReason.MAX_TURNS and len(episode.turns) == 3 and episode.error is None
    assert episode.extra["agent"]["refused"] > 1 and episode.timings["total"] < 5


def test_a_simulated_user_that_nobody_would_hear_is_refused() -> None:
    runner = black_box("dies", CODEC, interactions=Interactions([Talker("well")]))
    error = asyncio.run(hold(runner, asking())).episode.error
    assert error is not None and "row t names a simulated user, which a black_box agent cannot have" in error


def test_limits_that_only_the_tool_loop_can_keep_are_refused() -> None:
    error = held_by("dies", CODEC, stop_on_tool_success=True).episode.error
    assert (
        error is not None
        and "rollout.stop_on_tool_success cannot be applied to an agent that runs its own tools" in error
    )


def test_a_return_value_that_means_nothing_is_an_error() -> None:
    error = held_by("returns_a_list", CODEC).episode.error
    assert (
        error is not None
        and "returned ['done'], which is neither a reward nor an answer; return a number, a text, None" in error
    )
    assert (
        returned_by("mine", np.float32(0.5)).reward == 0.5
        and returned_by("mine", {"reward": np.int64(1)}).reward == 1.0
    )
