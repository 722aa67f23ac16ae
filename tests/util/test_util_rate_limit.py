"""A limiter keeps to its rate, concurrency and queue, hands every slot on, and adapts to what a tool can take."""

import asyncio
import heapq
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.tools import CallLimits
from rally.util.rate_limit import AdaptiveConcurrency, QueueFull, RateLimiter, TokenBucket


async def enter(limiter: RateLimiter, seconds: float = 0.0) -> float:
    async with limiter.slot() as waited:
        await asyncio.sleep(seconds)
    return waited


async def test_a_burst_passes_and_then_a_steady_rate() -> None:
    limiter = RateLimiter(rate=20)
    started = time.perf_counter()
    waits = await asyncio.gather(*(enter(limiter) for _ in range(30)))
    took = time.perf_counter() - started
    assert sum(waited < 0.04 for waited in waits) >= 15, "a second's worth is there from the start"
    assert took > 0.45, "the other ten come at twenty a second"


async def test_who_gives_up_waiting_leaves_the_token_to_the_next() -> None:
    limiter = RateLimiter(rate=1)
    await enter(limiter)
    impatient = [asyncio.create_task(enter(limiter)) for _ in range(50)]
    await asyncio.sleep(0.05)
    for task in impatient:
        task.cancel()
    await asyncio.gather(*impatient, return_exceptions=True)
    await asyncio.wait_for(enter(limiter), timeout=20)


async def test_even_spacing_survives_callers_that_give_up() -> None:
    bucket, began = TokenBucket(20, burst_seconds=0.0), time.monotonic()
    starts: list[float] = []

    async def call() -> None:
        await bucket.acquire()
        starts.append(time.monotonic() - began)

    tasks = [asyncio.create_task(call()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[2:4]:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.gather(*tasks, *(asyncio.create_task(call()) for _ in range(2)), return_exceptions=True)
    assert starts[-1] >= 7 * 0.05, "the new calls come after those that were waiting"


async def test_a_full_queue_refuses_at_once_and_a_free_limiter_never() -> None:
    limiter = RateLimiter(max_concurrency=2, max_queue=3)
    tasks = [asyncio.create_task(enter(limiter, 0.1)) for _ in range(8)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(outcome, QueueFull) for outcome in outcomes] == [False] * 5 + [True] * 3
    assert isinstance(await enter(limiter), float), "it is open again"
    strict = RateLimiter(max_concurrency=1, max_queue=0)
    first, second = await asyncio.gather(enter(strict, 0.01), enter(strict), return_exceptions=True)
    assert isinstance(first, float) and isinstance(second, QueueFull)
    bucket = RateLimiter(rate=2, max_queue=0)
    outcomes = await asyncio.gather(*(enter(bucket) for _ in range(3)), return_exceptions=True)
    assert [isinstance(outcome, QueueFull) for outcome in outcomes] == [False, False, True]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=25), st.integers(1, 4))
def test_whoever_gives_up_the_number_holds_and_all_others_get_in(plan: list[tuple[int, bool]], most: int) -> None:
    """Calls that stay for some turns of the event loop; some are cancelled at a random moment."""

    async def run() -> None:
        limiter = RateLimiter(max_concurrency=most)
        inside = 0

        async def visit(turns: int) -> None:
            nonlocal inside
            async with limiter.slot():
                inside += 1
                assert inside <= most
                try:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(visit(turns)) for turns, _ in plan]
        for at, (turns, gives_up) in enumerate(plan):
            if gives_up:
                for _ in range(turns):
                    await asyncio.sleep(0)
                tasks[at].cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=10)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await asyncio.wait_for(asyncio.gather(*(visit(1) for _ in range(2 * most))), timeout=10)

    asyncio.run(run())


class Served:
    """Simulated time: a server that works on `capacity()` calls as fast as on one, and shares itself among more."""

    def __init__(
        self, control: AdaptiveConcurrency, capacity: Callable[[float], int], fails_above: int | None = None
    ) -> None:
        self.control, self.capacity, self.fails_above = control, capacity, fails_above
        self.now, self.done = 0.0, 0
        self.limits: list[int] = []

    def run(self, until: float) -> None:
        rng = random.Random(0)
        under_way: list[tuple[float, float, bool]] = []
        while self.now < until:
            while len(under_way) < self.control.limit:
                load = (len(under_way) + 1) / self.capacity(self.now)
                seconds = rng.uniform(0.5, 1.5) * max(1.0, load)
                failed = self.fails_above is not None and len(under_way) >= self.fails_above
                heapq.heappush(under_way, (self.now + seconds, seconds, failed))
            self.now, seconds, failed = heapq.heappop(under_way)
            self.done += not failed
            self.control.record(seconds, late=failed, failed=False, waiting=True)
            self.limits.append(self.control.limit)


def test_the_number_settles_where_the_tool_is_fully_used_and_not_much_beyond() -> None:
    control = AdaptiveConcurrency(1, 1000)
    served = Served(control, lambda now: 40)
    served.run(100)
    begun, served.limits, before = served.now, [], served.done
    served.run(400)
    rate = (served.done - before) / (served.now - begun)
    assert rate > 0.9 * 40, "forty calls of a second each are what it can do"
    assert max(served.limits) < 40 * 3


def test_the_number_follows_a_tool_that_loses_strength_and_gets_it_back() -> None:
    control = AdaptiveConcurrency(2, 200)
    served = Served(control, lambda now: 10 if 200 <= now < 600 else 60)
    served.run(200)
    strong = control.limit
    served.run(600)
    weak = control.limit
    served.run(1000)
    assert strong > 45 and weak < 35 and control.limit > 45


def test_timeouts_alone_bring_the_number_down_and_the_bounds_hold() -> None:
    control = AdaptiveConcurrency(4, 64)
    served = Served(control, lambda now: 1000, fails_above=20)
    served.run(300)
    assert min(served.limits) >= 4 and max(served.limits) <= 64
    late = served.limits[len(served.limits) // 2 :]
    assert sum(late) / len(late) < 30, "at twenty and more they time out"


def test_some_failures_are_the_model_s_and_change_nothing() -> None:
    control = AdaptiveConcurrency(1, 16)
    for call in range(200):
        control.record(1.0, late=False, failed=call % 10 < 3, waiting=True)
    assert control.limit == 16


def test_a_tool_that_nobody_waits_for_is_given_no_more() -> None:
    control = AdaptiveConcurrency(2, 16)
    for _ in range(100):
        control.record(1.0, late=False, failed=False, waiting=False)
    assert control.limit == 2


@pytest.mark.parametrize("wrong", [{"max_queue": 3}, {"adaptive_concurrency": True}, {"max_concurrency": 0}])
def test_limits_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        CallLimits(**wrong)  # type: ignore[arg-type]
