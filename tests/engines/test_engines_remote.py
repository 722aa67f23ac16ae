"""The engine over servers: weights reach them all, a canary hears it when they do not, and the dead are replaced."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import fake_server
import pytest
from fake_server import FakeServer
from remote_cases import SETTINGS, change, oracle_of, ruled
from small_models import VOCABULARY, full_logprobs, make_model
from transformers import PreTrainedModel

from rally.engines import Engine, EngineError
from rally.engines.base import ReplicaGone
from rally.engines.remote import (
    CanaryError,
    ClientSettings,
    LaunchedServer,
    Oracle,
    RemoteEngine,
    ServerReplica,
    Sglang,
    Vllm,
    WeightFiles,
    launched_server,
    remove_stale_folders,
)
from rally.engines.remote.launched_server import reserve_port
from rally.types import SamplingParams
from rally.util import subprocesses
from rally.util.subprocesses import ServerProcess

PARAMS = SamplingParams(max_tokens=8, seed=5, temperature=0.8)


def engine_over(servers: Sequence[ServerReplica], model: PreTrainedModel, room: Path) -> RemoteEngine:
    return RemoteEngine(servers, WeightFiles(model.save_pretrained, room), oracle_of(model), SETTINGS)


async def test_every_server_follows_the_trainer(tmp_path: Path) -> None:
    model = make_model(seed=0)
    async with FakeServer("vllm", make_model(seed=1)) as one, FakeServer("sglang", make_model(seed=2)) as two:
        servers = [ServerReplica(one.url, Vllm()), ServerReplica(two.url, Sglang())]
        engine = engine_over(servers, model, tmp_path)
        assert isinstance(engine, Engine)
        engine.begin_at(4)
        await engine.start()
        for version in (4, 5):
            for server in servers:
                sampled = await server.generate([1, 2, 3], PARAMS)
                expected = full_logprobs(model, [1, 2, 3, *sampled.ids], 3, PARAMS.temperature)
                assert sampled.logprobs == pytest.approx(expected, abs=1e-4)
                assert [span.version for span in sampled.spans] == [version]
            if version == 4:
                with engine.updating():
                    change(model)
                assert engine.weight_version == 4, "servers still have it"
                told = await engine.publish()
                assert engine.weight_version == 5
                assert told["engine/canary_difference"] < 1e-4 and told["engine/servers"] == 2
        assert len(list(tmp_path.glob("*/[0-9]*"))) == 1  # old weights do not pile up
        await engine.close()
        assert not list(tmp_path.iterdir())


async def test_the_canary_stops_a_run_whose_server_kept_its_weights(tmp_path: Path) -> None:
    model = make_model(seed=0)
    async with FakeServer("vllm", make_model(seed=0)) as fake:
        engine = engine_over([ServerReplica(fake.url, Vllm())], model, tmp_path)
        await engine.start()
        fake.stale = True
        with engine.updating():
            change(model)
        with pytest.raises(CanaryError, match=r"does not sample from the weights of version 1: .* token \d"):
            await engine.publish()
        await engine.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda fake: setattr(fake, "before_temperature", True), "before temperature 0.8"),
        (lambda fake: setattr(fake, "window", 32), "histories of 32 tokens, and this run needs 64"),
        (lambda fake: setattr(fake, "stale", True), "does the server run another model"),
        (lambda fake: setattr(fake, "refuses_weights", True), "out of memory"),
        (lambda fake: fake.faults.append("no logprobs"), "no log-probabilities"),
        (lambda fake: fake.faults.append("403"), "start vLLM with --enable-scale-out"),
    ],
)
async def test_the_probe_refuses_in_words(spoil: Callable[[FakeServer], None], words: str, tmp_path: Path) -> None:
    async with FakeServer("vllm", make_model(seed=1)) as fake:
        spoil(fake)
        engine = engine_over([ServerReplica(fake.url, Vllm())], make_model(seed=0), tmp_path)
        with pytest.raises(EngineError, match=words):
            await engine.start()
        await engine.close()


async def test_a_server_that_does_not_take_the_weights_is_left_out(tmp_path: Path) -> None:
    model = make_model(seed=0)
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeServer("vllm", make_model(seed=0))) for _ in range(2)]
        engine = engine_over([ServerReplica(fake.url, Vllm()) for fake in fakes], model, tmp_path)
        await engine.start()
        fakes[0].refuses_weights = True
        with engine.updating():
            change(model)
        assert (await engine.publish())["engine/servers"] == 1
        before = len(fakes[0].log)
        for number in range(4):
            await engine.generate([number + 1], PARAMS)
        assert len(fakes[0].log) == before
        fakes[0].refuses_weights, fakes[1].refuses_weights = False, True
        with engine.updating():
            change(model)
        assert (await engine.publish())["engine/servers"] == 1  # and it may come back
        fakes[0].refuses_weights = True
        with engine.updating():
            change(model)
        with pytest.raises(ReplicaGone, match="out of memory"):
            await engine.publish()
        await engine.close()


async def test_a_server_that_refuses_the_weights_is_left_out_and_a_busy_one_is_asked_again(tmp_path: Path) -> None:
    model = make_model(seed=0)
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeServer("vllm", make_model(seed=0))) for _ in range(2)]
        engine = engine_over([ServerReplica(fake.url, Vllm()) for fake in fakes], model, tmp_path)
        await engine.start()
        fakes[0].orders.extend([503, 429])
        fakes[0].faults.append("503")  # its canary
        fakes[1].orders.append(400)
        with engine.updating():
            change(model)
        assert (await engine.publish())["engine/servers"] == 1
        assert not fakes[0].orders and not fakes[0].faults
        assert (await engine.generate([1], PARAMS)).spans[0].version == 1
        for fake in fakes:
            fake.orders.append(400)
        with pytest.raises(EngineError, match=r"\(400\): .*as told"):
            await engine.publish()
        await engine.close()


def own_server(tmp_path: Path, folders: list[str]) -> LaunchedServer:
    def command(folder: str, port: int) -> list[str]:
        folders.append(folder)
        return [sys.executable, fake_server.__file__, "vllm", str(port)]

    return LaunchedServer(Vllm(), command, tmp_path / "vllm-0.log", settings=ClientSettings(start_seconds=120))


async def test_a_server_of_our_own_that_is_killed_is_started_again_with_the_new_weights(tmp_path: Path) -> None:
    folders: list[str] = []
    engine = RemoteEngine(
        [server := own_server(tmp_path, folders)],
        WeightFiles(lambda folder: folder.mkdir(), tmp_path),
        Oracle(forward=ruled, vocabulary=VOCABULARY, tolerance=1e-3),
        replace(SETTINGS, sampling=SamplingParams()),
    )
    await engine.start()
    with engine.updating():
        pass
    await engine.publish()

    assert server.process is not None
    first = await engine.generate([1, 2, 3], PARAMS)
    os.killpg(server.process.pid, signal.SIGKILL)
    again = await engine.generate([1, 2, 3], PARAMS)
    assert again.ids == first.ids
    assert [Path(folder).name for folder in folders] == ["0", "1"]  # it starts from the weights of the moment
    assert [span.version for span in again.spans] == [1]
    assert engine.restarts == 1
    pid = server.process.pid
    await engine.close()
    assert not _members(pid)


async def test_a_server_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    def command(folder: str, port: int) -> list[str]:
        return [sys.executable, "-c", "import sys; print('no such device'); sys.exit(3)"]

    server = LaunchedServer(Vllm(), command, tmp_path / "vllm-0.log")
    engine = engine_over([server], make_model(seed=0), tmp_path)
    with pytest.raises(ReplicaGone, match=r"(?s)vllm-0 ended .*vllm-0\.log .*no such device.*exit status 3"):
        await engine.start()
    await engine.close()


PARENT = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("process", sys.argv[2])  # alone: its package needs torch
process = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = process
spec.loader.exec_module(process)
child = process.ServerProcess(["sh", "-c", "sleep 1000 & sleep 1000"], {}, Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(1000)
"""


def test_a_server_dies_with_its_parent_even_by_kill_9(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log"), subprocesses.__file__], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    _wait_for(lambda: _members(pid) >= 3)
    parent.kill()
    parent.wait()
    _wait_for(lambda: _members(pid) == 0)


async def test_stopping_ends_all_that_a_server_started(tmp_path: Path) -> None:
    server = ServerProcess(["sh", "-c", "sleep 1000 & wait"], {}, tmp_path / "log")
    await asyncio.to_thread(_wait_for, lambda: _members(server.pid) >= 3)
    await server.stop()
    assert _members(server.pid) == 0 and not server.alive


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = reserve_port(None)
    second = reserve_port(first.number)  # as another run would: the first server has not opened its port yet
    assert second.number > first.number
    first.lock.release()
    again = reserve_port(first.number)
    assert again.number == first.number
    with socket.create_server(("127.0.0.1", 0)) as open_already:
        number = open_already.getsockname()[1]
        monkeypatch.setattr(launched_server, "PORTS", 1)
        with pytest.raises(EngineError, match=f"port_start={number}"):
            reserve_port(number)
    for port in (again, second):
        port.lock.release()
    assert not list(tmp_path.iterdir())


def test_no_two_servers_get_the_same_port_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = iter([40001, 40001, 40002])
    monkeypatch.setattr(launched_server, "_free_port", lambda port: port or next(given))
    reserved = [reserve_port(None) for _ in range(2)]
    assert [port.number for port in reserved] == [40001, 40002]
    for port in reserved:
        port.lock.release()


OWNER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
print(flush=True)
time.sleep(1000)
"""


def test_weights_of_programs_that_were_killed_are_swept(tmp_path: Path) -> None:
    mine, other = WeightFiles(Path.mkdir, tmp_path), tmp_path / "rally-weights-other"
    other.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(other / ".alive")], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline()
    remove_stale_folders(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    owner.kill()
    owner.wait()
    remove_stale_folders(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1 and not other.exists()
    mine.close()
    assert not list(tmp_path.iterdir())


def test_two_runs_may_sweep_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / f"rally-weights-{name}").mkdir()
    found = list(tmp_path.iterdir())
    monkeypatch.setattr(Path, "glob", lambda self, pattern: found)
    remove_stale_folders(tmp_path)
    remove_stale_folders(tmp_path)  # what the other one found is gone
    assert not list(tmp_path.iterdir())


def _members(group: int) -> int:
    """How many processes, zombies aside, belong to a process group."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        count += fields[2] == str(group) and fields[0] != "Z"
    return count


def _wait_for(happens: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
