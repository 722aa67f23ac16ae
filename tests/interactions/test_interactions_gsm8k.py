"""The simulated GSM8K user against hand-written episodes: its replies, when it stops, and its state."""

from typing import Any

import pytest

from rally.interactions import Gsm8kInteraction, Interactions, InteractionSession
from rally.interactions.gsm8k import ENOUGH, MISSING, RIGHT, WRONG
from rally.types import Message, Task


def session(user: Gsm8kInteraction, episode: str = "e", **kwargs: Any) -> InteractionSession:
    given = {"name": "gsm8k", "query": "How many?", "ground_truth": "1200", **kwargs}
    task = Task(
        id="r", data_source="openai/gsm8k", prompt=({"role": "user", "content": "?"},), interaction_kwargs=given
    )
    opened = Interactions([user]).open(task, episode)
    assert opened is not None
    return opened


async def hear(held: InteractionSession, *answers: str) -> list[tuple[bool, str, float | None]]:
    """The user's reply to each answer, given the whole conversation so far."""
    messages: list[Message] = [{"role": "user", "content": "How many?"}]
    heard = []
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
        reply = await held.reply(messages)
        heard.append((reply.ends, reply.text, reply.score))
        messages.append({"role": "user", "content": reply.text})
    return heard


async def test_a_wrong_answer_is_sent_back_and_a_right_one_ends_it() -> None:
    held = session(Gsm8kInteraction())
    await held.start()
    heard = await hear(held, "So #### 1300", "I cannot say", "Then 12 * 100.\n#### 1,200.00")
    assert heard == [(False, WRONG, 0.0), (False, MISSING, 0.0), (True, RIGHT, 1.0)]
    assert (await held.close()).score == 1.0


async def test_only_the_last_turn_counts() -> None:
    held = session(Gsm8kInteraction())
    await held.start()
    messages: list[Message] = [
        {"role": "assistant", "content": "#### 1200"},
        {"role": "user", "content": "#### 1200"},
        {"role": "assistant", "content": "#### 7"},
    ]
    assert (await held.reply(messages)).score == 0.0
    assert (await held.close()).score == 0.0


async def test_it_gives_up_after_max_tries() -> None:
    held = session(Gsm8kInteraction({"max_tries": 2}))
    await held.start()
    assert await hear(held, "#### 1", "#### 2") == [(False, WRONG, 0.0), (True, ENOUGH, 0.0)]
    closing = await held.close()
    assert (closing.score, closing.failures) == (0.0, [])


async def test_a_last_try_may_be_right() -> None:
    held = session(Gsm8kInteraction({"max_tries": 1}))
    await held.start()
    assert await hear(held, "#### 1200") == [(True, RIGHT, 1.0)]


async def test_episodes_do_not_share_their_state_and_leave_none() -> None:
    user = Gsm8kInteraction({"max_tries": 2})
    one, other = session(user, "one"), session(user, "other", ground_truth="5")
    await one.start()
    await other.start()
    assert await hear(one, "#### 5") == [(False, WRONG, 0.0)]
    assert await hear(other, "#### 5") == [(True, RIGHT, 1.0)]
    assert (await one.close()).score == 0.0 and (await other.close()).score == 1.0
    assert user._episodes == {}


@pytest.mark.parametrize("truth", [None, "many"])
async def test_a_row_without_a_number_is_told_and_closes_cleanly(truth: str | None) -> None:
    user = Gsm8kInteraction()
    held = session(user, ground_truth=truth)
    with pytest.raises(ValueError, match=f"must be a number, not {truth!r}; fix the row"):
        await held.start()
    closing = await held.close()
    assert (closing.score, closing.failures) == (None, [])
    assert (await held.close()).failures == [], "closing twice does nothing"
