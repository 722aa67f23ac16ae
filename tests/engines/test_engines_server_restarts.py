"""Servers that load weights, sleep, are killed and lost while requests run. Agent loops see only the final failure, and
see it at once."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import fake_server
import pytest
import torch
from fake_server import FakeServer
from remote_cases import SETTINGS, oracle_of, ruled
from small_models import VOCABULARY, make_model

from rally.engines import EngineError, LockstepEngine
from rally.engines.base import ReplicaGone
from rally.engines.remote import (
    ClientSettings,
    LaunchedServer,
    Oracle,
    RemoteEngine,
    RemoteSettings,
    ServerReplica,
    Sglang,
    Vllm,
    WeightFiles,
)
from rally.engines.router.server_state import RouterSettings
from rally.types import SamplingParams

PARAMS = SamplingParams(max_tokens=20, seed=5)
DIALECTS = {"vllm": Vllm, "sglang": Sglang}
RULED = Oracle(forward=ruled, vocabulary=VOCABULARY, tolerance=1e-3)
TOUCHY = RouterSettings(open_after=1, health_every=0.02, first_pause=30.0, give_up_after=30.0)
PLAIN = replace(SETTINGS, sampling=SamplingParams(), router=TOUCHY)


def engine_over(
    servers: Sequence[ServerReplica], room: Path, settings: RemoteSettings = PLAIN, oracle: Oracle = RULED
) -> RemoteEngine:
    return RemoteEngine(servers, WeightFiles(lambda folder: folder.mkdir(), room), oracle, settings)


def own_server(tmp_path: Path, command: Sequence[str] = (), name: str = "vllm-0") -> LaunchedServer:
    """A fake server launched by the engine; from its second start on it runs `command`, if there is one."""
    started: list[int] = []

    def choose(folder: str, port: int) -> list[str]:
        started.append(port)
        ruled = [sys.executable, fake_server.__file__, "vllm", str(port)]
        return list(command) if command and len(started) > 1 else ruled

    return LaunchedServer(Vllm(), choose, tmp_path / f"{name}.log", settings=ClientSettings(start_seconds=120))


def kill(server: LaunchedServer) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("tells", [True, False])
async def test_an_update_in_the_midst_of_requests_costs_no_server_its_standing(tells: bool, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeServer("vllm", reports_spans=tells)) for _ in range(2)]
        engine = engine_over([ServerReplica(fake.url, Vllm()) for fake in fakes], tmp_path)
        await engine.start()
        for fake in fakes:
            fake.pace = 0.02
        asked = [asyncio.create_task(engine.generate([n + 1], PARAMS, session=f"e{n}")) for n in range(6)]
        await asyncio.sleep(0.15)
        with engine.updating():
            pass
        publishing = asyncio.create_task(engine.publish())
        await asyncio.sleep(0.05)
        late = asyncio.create_task(engine.generate([50], PARAMS, session="e0"))
        told = await publishing
        generations = [await task for task in (*asked, late)]
        assert generations[-1].spans[-1].version == 1
        assert {generation.spans[-1].version for generation in generations[:-1]} == {1 if tells else 0}
        assert [len(generation.ids) for generation in generations] == [20] * 7
        assert len(generations[0].spans) == (2 if tells else 1)  # all count as of the oldest version
        assert told["router/circuits_opened"] == told["router/failed_tries"] == told["router/void_tries"] == 0
        assert engine.router.metrics()["router/requests"] == 7
        await engine.close()


@pytest.mark.drill("reliability", "The only rollout server dies", "It is started again and the requests wait")
async def test_requests_wait_for_the_only_server_while_it_is_started_again(tmp_path: Path) -> None:
    server = own_server(tmp_path)
    engine = engine_over([server], tmp_path, replace(PLAIN, router=replace(TOUCHY, health_every=60.0)))
    await engine.start()
    kill(server)
    asked = [asyncio.create_task(engine.generate([n + 1], PARAMS, session=f"e{n}")) for n in range(8)]
    assert {len((await task).ids) for task in asked} == {20}  # the next health check is a minute away
    told = engine.router.lap()
    assert (told["router/given_up"], told["router/circuits_opened"], engine.restarts) == (0, 0, 1)
    assert engine.router.lap()["router/requests"] == 0  # each is logged once
    await engine.close()


@pytest.mark.drill(
    "reliability", "One of several rollout servers dies", "The others take its requests while it is started again"
)
async def test_the_others_do_the_work_of_one_that_is_started_again(tmp_path: Path) -> None:
    servers = [own_server(tmp_path, name=name) for name in ("vllm-0", "vllm-1")]
    engine = engine_over(servers, tmp_path, replace(PLAIN, restart_delay=0.5))
    await engine.start()
    for n in range(6):
        await engine.generate([n + 1], PARAMS, session=f"e{n}")
    kill(servers[0])
    asked = [asyncio.create_task(engine.generate([n + 1], PARAMS, session=f"e{n}")) for n in range(6)]
    assert {len((await task).ids) for task in asked} == {20} and engine.restarts == 0
    told = engine.router.metrics()
    assert told["router/kept"] + told["router/moved_from_dead"] == 6 and told["router/moved_from_dead"] >= 1
    while engine.router.metrics()["router/servers_usable"] < 2:
        await asyncio.sleep(0.05)
    with engine.updating():
        pass
    told = await engine.publish()
    assert (told["engine/servers"], told["engine/restarts"], told["router/given_up"]) == (2, 1, 0)
    await engine.close()


async def test_a_server_that_is_lost_for_good_is_told_at_once(tmp_path: Path) -> None:
    server = own_server(tmp_path, [sys.executable, "-c", "print('no such device')"])
    engine = engine_over([server], tmp_path)
    await engine.start()
    kill(server)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"(?s)vllm-0 is lost after .*max_attempts=2 .*no such device"):
        await engine.generate([1], PARAMS)
    with pytest.raises(EngineError, match="is lost after"):
        await engine.generate([2], PARAMS)
    assert time.monotonic() - began < 15  # and not after give_up_after, or a health check
    await engine.close()


async def test_a_request_that_a_server_of_our_own_fails_names_its_log(tmp_path: Path) -> None:
    server = own_server(tmp_path)
    await server.up(str(tmp_path))
    kill(server)
    with pytest.raises(ReplicaGone, match=rf"its log is {tmp_path}/vllm-0\.log$"):
        await server.generate([1], PARAMS)
    await server.close()


async def test_one_attempt_that_fails_is_followed_by_the_next(tmp_path: Path) -> None:
    server = own_server(tmp_path)
    started, command = [], server._command

    def choose(folder: str, port: int) -> list[str]:
        started.append(folder)
        return [sys.executable, "-c", "print('no such device')"] if len(started) == 2 else command(folder, port)

    server._command = choose
    engine = engine_over([server], tmp_path)
    await engine.start()
    kill(server)
    assert len((await engine.generate([1], PARAMS)).ids) == 20
    assert (len(started), engine.restarts) == (3, 1)
    await engine.close()


async def test_one_that_does_not_take_the_weights_is_ended_before_the_next_attempt(tmp_path: Path) -> None:
    server, wrong = own_server(tmp_path), [False]

    def forward(ids: Sequence[int]) -> torch.Tensor:
        return RULED.forward([token + 1 for token in ids] if wrong[0] else ids)

    settings = replace(PLAIN, max_restarts=1)
    engine = engine_over([server], tmp_path, settings, replace(RULED, forward=forward))
    await engine.start()
    wrong[0] = True
    kill(server)
    with pytest.raises(EngineError, match=r"is lost after .*max_attempts=1 .*does not sample from the weights"):
        await engine.generate([1], PARAMS)
    assert not server.alive
    with pytest.raises(EngineError, match="vllm-0 cannot be reached"):
        await engine.publish()
    await engine.close()


async def test_a_server_that_starts_during_an_update_gets_the_published_weights(tmp_path: Path) -> None:
    offset, server = [0], own_server(tmp_path)

    def moved(ids: Sequence[int]) -> torch.Tensor:
        """The trainer's logits, which are the server's only if it has the trainer's current weights."""
        held = server.version if server.version is not None else -1
        return RULED.forward(ids) if held == offset[0] else RULED.forward([token + 1 for token in ids])

    engine = engine_over([server], tmp_path, oracle=replace(RULED, forward=moved))
    up = server.up

    async def up_meanwhile(folder: str) -> None:
        await up(folder)
        if not offset[0]:
            with engine.updating():  # the trainer continues, and publishes later
                offset[0] += 1

    await engine.start()
    server.up = up_meanwhile  # type: ignore[method-assign]
    kill(server)
    assert (await engine.generate([1], PARAMS)).spans[0].version == 0
    assert engine.restarts == 1 and Path(await engine.weights.folder()).name == "0"
    await engine.publish()
    assert (await engine.generate([1], PARAMS)).spans[0].version == 1
    await engine.close()


async def test_during_an_update_servers_are_compared_with_what_the_trainer_computed_before(tmp_path: Path) -> None:
    async with FakeServer("vllm") as fake:
        engine = engine_over([ServerReplica(fake.url, Vllm())], tmp_path)
        await engine.start()
        with engine.updating():
            await engine.verify()  # the trainer's weights are changing, and nothing is computed with them
            known = engine.oracle.forward(engine.oracle.prompt())
            assert len(known) == len(engine.oracle.prompt())
            assert len(engine.oracle.forward([*engine.oracle.prompt(), VOCABULARY - 1, 0])) == len(known)
            fake._next = lambda *_: (1, -0.3)  # type: ignore[method-assign]  # someone else replaced its weights
            with pytest.raises(EngineError, match="does not sample from the weights of version 0"):
                await engine.verify()
        await engine.close()


@pytest.mark.drill("reliability", "A rollout server dies again and again", "The run stops and names the server's log")
async def test_a_server_that_dies_too_often_is_given_up(tmp_path: Path) -> None:
    server = own_server(tmp_path)
    engine = engine_over([server], tmp_path, replace(PLAIN, max_restarts=1))
    await engine.start()
    kill(server)
    await engine.generate([1], PARAMS)
    kill(server)
    with pytest.raises(EngineError, match=r"rollout\.server\.max_attempts=1 attempts .* it died"):
        await engine.generate([1], PARAMS)
    await engine.close()


async def test_those_who_wait_are_told_when_the_engine_closes(tmp_path: Path) -> None:
    async with FakeServer("vllm") as fake:
        engine = engine_over([ServerReplica(fake.url, Vllm())], tmp_path)
        assert isinstance(engine, LockstepEngine)
        await engine.start()
        engine.router.pause(fake.url)
        waits = asyncio.create_task(engine.generate([1], PARAMS))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineError, match="closed while this request waited"):
            await waits


@pytest.mark.parametrize("name", DIALECTS)
async def test_servers_on_the_trainers_gpu_sleep_during_the_update(name: str, tmp_path: Path) -> None:
    model = make_model(seed=0)
    async with FakeServer(name, make_model(seed=1)) as fake:
        engine = RemoteEngine(
            [ServerReplica(fake.url, DIALECTS[name]())],
            WeightFiles(model.save_pretrained, tmp_path),
            oracle_of(model),
            replace(SETTINGS, sleeps=True),
        )
        await engine.start()
        await engine.generate([1, 2], SamplingParams(max_tokens=3))
        fake.log.clear()
        await engine.rest()
        assert fake.asleep == {"weights", "kv_cache"}
        with engine.updating():
            waits = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=3)))
            await asyncio.sleep(0.05)
        told = await engine.publish()
        assert (await waits).spans[0].version == 1 and told["engine/canary_difference"] < 1e-4
        assert told["router/failed_tries"] == 0 and not fake.asleep
        paths = [path for path, _ in fake.log if path not in ("/health", "/resume", "/continue_generation")]
        assert paths == ORDER[name]
        await engine.close()


ORDER = {
    "vllm": [
        "/inference/v1/generate",  # the canary: it still has the run's weights
        "/sleep?level=2",
        "/wake_up?tags=weights",
        "/collective_rpc",
        "/update_weight_version",
        "/wake_up?tags=kv_cache",
        "/inference/v1/generate",  # the canary, and only then the waiting requests
        "/inference/v1/generate",
    ],
    "sglang": [
        "/generate",
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/resume_memory_occupation",
        "/generate",
        "/generate",
    ],
}


async def test_an_update_that_fails_leaves_servers_asleep_and_the_run_ends(tmp_path: Path) -> None:
    async with FakeServer("vllm") as fake:
        engine = engine_over([ServerReplica(fake.url, Vllm())], tmp_path, replace(PLAIN, sleeps=True))
        await engine.start()
        await engine.rest()
        with pytest.raises(ZeroDivisionError), engine.updating():
            raise ZeroDivisionError
        assert engine.weight_version == 0 and fake.asleep, "nothing was published"
        waits = asyncio.create_task(engine.generate([1], PARAMS))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await waits
        assert [path for path, _ in fake.log if path != "/health"][-1] == "/sleep?level=2"


async def test_a_server_that_dies_when_it_should_sleep_is_back_after_the_update(tmp_path: Path) -> None:
    server = own_server(tmp_path)
    engine = engine_over([server], tmp_path, replace(PLAIN, sleeps=True))
    await engine.start()
    kill(server)
    await engine.rest()
    with engine.updating():
        pass
    await engine.publish()
    generation = await engine.generate([1], PARAMS)
    assert ([span.version for span in generation.spans], engine.restarts) == ([1], 1)
    await engine.close()


async def test_a_watcher_that_fails_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = own_server(tmp_path)
    engine = engine_over([server], tmp_path)
    await engine.start()
    monkeypatch.setattr(server, "_command", lambda folder, port: 1 / 0)
    kill(server)
    with pytest.raises(EngineError, match="could not be started again: ZeroDivisionError"):
        await engine.generate([1], PARAMS)
    await engine.close()


async def test_a_server_that_cannot_sleep_gets_no_requests(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeServer("vllm")) for _ in range(2)]
        engine = engine_over([ServerReplica(f.url, Vllm()) for f in fakes], tmp_path, replace(PLAIN, sleeps=True))
        await engine.start()
        fakes[0].sleepless = True
        await engine.rest()
        with engine.updating():
            pass
        assert (await engine.publish())["engine/servers"] == 2  # it still loads the weights, and is back
        fakes[1].sleepless = True
        with pytest.raises(EngineError, match=r"/sleep.* \(500\)"):
            await engine.rest()
        await engine.close()
