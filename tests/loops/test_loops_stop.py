"""Every episode ends with one named stop reason; truncations, rejections and time-outs are recorded."""

import asyncio
import time
from typing import Any, ClassVar

import pytest
from loop_cases import (
    PROMPT,
    Held,
    Reply,
    calculator,
    check_sampled_once,
    check_tiling,
    hold,
    make_job,
    make_runner,
    make_task,
    said,
    sampling_of,
    written,
)

from rally.chat import ChatCodec
from rally.loops import AgentLoopBase, AgentLoopOutput, LoopSpec
from rally.tools import BaseTool, ToolLimits, function_tool
from rally.tools.builtin.answer_check import Gsm8kTool
from rally.types import StopReason, ToolResponse, ToolStatus


def calls(codec: ChatCodec, *expressions: str) -> Reply:
    return Reply(said(codec, "", *(("calculator", {"expression": e}) for e in expressions)))


def naming(codec: ChatCodec, name: str, **arguments: Any) -> Reply:
    return Reply(said(codec, "", (name, arguments)))


def whole(held: Held) -> Held:
    """The same episode, after a check of its tokens."""
    check_tiling(held.episode)
    check_sampled_once(held)
    return held


def slow(seconds: float) -> BaseTool[Any]:
    async def wait() -> str:
        await asyncio.sleep(seconds)
        return "at last"

    return function_tool(name="slow")(wait)


async def test_stop_when_nothing_more_is_asked(tiny: ChatCodec) -> None:
    held = whole(await hold(make_runner(tiny, [calls(tiny, "2+2")], [calculator])))
    assert held.episode.stop_reason is StopReason.STOP
    assert held.roles == ["assistant", "tool", "assistant"]
    assert [turn.text for turn in held.episode.turns][1:] == ["the value of 2+2", "done"]
    assert held.episode.num_turns == 4
    assert held.episode.timings["total"] >= held.episode.timings["tools"] > 0


async def test_length_when_the_budget_ends_a_turn(tiny: ChatCodec) -> None:
    held = whole(await hold(make_runner(tiny, [Reply(said(tiny, "much too long"))], response_length=4)))
    assert held.episode.stop_reason is StopReason.LENGTH
    assert held.segment.sampled == 4
    assert held.episode.turns[-1].finish == "length"


async def test_length_when_a_tool_answer_does_not_fit_the_budget(tiny: ChatCodec) -> None:
    reply = calls(tiny, "2+2")
    held = whole(await hold(make_runner(tiny, [reply], [calculator], response_length=len(reply.ids) + 5)))
    assert held.episode.stop_reason is StopReason.LENGTH
    assert held.roles == ["assistant", "tool"]
    assert held.segment.response_ids == reply.ids, "an answer that does not fit is recorded, without tokens"
    assert held.episode.tool_results[0].ok


async def test_context_when_the_window_ends_a_turn(tiny: ChatCodec) -> None:
    prompt = len(tiny.encode_prompt(PROMPT))
    held = whole(await hold(make_runner(tiny, [Reply(said(tiny, "much too long"))], max_model_len=prompt + 4)))
    assert held.episode.stop_reason is StopReason.CONTEXT
    assert held.segment.sampled == 4


@pytest.mark.parametrize("loop", ["tool_agent", "single_turn_agent"])
async def test_context_when_the_prompt_fills_the_window(tiny: ChatCodec, loop: str) -> None:
    held = await hold(make_runner(tiny, max_model_len=len(tiny.encode_prompt(PROMPT)), loop=loop))
    assert held.episode.stop_reason is StopReason.CONTEXT
    assert held.episode.turns == () and held.engine.calls == []


@pytest.mark.parametrize("history", ["append", "rerender"])
async def test_context_when_a_tool_answer_does_not_fit_the_window(tiny: ChatCodec, history: str) -> None:
    text = written("calculator", {"expression": "2+2"})
    reply = Reply((*tiny.tokenizer.encode(text, add_special_tokens=False), tiny.end_of_turn))
    window = len(tiny.encode_prompt(PROMPT)) + len(reply.ids) + 5
    held = whole(await hold(make_runner(tiny, [reply], [calculator], max_model_len=window, history=history)))
    assert held.episode.stop_reason is StopReason.CONTEXT
    assert held.segment.response_ids == reply.ids
    assert held.roles == ["assistant", "tool"]


async def test_rerendering_continues_in_a_new_segment(tiny: ChatCodec) -> None:
    text = written("calculator", {"expression": "2+2"})
    reply = Reply((*tiny.tokenizer.encode(text, add_special_tokens=False), tiny.end_of_turn))
    held = whole(await hold(make_runner(tiny, [reply], [calculator], history="rerender")))
    assert held.episode.stop_reason is StopReason.STOP
    assert [turn.segment for turn in held.episode.turns] == [0, 1, 1]


async def test_max_turns_counts_the_policys_turns(tiny: ChatCodec) -> None:
    held = whole(
        await hold(make_runner(tiny, [calls(tiny, str(i)) for i in range(5)], [calculator], max_assistant_turns=3))
    )
    assert held.episode.stop_reason is StopReason.MAX_TURNS
    assert held.roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert held.episode.turns[-1].tool_calls, "what it asked for last is recorded, not run"


async def test_an_answer_in_the_last_allowed_turn_is_a_stop(tiny: ChatCodec) -> None:
    held = await hold(make_runner(tiny, [calls(tiny, "1")], [calculator], max_assistant_turns=2, max_user_turns=1))
    assert held.episode.stop_reason is StopReason.STOP


async def test_max_user_turns_counts_what_the_policy_is_told(tiny: ChatCodec) -> None:
    held = whole(await hold(make_runner(tiny, [calls(tiny, str(i)) for i in range(5)], [calculator], max_user_turns=2)))
    assert held.episode.stop_reason is StopReason.MAX_USER_TURNS
    assert held.roles.count("tool") == 2


async def test_tool_success_ends_the_first_turn_whose_calls_all_succeed(tiny: ChatCodec) -> None:
    half = said(tiny, "", ("calculator", {"expression": "1"}), ("nowhere", {}))
    script = [naming(tiny, "nowhere"), Reply(half), calls(tiny, "1", "2"), calls(tiny, "3")]
    held = whole(await hold(make_runner(tiny, script, [calculator], stop_on_tool_success=True)))
    assert held.episode.stop_reason is StopReason.TOOL_SUCCESS
    assert len(held.engine.calls) == 3


async def test_stop_on_correct_ends_with_the_right_answer(tiny: ChatCodec) -> None:
    task = make_task(tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}})
    script = [naming(tiny, "calc_gsm8k_reward", answer=a) for a in ("41", "42", "43")]
    held = whole(await hold(make_runner(tiny, script, [Gsm8kTool()], stop_on_correct=True), task))
    assert held.episode.stop_reason is StopReason.TOOL_SUCCESS
    assert [turn.reward for turn in held.episode.turns if turn.role == "tool"] == [-0.05, 0.0]
    assert held.episode.extra["tool_rewards"] == {"calc_gsm8k_reward": 1.0}


async def test_repetition_of_the_same_calls(tiny: ChatCodec) -> None:
    script = [calls(tiny, "1"), calls(tiny, "2"), *[calls(tiny, "1")] * 5]
    held = whole(await hold(make_runner(tiny, script, [calculator], max_repeated_calls=3)))
    assert held.episode.stop_reason is StopReason.REPETITION
    assert len(held.engine.calls) == 5


async def test_tool_failures_in_a_row(tiny: ChatCodec) -> None:
    script = [naming(tiny, f"nowhere{'abcdefg'[i]}") for i in range(7)]
    script[1] = calls(tiny, "1")
    held = whole(await hold(make_runner(tiny, script, [calculator], max_tool_failures=2)))
    assert held.episode.stop_reason is StopReason.TOOL_FAILURES
    assert [r.ok for r in held.episode.tool_results] == [False, True, False, False]


async def test_deadline_of_a_turn(tiny: ChatCodec) -> None:
    runner = make_runner(tiny, [naming(tiny, "slow")], [slow(30)], timeout_per_turn=0.2)
    began = time.perf_counter()
    held = whole(await hold(runner))
    assert time.perf_counter() - began < 25, "the tool takes 30 s"
    assert held.episode.stop_reason is StopReason.DEADLINE
    assert held.roles == ["assistant"]


async def test_deadline_of_the_episode(tiny: ChatCodec) -> None:
    runner = make_runner(
        tiny, [naming(tiny, "slow")] * 50, [slow(0.45)], episode_timeout=1.2, timeout_per_turn=30, max_repeated_calls=0
    )
    held = whole(await hold(runner))
    assert held.episode.stop_reason is StopReason.DEADLINE
    assert 1 <= held.roles.count("assistant") <= 4


@pytest.mark.parametrize("limit", ["timeout_per_turn", "episode_timeout"])
@pytest.mark.parametrize("loop", ["tool_agent", "single_turn_agent"])
async def test_deadline_while_the_engine_is_slow(tiny: ChatCodec, loop: str, limit: str) -> None:
    runner = make_runner(tiny, [Reply(said(tiny, "late"), seconds=30)], loop=loop, **{limit: 0.1})
    held = await hold(runner)
    assert held.episode.stop_reason is StopReason.DEADLINE
    assert held.segment.response_ids == ()


@pytest.mark.parametrize("loop", ["tool_agent", "single_turn_agent"])
async def test_a_timeout_of_the_engine_is_its_failure_and_no_deadline(
    tiny: ChatCodec, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError("the server did not answer")

    runner = make_runner(tiny, loop=loop, timeout_per_turn=30)
    monkeypatch.setattr(runner.engine, "generate", lost)
    held = await hold(runner)
    assert (held.episode.stop_reason, held.episode.error) == (
        "error",
        "EngineError: the engine failed: TimeoutError: the server did not answer",
    )


@pytest.mark.parametrize("loop", ["tool_agent", "single_turn_agent"])
async def test_cancelled_when_the_engine_gives_up_a_request(tiny: ChatCodec, loop: str) -> None:
    begun = said(tiny, "I was about to")[:-1]
    held = whole(await hold(make_runner(tiny, [Reply(begun, finish="abort")], loop=loop)))
    assert held.episode.stop_reason is StopReason.CANCELLED
    assert held.segment.response_ids == begun, "what was sampled is kept"


@pytest.mark.parametrize(("finish", "reason"), [("stop", "stop"), ("length", "length"), ("abort", "cancelled")])
async def test_single_turn_ends_as_its_one_turn_does(tiny: ChatCodec, finish: Any, reason: str) -> None:
    reply = Reply(calls(tiny, "1").ids, finish=finish)
    held = whole(await hold(make_runner(tiny, [reply], [calculator], loop="single_turn_agent")))
    assert held.episode.stop_reason == reason
    assert len(held.engine.calls) == 1


class Fragile(AgentLoopBase):
    """Fails the given number of times over all of its instances."""

    left = 0

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        if Fragile.left > 0:
            Fragile.left -= 1
            raise KeyError("lost")
        return AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[])


@pytest.mark.parametrize(
    ("failures", "reason", "error", "attempts"),
    [(0, "stop", None, None), (2, "stop", None, 3), (9, "error", "KeyError: 'lost'", 3)],
)
async def test_a_loop_that_raises_is_tried_again_then_named(
    tiny: ChatCodec, failures: int, reason: str, error: str | None, attempts: int | None
) -> None:
    Fragile.left = failures
    runner = make_runner(tiny, loop="fragile", loops={"fragile": LoopSpec(Fragile)}, max_retries=2)
    episode = (await hold(runner)).episode
    assert (episode.stop_reason, episode.error, episode.extra.get("attempts")) == (reason, error, attempts)


class Endless(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        await asyncio.sleep(30)
        raise AssertionError("nobody stopped it")


async def test_a_loop_that_knows_no_deadline_is_ended_in_words(tiny: ChatCodec) -> None:
    runner = make_runner(tiny, loop="endless", loops={"endless": LoopSpec(Endless)}, episode_timeout=0.01)
    episode = (await hold(runner)).episode
    assert episode.stop_reason is StopReason.ERROR
    assert "Endless ran far past rollout.episode_timeout=0.01 " in (episode.error or "")


class Stubborn(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        while not self.over.is_set():
            try:
                await self.over.wait()
            except asyncio.CancelledError:
                continue
        raise RuntimeError("over")

    over: ClassVar[asyncio.Event]


async def test_a_loop_that_ignores_its_cancellation_is_reported(
    tiny: ChatCodec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rally.loops.runner.STUCK_SECONDS", 0.05)
    Stubborn.over = asyncio.Event()
    runner = make_runner(tiny, loop="stubborn", loops={"stubborn": LoopSpec(Stubborn)}, episode_timeout=0.01)
    held = asyncio.create_task(hold(runner))
    async with asyncio.timeout(60):
        while "Stubborn of episode e0 has not ended 0.05 s after it was cancelled" not in caplog.text:
            await asyncio.sleep(0.01)
    Stubborn.over.set()
    assert (await held).episode.stop_reason is StopReason.ERROR


async def test_one_failing_episode_leaves_the_others_alone(tiny: ChatCodec) -> None:
    Fragile.left = 1
    runner = make_runner(tiny, loops={"fragile": LoopSpec(Fragile)})
    jobs = [make_job(make_task(agent_name="fragile"), 0), make_job(number=1)]
    assert [e.stop_reason for e in await runner.run(jobs, sampling_of(tiny))] == ["error", "stop"]


async def test_calls_of_a_turn_run_together_and_are_answered_in_order(tiny: ChatCodec) -> None:
    finished: list[str] = []

    async def wait(seconds: str) -> str:
        await asyncio.sleep(float(seconds))
        finished.append(seconds)
        return f"slept {seconds}"

    times = ["0.9", "0.5", "0.7", "0.3", "0.6"]
    reply = Reply(said(tiny, "", *(("wait", {"seconds": s}) for s in times)))
    held = whole(await hold(make_runner(tiny, [reply], [function_tool(wait)])))
    assert held.episode.timings["tools"] < 2.4, "one after the other would take 3 s"
    assert finished == sorted(times)
    assert held.episode.turns[1].text.split("\n") == [f"slept {s}" for s in times]
    history = tiny.decode(held.engine.calls[1].prompt)
    assert [history.index(f"slept {s}") for s in times] == sorted(history.index(f"slept {s}") for s in times)


async def test_a_malformed_call_is_answered_with_the_reason_beside_the_good_ones(tiny: ChatCodec) -> None:
    text = '<tool_call>{"name": "calculator", "arguments": {"expr</tool_call>' + written(
        "calculator", {"expression": "1"}
    )
    reply = Reply((*tiny.tokenizer.encode(text, add_special_tokens=False), tiny.end_of_turn))
    held = whole(await hold(make_runner(tiny, [reply], [calculator])))
    assert [r.status for r in held.episode.tool_results] == [ToolStatus.MALFORMED, ToolStatus.OK]
    assert held.episode.stop_reason is StopReason.STOP
    told = tiny.decode(held.engine.calls[1].prompt)
    assert (
        "Error: Failed to decode tool call: " in told
        and "between tool_call tags. The arguments are: expression" in told
    )
    assert "the value of 1" in told


async def test_tool_text_over_the_character_limit_is_cut_and_flagged(tiny: ChatCodec) -> None:
    limits = ToolLimits(max_response_chars=8, truncate_side="right")
    held = whole(await hold(make_runner(tiny, [calls(tiny, "1")], [calculator], limits=limits)))
    (result,) = held.episode.tool_results
    assert (result.response.text, result.truncated) == ("the valu[6 characters cut]", True)
    assert "the valu[6 characters cut]" in tiny.decode(held.engine.calls[1].prompt)


@pytest.mark.parametrize(
    ("limit", "text", "truncated"),
    [(8, "the valu...(truncated)", True), (16, "the value of 1+1", False), (0, "the value of 1+1", False)],
)
async def test_tool_text_over_the_token_limit_is_cut_and_flagged(
    tiny: ChatCodec, limit: int, text: str, truncated: bool
) -> None:
    runner = make_runner(tiny, [calls(tiny, "1+1")], [calculator], max_tool_response_tokens=limit)
    held = whole(await hold(runner))
    (result,) = held.episode.tool_results
    assert (result.response.text, result.truncated) == (text, truncated)
    assert f"{text}</tool_response>" in tiny.decode(held.engine.calls[1].prompt)


class Account(BaseTool[Any]):
    """Records when it is created and released; the release takes a moment."""

    def __init__(self) -> None:
        super().__init__(tool_schema={"name": "account", "parameters": {"type": "object", "properties": {}}})
        self.log: list[str] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.log.append(f"open {instance_id}")
        return instance_id or "", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.log.append("execute")
        return "ok"

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append("let go")
        await asyncio.sleep(0.02)
        self.log.append(f"release {instance_id}")


@pytest.mark.parametrize("second", ["slow", "engine"])
async def test_tools_are_released_when_the_run_is_cancelled(tiny: ChatCodec, second: str) -> None:
    account = Account()
    later = naming(tiny, "slow") if second == "slow" else Reply(said(tiny, "late"), seconds=30)
    runner = make_runner(tiny, [naming(tiny, "account"), later], [account, slow(30)])
    running = asyncio.create_task(runner.run([make_job()], sampling_of(tiny)))
    while "execute" not in account.log:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert account.log == ["open e0/account", "execute", "let go", "release e0/account"]


async def test_a_release_that_has_begun_is_finished_when_the_run_is_cancelled(tiny: ChatCodec) -> None:
    account = Account()
    running = asyncio.create_task(
        make_runner(tiny, [naming(tiny, "account")], [account]).run([make_job()], sampling_of(tiny))
    )
    while "let go" not in account.log:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert account.log[-1] == "release e0/account"


async def test_tools_are_released_once_at_the_end_and_at_a_deadline(tiny: ChatCodec) -> None:
    for script, reason in (
        ([naming(tiny, "account")] * 2, StopReason.STOP),
        ([naming(tiny, "account"), naming(tiny, "slow")], StopReason.DEADLINE),
    ):
        account = Account()
        held = whole(await hold(make_runner(tiny, script, [account, slow(30)], timeout_per_turn=0.6)))
        assert held.episode.stop_reason is reason
        assert [line for line in account.log if " e0" in line] == ["open e0/account", "release e0/account"]


async def test_a_long_prompt_is_cut_or_refused_as_asked(tiny: ChatCodec) -> None:
    ids = tiny.encode_prompt(PROMPT)
    cut = {"left": ids[-6:], "right": ids[:6], "middle": ids[:3] + ids[-3:]}
    for side, expected in cut.items():
        held = await hold(make_runner(tiny, prompt_length=6, truncation=side))
        assert held.engine.calls[0].prompt == held.segment.prompt_ids == expected
    episode = (await hold(make_runner(tiny, prompt_length=6))).episode
    assert f"a prompt of {len(ids)} tokens exceeds data.max_prompt_length=6" in (episode.error or "")
