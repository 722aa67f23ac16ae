"""In deterministic mode on a CPU, the composition of a batch does not depend on timing."""

import asyncio
import random

import pytest
from small_models import VOCABULARY, make_model

from rally.engines import EmbeddedEngine, EngineSettings
from rally.types import Generation, SamplingParams

SESSIONS = 12


async def exchange(engine: EmbeddedEngine, number: int, pace: random.Random) -> list[Generation]:
    """Three turns with pauses that differ from run to run; some end early."""
    rng = random.Random(number)
    history = [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 40))]
    replies = []
    for turn in range(1 + number % 3):
        await asyncio.sleep(pace.random() * 0.01)
        params = SamplingParams(max_tokens=5 + number, seed=100 * number + turn)
        replies.append(await engine.generate(history, params, session=f"s{number:02d}"))
        history = [*history, *replies[-1].ids, 7, 8, 9]
    engine.dismiss(f"s{number:02d}")
    return replies


def new_engine(deterministic: bool) -> EmbeddedEngine:
    settings = EngineSettings(deterministic=deterministic, max_model_len=512)
    return EmbeddedEngine(make_model(), settings, num_pages=400)


async def together(engine: EmbeddedEngine, numbers: range, pace: int) -> list[tuple[float, ...]]:
    clock = random.Random(pace)
    for number in numbers:
        engine.expect(f"s{number:02d}")
    replies = await asyncio.gather(*(exchange(engine, number, clock) for number in numbers))
    return [reply.logprobs for turns in replies for reply in turns]


async def hold(deterministic: bool, pace: int) -> list[tuple[float, ...]]:
    engine = new_engine(deterministic)
    result = await together(engine, range(SESSIONS), pace)
    await engine.close()
    return result


async def test_the_same_bits_at_any_pace():
    async with asyncio.timeout(60):
        runs = [await hold(True, pace) for pace in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]


async def test_the_same_bits_whatever_the_engine_did_before():
    """A resumed run has no such history: neither other slots nor cached prompts may change the result."""
    used = new_engine(True)
    async with asyncio.timeout(60):
        for numbers in (range(5, SESSIONS), range(3, 7), range(SESSIONS - 3)):
            await together(used, numbers, 1)
        later = await together(used, range(SESSIONS), 1)
        with used.updating():
            pass
        after = await together(used, range(SESSIONS), 2)
        assert later == after == await hold(True, 3)
    await used.close()


async def test_a_cancelled_or_ended_exchange_holds_nobody_up():
    engine = EmbeddedEngine(make_model(), EngineSettings(deterministic=True, max_model_len=512), num_pages=400)
    for name in ("a", "b", "c"):
        engine.expect(name)
    params = SamplingParams(max_tokens=30, seed=1)
    waiting = asyncio.create_task(engine.generate([1, 2, 3], params, session="a"))
    other = asyncio.create_task(engine.generate([1, 2], params, session="b"))
    await asyncio.sleep(0.05)
    assert not waiting.done() and engine.core.steps == 0, "c has not asked for anything yet"
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    engine.dismiss("b")
    engine.dismiss("c")
    async with asyncio.timeout(20):
        assert len((await waiting).ids) == 30
    await engine.close()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_calls_without_a_session_are_served(deterministic):
    engine = EmbeddedEngine(make_model(), EngineSettings(deterministic=deterministic), num_pages=400)
    async with asyncio.timeout(20):
        assert len((await engine.generate([1, 2], SamplingParams(max_tokens=3))).ids) == 3
    await engine.close()
