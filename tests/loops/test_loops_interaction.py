"""A row's simulated user answers every turn without a tool call, and is always finalized."""

import asyncio
from typing import Any

import pytest
from loop_cases import (
    Held,
    Reply,
    Talker,
    asking,
    calculator,
    check_sampled_once,
    check_tiling,
    hold,
    make_job,
    make_runner,
    make_task,
    said,
    sampling_of,
)

from rally.chat import ChatCodec
from rally.interactions import BaseInteraction, Interactions
from rally.types import StopReason

BOTH = ["start e0/talker", "score", "finalize e0/talker"]


def words(codec: ChatCodec, *texts: str) -> list[Reply]:
    return [Reply(said(codec, text)) for text in texts]


async def talk(
    codec: ChatCodec, user: BaseInteraction, script: list[Reply], *, timeout: float = 5.0, **settings: Any
) -> Held:
    runner = make_runner(codec, script, [calculator], interactions=Interactions([user], timeout), **settings)
    held = await hold(runner, asking(user.name))
    check_tiling(held.episode)
    return held


def text_of(held: Held) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in held.episode.turns]


async def test_user_and_policy_take_turns_until_the_user_has_had_enough(tiny: ChatCodec) -> None:
    user = Talker("And?", "Really?")
    held = await talk(tiny, user, words(tiny, "one", "two", "three"))
    check_sampled_once(held)
    assert held.episode.stop_reason is StopReason.STOP
    assert text_of(held) == [
        *(("assistant", "one"), ("user", "And?"), ("assistant", "two"), ("user", "Really?")),
        *(("assistant", "three"), ("user", "enough")),
    ]
    assert [turn.reward for turn in held.episode.turns] == [None, 0.0, None, 0.5, None, 1.0]
    assert held.episode.num_turns == 7
    last = held.episode.turns[-1]
    assert last.start == last.end == len(held.segment.response_ids), "nothing is sampled after the last word"
    assert held.segment.response_mask[-1] == 1
    assert user.events == BOTH
    assert held.episode.extra["interaction"] == {
        "name": "talker",
        "score": 0.75,
        "failures": [],
        "info": [{"at": 0}, {"at": 1}, {"at": 2}],
    }
    assert "tokenization_difference" not in held.episode.extra
    assert held.episode.timings["interaction"] >= 0


async def test_the_user_sees_the_messages_and_cannot_change_them(tiny: ChatCodec) -> None:
    class Vandal(Talker):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            answer = await super().generate_response(instance_id, [dict(m) for m in messages], **kwargs)
            messages[0]["content"] = "something else"
            messages.clear()
            return answer

    user = Vandal("And?", name="vandal")
    await talk(tiny, user, words(tiny, "one", "two"))
    assert user.seen[1] == [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "two"},
    ]


async def test_tools_answer_calls_and_the_user_everything_else(tiny: ChatCodec) -> None:
    script = [Reply(said(tiny, "", ("calculator", {"expression": "2+2"}))), *words(tiny, "4", "still 4")]
    held = await talk(tiny, Talker("Sure?"), script)
    assert held.roles == ["assistant", "tool", "assistant", "user", "assistant", "user"]


async def test_a_row_without_a_user_ends_as_before(tiny: ChatCodec) -> None:
    user = Talker("And?")
    held = await hold(make_runner(tiny, words(tiny, "one"), interactions=Interactions([user])), make_task())
    assert held.roles == ["assistant"] and user.events == []
    assert "interaction" not in held.episode.extra


@pytest.mark.parametrize(
    ("limits", "reason", "roles"),
    [
        ({"max_user_turns": 1}, StopReason.MAX_USER_TURNS, "aua"),
        ({"max_assistant_turns": 2}, StopReason.MAX_TURNS, "auau"),  # the last answer is still scored
        ({"max_assistant_turns": 2, "max_user_turns": 1}, StopReason.MAX_TURNS, "aua"),
        ({"max_assistant_turns": 1, "max_user_turns": 1}, StopReason.MAX_TURNS, "au"),
    ],
)
async def test_turn_limits(tiny: ChatCodec, limits: dict[str, int], reason: StopReason, roles: str) -> None:
    held = await talk(tiny, Talker(*"abcdef"), words(tiny, *"12345"), **limits)
    check_sampled_once(held)
    assert held.episode.stop_reason is reason
    assert "".join(role[0] for role in held.roles) == roles
    assert len(held.engine.calls) == roles.count("a")


async def test_a_user_who_is_content_with_the_last_allowed_answer_ends_the_exchange(tiny: ChatCodec) -> None:
    held = await talk(tiny, Talker(), words(tiny, "one"), max_assistant_turns=1)
    assert held.episode.stop_reason is StopReason.STOP
    assert text_of(held)[-1] == ("user", "enough")


async def test_words_that_do_not_fit_the_budget_are_recorded_without_tokens(tiny: ChatCodec) -> None:
    user = Talker("x" * 500)
    held = await talk(tiny, user, words(tiny, "one"), response_length=60)
    assert held.episode.stop_reason is StopReason.LENGTH
    assert text_of(held)[-1] == ("user", "x" * 500) and held.episode.turns[-1].reward == 0.0
    assert user.events == BOTH


class Failing(Talker):
    """Fails in the given method and way; the other methods record that they ran."""

    def __init__(self, method: str, how: str) -> None:
        super().__init__("And?")
        self.method, self.how = method, how

    async def _act(self, method: str) -> None:
        if method == self.method:
            self.events.append(f"{method} fails")
            if self.how == "raise":
                raise KeyError("lost")
            if self.how == "exit":
                raise SystemExit(3)
            if self.how == "interrupt":
                raise KeyboardInterrupt
            if self.how == "close":
                raise GeneratorExit
            await asyncio.sleep(60)

    async def start_interaction(self, *given: Any, **kwargs: Any) -> str:
        await self._act("start_interaction")
        return await super().start_interaction(*given, **kwargs)

    async def generate_response(self, *given: Any, **kwargs: Any) -> Any:
        await self._act("generate_response")
        return await super().generate_response(*given, **kwargs)

    async def calculate_score(self, *given: Any, **kwargs: Any) -> float | None:
        await self._act("calculate_score")
        return await super().calculate_score(*given, **kwargs)

    async def finalize_interaction(self, *given: Any, **kwargs: Any) -> None:
        await self._act("finalize_interaction")
        await super().finalize_interaction(*given, **kwargs)


FAILURES = [
    ("raise", "{} of interaction 'talker' failed: KeyError: 'lost'"),
    ("exit", "{} of interaction 'talker' failed: SystemExit: 3"),
    ("interrupt", "{} of interaction 'talker' failed: KeyboardInterrupt"),
    ("close", "{} of interaction 'talker' failed: GeneratorExit"),
    ("hang", "{} of interaction 'talker' did not end within 0.05 seconds"),
]


@pytest.mark.parametrize(("how", "told"), FAILURES)
@pytest.mark.parametrize("method", ["start_interaction", "generate_response"])
async def test_a_user_that_fails_in_the_exchange_voids_the_episode_by_name_and_is_finalized(
    tiny: ChatCodec, method: str, how: str, told: str
) -> None:
    user = Failing(method, how)
    held = await talk(tiny, user, words(tiny, "one"), timeout=0.05)
    assert held.episode.stop_reason is StopReason.ERROR
    assert held.episode.error is not None and told.format(method) in held.episode.error
    assert user.events[-1] == "finalize e0/talker" and user.events.count("finalize e0/talker") == 1


async def test_what_was_sampled_before_the_user_failed_is_kept(tiny: ChatCodec) -> None:
    called = Reply(said(tiny, "", ("calculator", {"expression": "1"})))
    held = await talk(tiny, Failing("generate_response", "raise"), [called, *words(tiny, "one")])
    assert held.episode.stop_reason is StopReason.ERROR and held.episode.extra["fault"] == "infrastructure"
    assert held.roles == ["assistant", "tool", "assistant"] and "the value of 1" in held.episode.turns[1].text
    assert held.segment.ids == held.engine.calls[1].prompt + held.engine.calls[1].generation.ids
    check_sampled_once(held)


@pytest.mark.parametrize(("how", "told"), FAILURES)
@pytest.mark.parametrize("method", ["calculate_score", "finalize_interaction"])
async def test_a_user_that_fails_at_the_end_is_told_and_the_episode_stands(
    tiny: ChatCodec, method: str, how: str, told: str
) -> None:
    user = Failing(method, how)
    held = await talk(tiny, user, words(tiny, "one"), timeout=0.05)
    assert held.episode.stop_reason is StopReason.STOP
    [failure] = held.episode.extra["interaction"]["failures"]
    assert told.format(method) in failure
    assert held.episode.extra["interaction"]["score"] == (None if method == "calculate_score" else 0.75)
    assert (user.events[-1] == "finalize e0/talker") is (method == "calculate_score")


async def test_a_user_that_failed_is_asked_anew_in_the_next_attempt(tiny: ChatCodec) -> None:
    class Shy(Talker):
        async def start_interaction(self, *given: Any, **kwargs: Any) -> str:
            if not self.events:
                self.events.append("shy")
                raise OSError("not yet")
            return await super().start_interaction(*given, **kwargs)

    user = Shy(name="talker")
    held = await talk(tiny, user, words(tiny, "one"), max_retries=1)
    assert held.episode.stop_reason is StopReason.STOP and held.episode.extra["attempts"] == 2
    assert user.events == ["shy", "finalize e0/talker", *BOTH]


async def test_a_user_that_outlasts_the_turn_meets_the_deadline_and_is_finalized(tiny: ChatCodec) -> None:
    user = Failing("generate_response", "hang")
    held = await talk(tiny, user, words(tiny, "one"), timeout_per_turn=0.05)
    assert held.episode.stop_reason is StopReason.DEADLINE
    assert held.roles == ["assistant"]
    assert user.events[-2:] == ["score", "finalize e0/talker"]


@pytest.mark.parametrize("method", ["start_interaction", "generate_response", "calculate_score"])
async def test_a_cancelled_episode_is_finalized(tiny: ChatCodec, method: str) -> None:
    user = Failing(method, "hang")
    runner = make_runner(tiny, words(tiny, "one"), interactions=Interactions([user], 0.3))
    running = asyncio.create_task(runner.run([make_job(asking())], sampling_of(tiny)))
    while f"{method} fails" not in user.events:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert user.events[-1] == "finalize e0/talker"


async def test_a_cancellation_does_not_interrupt_finalize(tiny: ChatCodec) -> None:
    class Slow(Talker):
        async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
            self.events.append("finalizing")
            await asyncio.sleep(0.05)
            await super().finalize_interaction(instance_id)

    user = Slow()
    runner = make_runner(tiny, words(tiny, "one"), interactions=Interactions([user]))
    running = asyncio.create_task(runner.run([make_job(asking())], sampling_of(tiny)))
    while "finalizing" not in user.events:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert user.events[-1] == "finalize e0/talker"


async def test_an_engine_that_fails_does_not_leave_a_user_waiting(tiny: ChatCodec) -> None:
    user = Talker()
    runner = make_runner(tiny, interactions=Interactions([user]))

    async def broken(*given: Any, **kwargs: Any) -> Any:
        raise OSError("the engine is gone")

    runner.engine.generate = broken  # type: ignore[method-assign]
    held = await hold(runner, asking())
    assert held.episode.error == "EngineError: the engine failed: OSError: the engine is gone"
    assert user.events == BOTH


async def test_the_rows_keywords_arrive_and_what_is_not_taken_is_refused(tiny: ChatCodec) -> None:
    class Strict(BaseInteraction):
        def start_interaction(self, instance_id: str, truth: str) -> None:  # type: ignore[override]
            self.truth = truth

        def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return True, f"{self.truth} {kwargs}", None, None

        def finalize_interaction(self) -> None:  # type: ignore[override]
            self.truth = "gone"

    user = Strict({"name": "strict"})
    runner = make_runner(tiny, interactions=Interactions([user]))
    held = await hold(runner, asking("strict", truth="4", absent=None))
    assert text_of(held)[-1] == ("user", "4 {'name': 'strict', 'truth': '4'}")
    assert held.episode.turns[-1].reward is None
    assert user.truth == "gone"
    refused = await hold(runner, asking("strict", truth="4", color="red"))
    assert "start_interaction of interaction 'strict' takes no 'color'" in (refused.episode.error or "")


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("fine", "returned 'fine'; it must return (over, text, score, info), four values"),
        ((True, "fine"), "four values"),
        (("no", "fine", 0.0, {}), "returned 'no' for whether the exchange is over; it must be True or False"),
        ((True, None, 0.0, {}), "returned a text of type NoneType; it must be a string"),
        ((True, "fine", float("nan"), {}), "returned the score nan; it must be a finite number or None"),
        ((True, "fine", 10**5000, {}), "returned the score a value of type int; it must be a finite number or None"),
        ((True, "fine", 0.0, 5), "returned info of type int; it must be a dict"),
    ],
)
async def test_a_meaningless_answer_is_a_named_failure(tiny: ChatCodec, returned: Any, told: str) -> None:
    class Odd(BaseInteraction):
        async def generate_response(self, *given: Any, **kwargs: Any) -> Any:
            return returned

    held = await talk(tiny, Odd(), words(tiny, "one"))
    assert held.episode.stop_reason is StopReason.ERROR
    assert held.episode.error is not None and told in held.episode.error
