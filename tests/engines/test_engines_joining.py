"""Servers that joined and hang, or leave, while weights are published: the run goes on without them and says so."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fake_server import FakeServer
from remote_cases import SETTINGS, ruled
from small_models import VOCABULARY

from rally.engines.remote import (
    GatheredWeights,
    JoinFolder,
    Oracle,
    RemoteEngine,
    ServerReplica,
    Vllm,
    WeightFiles,
    join_folder,
)
from rally.engines.remote.server_api import InFlight, Source
from rally.engines.router.server_state import RouterSettings
from rally.types import Generation, SamplingParams

RULED = Oracle(forward=ruled, vocabulary=VOCABULARY, tolerance=1e-3)
QUICK = replace(SETTINGS, sampling=SamplingParams(), router=RouterSettings(health_every=0.02, give_up_after=60.0))
PARAMS = SamplingParams(max_tokens=4, seed=5)


class Hanging(ServerReplica):
    """A server that answers /health and, in the calls of `hangs`, nothing else."""

    hangs: set[str]

    async def load(self, source: Source, version: int, in_flight: InFlight) -> None:
        while "load" in self.hangs:
            self.hangs.add("now")
            self.serving = False
            await asyncio.sleep(0.01)
        await super().load(source, version, in_flight)

    async def generate(self, prompt_ids: object, params: SamplingParams) -> Generation:
        if "generate" in self.hangs:
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, params)  # type: ignore[arg-type]


@dataclass
class Case:
    engine: RemoteEngine
    file: Path  # the announcement
    url: str  # of the server that joins
    hangs: set[str]
    other: FakeServer  # the server that joins

    def announce(self) -> None:
        self.file.write_text(json.dumps({"url": self.url}))

    def hang(self, call: str) -> None:
        """The server that joins hangs from now on, and the run waits for it only briefly."""
        self.hangs.add(call)
        self.engine.settings = replace(QUICK, join_seconds=0.3)

    @property
    def hanging(self) -> bool:
        return "now" in self.hangs

    def recover(self) -> None:
        self.hangs.clear()
        self.engine.settings = QUICK

    async def joined(self) -> None:
        self.announce()
        async with asyncio.timeout(60):
            while not self.engine.joined:
                await asyncio.sleep(0.01)

    async def publish(self) -> dict[str, float]:
        with self.engine.updating():
            pass
        async with asyncio.timeout(60):
            return await self.engine.publish()


@pytest.fixture
async def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr("rally.engines.remote.engine.REST", 1000)
    hangs: set[str] = set()

    async with FakeServer("vllm") as own, FakeServer("vllm") as other:

        def make(one: object) -> ServerReplica:
            server = Hanging(other.url, Vllm())
            server.hangs = hangs
            return server

        folder = JoinFolder(join_folder(tmp_path), make)
        weights = WeightFiles(lambda path: path.mkdir(), tmp_path)
        engine = RemoteEngine([ServerReplica(own.url, Vllm())], weights, RULED, QUICK, folder)
        await engine.start()
        yield Case(engine, folder.folder / "other.json", other.url, hangs, other)
        await engine.close()


@pytest.mark.drill(
    "reliability", "A rollout server that joined hangs", "It leaves by name after rollout.server.join_timeout seconds"
)
@pytest.mark.parametrize("call", ["load", "generate"])
async def test_a_joined_server_that_hangs_does_not_hold_up_an_update(
    case: Case, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    await case.joined()
    case.hang(call)
    told = await case.publish()
    assert (told["engine/servers"], told["engine/joined"], case.engine.joined) == (1.0, 0.0, {})
    assert f"{case.url} leaves the run: {case.url} did not load weights and pass its check within 0.3 s" in caplog.text
    assert "rollout.server.join_timeout" in caplog.text
    assert (await case.engine.generate([1], PARAMS)).spans[-1].version == 1
    case.recover()
    await asyncio.sleep(0.2)
    assert not case.engine.joined, "it does not hold up the run again at once"
    case.file.unlink()
    await asyncio.sleep(0.2)
    await case.joined()


@pytest.mark.drill(
    "reliability",
    "A rollout server that joined is started again",
    "None of its tokens are used until it has the weights",
)
@pytest.mark.parametrize("asked", [8, 0])
async def test_a_joined_server_that_was_started_again_gets_the_weights_again(
    case: Case, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its address and token are the same, and its weights are those that it was started with."""
    await case.joined()
    await case.publish()
    case.other.label = "0"
    answers = await asyncio.gather(*(case.engine.generate([n + 1], PARAMS) for n in range(asked)))
    assert {span.version for answer in answers for span in answer.spans} == ({1} if asked else set())
    await case.engine.rest()
    assert f"{case.url} has weights of version 0, although it was given version 1" in caplog.text
    await case.joined()
    told = await case.publish()
    assert (told["engine/servers"], told["engine/joined"], case.other.label) == (2.0, 1.0, "2")


async def test_requests_of_a_joined_server_that_hangs_go_to_others(case: Case) -> None:
    await case.joined()
    case.hang("generate")
    asked = [asyncio.create_task(case.engine.generate([n + 1], PARAMS)) for n in range(8)]
    await asyncio.sleep(0.2)
    assert sum(task.done() for task in asked) < 8
    await case.publish()
    async with asyncio.timeout(60):
        assert [len((await task).ids) for task in asked] == [4] * 8


async def test_a_joined_server_that_hangs_does_not_hold_up_the_check_before_an_update(case: Case) -> None:
    await case.joined()
    case.hang("generate")
    async with asyncio.timeout(60):
        await case.engine.rest()
    assert not case.engine.joined


async def test_a_server_that_hangs_while_it_joins_does_not_hold_up_an_update(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.hang("load")
    case.announce()
    await asyncio.sleep(0.2)
    await case.publish()
    assert f"{case.url} cannot join yet: {case.url} did not load weights" in caplog.text
    await case.publish()
    assert caplog.text.count("cannot join yet") == 1


async def test_the_time_of_an_update_does_not_count_against_a_server_that_joins(case: Case) -> None:
    case.hang("load")
    case.announce()
    while not case.hanging:
        await asyncio.sleep(0)
    time.sleep(1)  # an update of synchronous training blocks the event loop
    case.recover()
    async with asyncio.timeout(60):
        while not case.engine.joined:
            await asyncio.sleep(0.01)


async def test_a_server_may_leave_while_it_loads_weights(case: Case) -> None:
    await case.joined()
    case.hangs.add("load")
    publishing = asyncio.create_task(case.publish())
    await asyncio.sleep(0.1)
    case.file.unlink()
    await asyncio.sleep(0.2)  # the run looks for announcements meanwhile
    case.hangs.clear()
    await publishing
    async with asyncio.timeout(60):
        while case.engine.joined:
            await asyncio.sleep(0.01)
    assert len((await case.engine.generate([1], PARAMS)).ids) == 4


async def test_weights_are_written_once_for_all_servers_that_joined_a_run_with_engines_in_ranks() -> None:
    class Files:
        version: int | None = None
        begun = 0

        async def stage(self, version: int) -> None:
            self.begun += 1
            await asyncio.sleep(0.1)
            self.version = version

        async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
            assert self.version == 7

    files = Files()
    weights = GatheredWeights(lambda version: None, files)  # type: ignore[arg-type]
    await weights.stage(7)
    servers = [ServerReplica(f"http://127.0.0.1:{port}", Vllm()) for port in (1, 2, 3)]
    sending = [asyncio.create_task(weights.send(server, "keep")) for server in servers]
    await asyncio.sleep(0)
    sending[0].cancel()  # it is given up while it waits
    await asyncio.gather(*sending, return_exceptions=True)
    assert (files.version, files.begun) == (7, 1)
    assert [task.cancelled() for task in sending] == [True, False, False]
