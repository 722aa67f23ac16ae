"""The router over servers with every kind of failure: results of the caller, requests to the other servers,
counters."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from rally.engines import Engine, EngineError, LockstepEngine
from rally.engines.base import ReplicaBusy, ReplicaGone
from rally.engines.router.router import Router
from rally.engines.router.server_state import RouterSettings
from rally.types import Generation, SamplingParams

PARAMS = SamplingParams(max_tokens=2)
QUICK = RouterSettings(health_every=0.02, health_timeout=0.02, first_pause=0.05, open_after=1, give_up_after=0.3)


@dataclass
class Fake:
    """A scripted server: `answers` is called for each request and may fail or wait."""

    name: str
    answers: Callable[[], Awaitable[None]] | None = None
    well: bool = True
    seeds: list[int | None] = field(default_factory=list)
    closed: bool = False
    cancelled: int = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.seeds.append(params.seed)
        try:
            if self.answers is not None:
                await self.answers()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Generation(ids=(1, 2), logprobs=(-1.0, -2.0), finish="length", cached_tokens=len(prompt_ids) - 1)

    async def healthy(self) -> bool:
        if not self.well:
            await asyncio.sleep(60)
        return True

    async def close(self) -> None:
        self.closed = True


def failing(error: EngineError, times: int = 1_000) -> Callable[[], Awaitable[None]]:
    left = [times]

    async def answers() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error

    return answers


async def hang() -> None:
    await asyncio.sleep(60)


def router(*fakes: Fake, settings: RouterSettings = QUICK) -> Router:
    return Router(fakes, settings, max_model_len=100)


async def test_it_is_an_engine_and_an_episode_stays_with_its_server() -> None:
    fakes = [Fake(name) for name in "abc"]
    made = router(*fakes)
    assert isinstance(made, Engine) and isinstance(made, LockstepEngine)
    for episode in range(9):
        for _ in range(4):
            await made.generate([1, 2, 3], PARAMS, session=f"e{episode}")
    metrics = made.metrics()
    assert metrics["router/kept"] == 27 and metrics["router/kept_rate"] == 1.0 and metrics["router/first_turns"] == 9
    assert metrics["router/cached_tokens"] == 72 and metrics["router/sampled_tokens"] == 72
    await made.close()
    assert all(fake.closed for fake in fakes)
    with pytest.raises(EngineError, match="closed"):
        await made.generate([1], PARAMS)


async def test_waiting_for_a_place_counts_as_queueing() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def held() -> None:
        begun.set()
        await release.wait()

    made = router(Fake("only", held), settings=RouterSettings(max_in_flight=1))
    tasks = [asyncio.create_task(made.generate([1], PARAMS)) for _ in range(2)]
    await begun.wait()
    await asyncio.sleep(0.05)  # at least; the second request has no slot meanwhile
    release.set()
    _, second = await asyncio.gather(*tasks)
    assert 0.049 <= second.queued_seconds <= second.seconds
    assert second.first_token_seconds == 0, "a server that does not say when its first token was is not believed to"
    await made.close()


async def test_a_failed_request_is_repeated_elsewhere_with_its_seed_and_counted_once() -> None:
    bad, good = Fake("bad", failing(ReplicaGone("gone"))), Fake("good")
    made = router(bad, good)
    answers = await asyncio.gather(*(made.generate([1, 2, 3], PARAMS) for _ in range(10)))
    assert len(answers) == 10 and len(good.seeds) == 10
    assert None not in good.seeds and set(bad.seeds) <= set(good.seeds), "a repetition is the same request"
    metrics = made.metrics()
    assert metrics["router/failed_tries"] == len(bad.seeds) > 0
    assert metrics["router/recomputed_prompt_tokens"] == 3 * len(bad.seeds)
    assert metrics["router/sampled_tokens"] == 20 and metrics["router/requests"] == 10
    await made.close()


async def test_the_callers_own_mistake_is_told_and_not_repeated() -> None:
    fakes = [Fake(name, failing(EngineError("a prompt too long"))) for name in "ab"]
    made = router(*fakes)
    with pytest.raises(EngineError, match="too long"):
        await made.generate([1], PARAMS)
    assert sum(len(fake.seeds) for fake in fakes) == 1 and made.metrics()["router/failed_tries"] == 0
    await made.close()


async def test_a_busy_server_is_asked_again_when_it_said() -> None:
    fake = Fake("a", failing(ReplicaBusy("full", retry_after=0.1), times=2))
    made = router(fake)
    began = asyncio.get_running_loop().time()
    await made.generate([1], PARAMS)
    assert asyncio.get_running_loop().time() - began >= 0.2 and len(set(fake.seeds)) == 1 and len(fake.seeds) == 3
    assert made.metrics()["router/refusals"] == 2 and made.metrics()["router/failed_tries"] == 0
    await made.close()


async def test_what_a_hanging_server_was_asked_another_answers() -> None:
    stuck, good = Fake("stuck", hang, well=False), Fake("good")
    made = router(stuck, good)
    answers = await asyncio.wait_for(asyncio.gather(*(made.generate([1], PARAMS) for _ in range(8))), 10)
    assert len(answers) == 8 and stuck.cancelled == len(stuck.seeds) > 0
    stuck.well, stuck.answers = True, None
    async with asyncio.timeout(10):
        while made.metrics()["router/servers_usable"] < 2:
            await asyncio.sleep(0.01)
    before = len(stuck.seeds)
    await made.generate([1], PARAMS)
    await made.generate([1], PARAMS)
    assert len(stuck.seeds) > before, "it is given requests again"
    await made.close()


async def test_what_hangs_is_left_also_where_failed_requests_opened_the_circuit() -> None:
    calls = 0

    async def answers() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the circuit opens while the first one hangs
            raise ReplicaGone("connection refused")
        await hang()

    async def stubborn() -> None:
        try:
            await hang()
        finally:
            await asyncio.sleep(0.2)  # several health checks find it in flight while it ends

    for way in (answers, stubborn):
        dead, good = Fake("dead", way), Fake("good")
        made = router(dead, settings=replace(QUICK, first_pause=30.0))
        asked = [asyncio.create_task(made.generate([n], PARAMS)) for n in range(2)]
        await asyncio.sleep(0.01)
        made.add(good)
        dead.well = False
        async with asyncio.timeout(5):
            await asyncio.gather(*asked)
        assert len(good.seeds) == 2
        await made.close()


async def test_when_no_server_is_left_the_error_says_what_the_last_one_said() -> None:
    fakes = [Fake(name, failing(ReplicaGone("connection refused")), well=False) for name in "ab"]
    made = router(*fakes)
    with pytest.raises(EngineError, match=r"no server has answered for 0.3 s \(last .: connection refused\)"):
        await made.generate([1], PARAMS)
    assert made.metrics()["router/given_up"] == 1 and made.metrics()["router/waiting"] == 0
    await made.close()


async def test_in_flight_is_bounded_and_a_cancelled_request_makes_room() -> None:
    fake = Fake("a", hang)
    made = router(fake, settings=RouterSettings(max_in_flight=2))
    tasks = [asyncio.create_task(made.generate([n], PARAMS)) for n in range(4)]
    await asyncio.sleep(0.02)
    assert len(fake.seeds) == 2 and made.metrics()["router/waiting"] == 2
    tasks[2].cancel()
    tasks[0].cancel()
    await asyncio.sleep(0.02)
    assert len(fake.seeds) == 3 and fake.cancelled == 1 and made.metrics()["router/in_flight"] == 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert made.metrics()["router/in_flight"] == 0
    await made.close()


async def test_servers_come_and_go_while_requests_run() -> None:
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    old = Fake("old", wait)
    made = router(old)
    running = asyncio.create_task(made.generate([1], PARAMS, session="episode"))
    await asyncio.sleep(0.01)
    new = Fake("new")
    made.add(new)
    removal = asyncio.create_task(made.remove("old"))
    await asyncio.sleep(0.01)
    await made.generate([1], PARAMS)
    assert len(new.seeds) == 1 and not removal.done() and not old.closed, "it finishes what it has"
    with pytest.raises(EngineError, match="no server 'old' to remove"):
        await made.remove("old")
    gate.set()
    await running
    await removal
    assert old.closed and [replica.name for replica in made.replicas] == ["new"]
    await made.generate([1], PARAMS, session="episode")
    assert len(new.seeds) == 2 and made.metrics()["router/moved_from_dead"] == 1
    await made.close()


def test_each_step_of_a_run_may_have_its_own_event_loop() -> None:
    made = router(Fake("a"), Fake("b"))
    for _ in range(3):
        assert asyncio.run(made.generate([1], PARAMS, session="episode")).finish == "length"
    assert made.metrics()["router/kept"] == 2


async def test_prometheus_reads_the_same_numbers() -> None:
    made = router(Fake('a"b\n'))
    await made.generate([1, 2], PARAMS)
    lines = made.prometheus().splitlines()
    assert "rally_router_requests_total 1" in lines and "rally_router_prompt_tokens_total 2" in lines
    assert r'rally_router_in_flight{server="a\"b\n"} 0' in lines
    assert "# TYPE rally_router_requests_total counter" in lines
    await made.close()


def test_a_router_without_servers_is_refused() -> None:
    with pytest.raises(EngineError, match="at least one server"):
        router()
