"""The threaded engine returns the results of the plain core, each to its caller, under concurrent requests."""

import asyncio
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from small_models import VOCABULARY, full_logprobs, make_model

from rally.engines import EmbeddedEngine, Engine, EngineError, EngineSettings
from rally.engines.embedded import EngineCore
from rally.engines.embedded.engine import SWITCH_INTERVAL
from rally.engines.embedded.request_slots import Request
from rally.engines.embedded.torch_runner import ModelRunner
from rally.types import Generation, SamplingParams

TOLERANCE = 1e-5
PATIENCE = 20.0  # seconds; far more than needed unless the machine is very busy


def prompts(count: int, low: int = 5, high: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))] for _ in range(count)]


def by_core(requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Generation]:
    """The reference: the same requests on a core without threads."""
    core = EngineCore(make_model(), num_pages=400)
    added = [core.add(prompt, params) for prompt, params in requests]
    while core.busy:
        core.step()
    return [request.result() for request in added]


def same(got: Generation, want: Generation) -> bool:
    return (got.ids, got.finish) == (want.ids, want.finish) and got.logprobs == pytest.approx(want.logprobs, abs=1e-5)


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(make_model(), num_pages=400)
    yield made
    await made.close()


class Gate:
    """Lets the engine do `steps` steps, then holds it inside the next one until `open` is called."""

    def __init__(self, engine: EmbeddedEngine, steps: int) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        self._left, self._step = steps, engine.core.step
        engine.core.step = self._gated  # type: ignore[method-assign]

    def _gated(self) -> list[Request]:
        if self._left == 0:
            self.reached.set()
            assert self._opened.wait(PATIENCE)
        self._left -= 1
        return self._step()

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE)

    def open(self) -> None:
        self._opened.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def idle(engine: EmbeddedEngine) -> bool:
    """No request runs or waits, and every page is free or in the prefix cache."""
    core = engine.core
    pages_back = core.pool.num_free + len(core.index) == core.pool.num_pages
    return not core.busy and not engine._waiters and pages_back


async def test_it_is_an_engine(engine: EmbeddedEngine) -> None:
    assert isinstance(engine, Engine)
    assert (engine.weight_version, engine.max_model_len) == (0, 2048)


async def test_many_callers_get_what_the_core_would_give_them(engine: EmbeddedEngine) -> None:
    shared = prompts(1, 40, 40, seed=3)[0]
    asked = [
        (shared + p if i % 2 else p, SamplingParams(max_tokens=3 + i % 15, seed=1000 + i))
        for i, p in enumerate(prompts(40))
    ]

    async def later(i: int, prompt: list[int], params: SamplingParams) -> Generation:
        await asyncio.sleep(0.002 * (i % 7))
        return await engine.generate(prompt, params, session=f"s{i}")

    got = await asyncio.gather(*(later(i, *request) for i, request in enumerate(asked)))
    assert all(same(g, w) for g, w in zip(got, by_core(asked), strict=True))
    assert all(g.seconds >= g.first_token_seconds > g.queued_seconds > 0 for g in got)
    assert 0 < engine.busy_seconds <= max(g.seconds for g in got) * len(got)
    await until(lambda: idle(engine))


async def test_callers_in_several_event_loops_share_one_engine(engine: EmbeddedEngine) -> None:
    asked = [(p, SamplingParams(max_tokens=8, seed=i)) for i, p in enumerate(prompts(3))]
    elsewhere = [asyncio.to_thread(lambda r=r: asyncio.run(engine.generate(*r))) for r in asked[1:]]
    got = await asyncio.gather(engine.generate(*asked[0]), *elsewhere)
    assert all(same(g, w) for g, w in zip(got, by_core(asked), strict=True))


async def test_cancelling_frees_the_pages_and_leaves_the_others_alone(engine: EmbeddedEngine) -> None:
    gate = Gate(engine, steps=4)
    staying = (prompts(1)[0], SamplingParams(max_tokens=20, seed=5))
    leaving = [
        asyncio.create_task(engine.generate(p, SamplingParams(max_tokens=1500, seed=i)))
        for i, p in enumerate(prompts(6, seed=1))
    ]
    stayed = asyncio.create_task(engine.generate(*staying))
    await gate.wait()
    never_begun = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(max_tokens=1500)))
    await asyncio.sleep(0)
    for task in (*leaving, never_begun):
        task.cancel()
    await asyncio.sleep(0)
    gate.open()
    assert same(await stayed, by_core([staying])[0])
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*leaving, return_exceptions=True))
    await until(lambda: idle(engine))
    assert engine.core.steps < 100, "a cancelled request was computed to its end"


async def test_closing_ends_those_who_wait_with_what_they_have() -> None:
    engine = EmbeddedEngine(make_model(), num_pages=400)
    gate = Gate(engine, steps=5)
    prompt, params = prompts(1)[0], SamplingParams(max_tokens=1500, seed=1)
    running = asyncio.create_task(engine.generate(prompt, params))
    await gate.wait()
    arriving = asyncio.create_task(engine.generate([1, 2, 3], params))
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0.05)
    gate.open()
    begun, unbegun = await asyncio.gather(running, arriving)
    await closing
    assert begun.finish == unbegun.finish == "abort"
    (alone,) = by_core([(prompt, SamplingParams(max_tokens=len(begun.ids), seed=1))])
    assert len(begun.ids) >= 5 and begun.ids == alone.ids
    assert unbegun.ids == ()
    assert idle(engine)
    with pytest.raises(EngineError, match="the engine is closed"):
        await engine.generate([1], params)
    await engine.close()


@pytest.mark.parametrize("ahead", [False, True])
async def test_what_feeds_a_gpu_does_not_wait_long_for_an_agent_loop(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = sys.getswitchinterval()
    monkeypatch.setattr(ModelRunner, "ahead", ahead)
    try:
        sys.setswitchinterval(0.005)
        engine = EmbeddedEngine(make_model(), num_pages=400)
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=1, seed=1))
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL if ahead else 0.005)
        await engine.close()
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "words"),
    [
        ([], 5, EngineError, "empty prompt"),
        ([1] * 60, 5, EngineError, "at most 4 new tokens"),
        ([1, VOCABULARY], 5, EngineError, "outside the model's vocabulary of 97"),
        ([-1], 5, EngineError, "outside the model's vocabulary of 97"),
        ([1.5], 5, TypeError, "integer"),
    ],
)
async def test_a_refusal_reaches_its_own_caller_only(
    prompt: list[Any], max_tokens: int, error: type[Exception], words: str
) -> None:
    engine = EmbeddedEngine(make_model(), EngineSettings(max_model_len=64), num_pages=100)
    good = ([1, 2, 3], SamplingParams(max_tokens=10, seed=1))
    answers = await asyncio.gather(
        engine.generate(*good),
        engine.generate(prompt, SamplingParams(max_tokens=max_tokens)),
        engine.generate(*good),
        return_exceptions=True,
    )
    assert isinstance(answers[1], error) and words in str(answers[1])
    (want,) = by_core([good])
    assert all(isinstance(g, Generation) and same(g, want) for g in (answers[0], answers[2]))
    await engine.close()


async def test_whatever_is_wrong_with_a_request_nobody_hangs(engine: EmbeddedEngine) -> None:
    nonsense: Any = {"max_tokens": 3}
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(AttributeError):
            await engine.generate([1], nonsense)
        assert (await engine.generate([1], SamplingParams(max_tokens=3, seed=-1))).finish == "length"


async def test_ids_may_come_as_an_array(engine: EmbeddedEngine) -> None:
    params = SamplingParams(max_tokens=6, seed=2)
    assert same(await engine.generate(np.array([4, 5, 6]), params), by_core([([4, 5, 6], params)])[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
async def test_an_update_falls_between_steps_and_follows_the_policy(policy: Any) -> None:
    engine = EmbeddedEngine(make_model(seed=0), EngineSettings(in_flight=policy), num_pages=400)
    weights = {0: make_model(seed=0), 1: make_model(seed=1)}
    gate = Gate(engine, steps=4)
    prompt = prompts(1)[0]
    running = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=150, seed=3)))
    await gate.wait()
    steps: list[int] = []

    def update() -> None:
        with engine.updating():
            steps.append(engine.core.steps)
            engine.core.model.load_state_dict(weights[1].state_dict())
            threading.Event().wait(0.05)
            steps.append(engine.core.steps)

    updating = asyncio.create_task(asyncio.to_thread(update))
    await asyncio.sleep(0.05)
    gate.open()
    result, _ = await asyncio.gather(running, updating)
    assert steps[0] == steps[1], "no step may run while the weights change"
    assert engine.weight_version == 1
    aborted = policy == "abort"
    assert (result.finish, len(result.ids) < 150) == (("abort", True) if aborted else ("length", False))
    assert [s.version for s in result.spans] == ([0] if aborted else [0, 1])
    assert result.spans[0].start == 0 and 5 <= result.spans[0].end < 150
    exact = result.spans[:1] if policy == "keep" else result.spans  # afterwards its KV mixes both versions
    for span in exact:
        want = full_logprobs(weights[span.version], prompt + list(result.ids), len(prompt))
        assert result.logprobs[span.start : span.end] == pytest.approx(want[span.start : span.end], abs=TOLERANCE)
    after = await engine.generate(prompt, SamplingParams(max_tokens=4, seed=3))
    assert [s.version for s in after.spans] == [1]
    assert after.logprobs == pytest.approx(
        full_logprobs(weights[1], prompt + list(after.ids), len(prompt)), abs=TOLERANCE
    )
    await engine.close()


async def test_an_update_that_fails_half_way_is_a_new_version_all_the_same(engine: EmbeddedEngine) -> None:
    """Some weights may have changed already, so earlier cache entries must not be used."""
    prompt, params = prompts(1, 40, 40)[0], SamplingParams(max_tokens=4, seed=0)
    await engine.generate(prompt, params)
    other = make_model(seed=1)
    with pytest.raises(OSError, match="disk"), engine.updating():
        engine.core.model.load_state_dict(other.state_dict())
        raise OSError("disk")
    after = await engine.generate(prompt, params)
    assert engine.weight_version == 1
    assert after.logprobs == pytest.approx(full_logprobs(other, prompt + list(after.ids), 40), abs=TOLERANCE)


def test_abort_ends_preempted_requests_too() -> None:
    """A request that has sampled is in flight even while it waits for pages, and must not mix two versions."""
    core = EngineCore(make_model(), EngineSettings(in_flight="abort"), num_pages=100)
    first, second = (core.add(p, SamplingParams(max_tokens=50, seed=1)) for p in prompts(2))
    for _ in range(4):
        core.step()
    core.scheduler.preempt(second)
    fresh = core.add([1, 2, 3], SamplingParams(max_tokens=5))
    assert core.commit_weights() == [first, second]
    while core.busy:
        core.step()
    assert (second.result().finish, fresh.result().finish) == ("abort", "length")
    assert [s.version for s in second.result().spans] == [0]


async def test_a_failing_step_reaches_all_who_wait_and_all_who_come_later() -> None:
    engine = EmbeddedEngine(make_model(), num_pages=400)
    gate = Gate(engine, steps=3)
    params = SamplingParams(max_tokens=500)
    running = [asyncio.create_task(engine.generate(p, params)) for p in prompts(3)]
    await gate.wait()
    arriving = asyncio.create_task(engine.generate([1], params))
    await asyncio.sleep(0)

    def broken(*args: Any) -> None:
        raise RuntimeError("the device is lost")

    engine.core.runner.launch = broken  # type: ignore[method-assign, assignment]
    gate.open()
    async with asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(*running, arriving, return_exceptions=True)
        stopped = "the engine has stopped because a step failed: RuntimeError: the device is lost"
        assert [str(o) for o in outcomes] == ["the device is lost"] * 3 + [stopped], "who was in the step has its error"
        with pytest.raises(EngineError, match=stopped) as later:
            await engine.generate([1], params)
        assert isinstance(later.value.__cause__, RuntimeError)
        await engine.close()


async def test_a_caller_whose_event_loop_has_ended_takes_nobody_along(engine: EmbeddedEngine) -> None:
    gate = Gate(engine, steps=2)
    params = SamplingParams(max_tokens=3, seed=1)

    async def leave() -> None:
        asking = asyncio.create_task(engine.generate([9, 9], params))
        await gate.wait()
        assert not asking.done()

    loop = asyncio.new_event_loop()
    await asyncio.to_thread(loop.run_until_complete, leave())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # abandoned on purpose
    loop.close()
    gate.open()
    asked = ([1, 2, 3], SamplingParams(max_tokens=10, seed=4))
    async with asyncio.timeout(PATIENCE):
        assert same(await engine.generate(*asked), by_core([asked])[0])
    await until(lambda: idle(engine))
