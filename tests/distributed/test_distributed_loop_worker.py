"""The servers of a loop worker, which the controller starts, updates and restarts behind its back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest
from fake_server import FakeServer

from rally.distributed.loop_worker import ServerList
from rally.engines.remote.launched_server import NO_URL
from rally.engines.router.server_state import RouterSettings
from rally.types import SamplingParams, WeightSpan

PLAN = {"server_kind": "vllm", "client": {}, "router": asdict(RouterSettings()), "workers": 1, "max_model_len": 64}
PARAMS = SamplingParams(max_tokens=5, seed=3)
DEAD = "http://127.0.0.1:9"


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with FakeServer("vllm", reports_spans=False) as server:
        yield server


@pytest.fixture
async def servers() -> AsyncIterator[ServerList]:
    one = ServerList(PLAN, 0)
    yield one
    await one.close()


def described(url: str, version: int | None) -> dict[str, Any]:
    state = {"version": version, "serving": version is not None, "lost": False, "salt": f"{version}"}
    return {"version": version or 7, "servers": [{"name": "server-0", "url": url, "headers": {}, **state}]}


async def test_a_request_waits_for_the_restart_of_the_only_server(servers: ServerList, fake: FakeServer) -> None:
    servers.follow(described(DEAD, 7))
    asked = asyncio.create_task(servers.generate([1, 2, 3], PARAMS))
    while servers.counts().get("circuits_opened") != 1:
        await asyncio.sleep(0.01)
    tried = servers.counts()["failed_tries"]
    servers.follow(described(NO_URL, None))
    await asyncio.sleep(0.1)
    assert servers.counts()["failed_tries"] == tried, "a server that is being started gets no request"
    servers.follow(described(fake.url, 7))
    assert (await asked).spans == (WeightSpan(7, 0, 5),)


async def test_all_workers_together_send_a_server_no_more_than_one_router(fake: FakeServer) -> None:
    """Asynchronous training leaves one of eight places to the canary. An update would wait for one to end if each of
    four workers sent two requests."""
    plan = {**PLAN, "router": asdict(RouterSettings(max_in_flight=7)), "workers": 4}
    workers, running, sample = [ServerList(plan, number) for number in range(4)], [0], fake._sample
    seen: list[int] = []

    async def counted(body: Any) -> Any:
        running[0] += 1
        seen.append(running[0])
        try:
            return await sample(body)
        finally:
            running[0] -= 1

    fake.pace, fake._sample = 0.01, counted  # type: ignore[method-assign]
    for worker in workers:
        worker.follow(described(fake.url, 7))
    await asyncio.gather(*(worker.generate([1, 2, 3], PARAMS) for worker in workers for _ in range(6)))
    assert max(seen) == 7
    await asyncio.gather(*(worker.close() for worker in workers))


async def test_an_update_that_a_worker_was_not_told_of_leaves_tokens_old(servers: ServerList, fake: FakeServer) -> None:
    servers.follow(described(fake.url, 7))

    async def refresh() -> None:
        servers.follow(described(fake.url, 8))

    servers.refresh = refresh
    generation = await servers.generate([1, 2, 3], PARAMS)
    assert generation.spans == (WeightSpan(7, 0, 5),), "no token is taken for a newer one than it is"
    assert servers.counts().get("void_tries", 0) == 0, "repeating requests would favour short ones"
