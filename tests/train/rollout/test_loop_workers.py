"""Jobs that loop workers play: every job ends once, whoever dies; strangers are refused."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import family
from train_cases import TASK
from vision_cases import make_image

from rally.distributed.loop_worker import HEARTBEAT_SECONDS, Heartbeat
from rally.loops import Job
from rally.nodes import LOCAL, LocalNode
from rally.train.rollout import loop_workers
from rally.train.rollout.loop_workers import LoopWorkerError, LoopWorkerPool, LoopWorkerSettings
from rally.types import SamplingParams, StopReason, Task
from rally.util.subprocesses import ServerProcess

# A worker that answers every job, except those whose seed it is told to die of or to keep.
WORKER = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from rally.util.frames import read_frame, write_frame

async def beat(host, port, hello, blocked):
    reader, writer = await asyncio.open_connection(host, port)
    write_frame(writer, dict(hello, heartbeat=True))
    while True:
        write_frame(writer, dict(blocked=blocked))
        await asyncio.sleep(0.1)

async def main():
    host, _, port = sys.argv[1].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = dict(worker=int(sys.argv[2]), token=os.environ["RALLY_LOOP_WORKER_TOKEN"])
    write_frame(writer, hello)
    plan = (await read_frame(reader))["plan"]
    heart = asyncio.create_task(beat(host, int(port), hello, plan["blocked"]))
    write_frame(writer, dict(ready=True))
    servers = None
    waiting = None
    while True:
        message = await read_frame(reader)
        servers = message.get("servers", servers)
        if "refresh" in message:
            message = waiting
        if "job" not in message:
            continue
        job = message["job"]
        dies = job["seed"] == plan["deadly"] or (job["seed"] == 7 and not os.path.exists(plan["once"]))
        if dies:
            open(plan["once"], "a").close()
            os._exit(1)
        if job["seed"] == plan["kept"]:
            continue
        if job["seed"] == 17 and waiting is None:
            waiting = message
            write_frame(writer, dict(refresh=5))
            continue
        episode = dict(
            id=job["episode_id"], task=job["task"], group=job["group"], stop_reason="stop", turns=[],
            segments=[dict(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0], spans=[])],
            reward=0.5, extra=dict(worker=int(sys.argv[2]), servers=servers, left=message["seconds_left"]),
        )
        totals = dict(counts=dict(requests=2, kept=1, moved_from_busy=1), busy_seconds=1.5)
        answer = dict(error="no") if job["seed"] == 13 else dict(episode=episode)
        write_frame(writer, dict(number=message["number"], **answer, **totals))

asyncio.run(main())
"""


class Servers:
    def __init__(self) -> None:
        self.version, self.servers = 1, 1

    def describe_servers(self) -> dict[str, Any]:
        return {"version": self.version, "servers": [{}] * self.servers}


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fake_loop_worker.py"
    program.write_text(WORKER.format(root=str(Path(__file__).parents[3])))
    real = LOCAL.launch

    def launch(command: list[str], environment: dict[str, str], log: Path) -> Any:
        return real([sys.executable, "-I", str(program), *command[3:]], environment, log)

    monkeypatch.setattr(type(LOCAL), "launch", lambda self, *args: launch(*args))
    monkeypatch.setattr(loop_workers, "POLL_SECONDS", 0.05)


@asynccontextmanager
async def pool_of(
    tmp_path: Path, count: int = 2, max_jobs: int = 4, heartbeat: float = 60.0, **plan: Any
) -> AsyncIterator[LoopWorkerPool]:
    given = {"deadly": -1, "kept": -1, "once": str(tmp_path / "once"), "blocked": 0.0, **plan}
    settings = LoopWorkerSettings(count=count, max_jobs=max_jobs, plan=given, run=tmp_path, heartbeat_seconds=heartbeat)
    pool = LoopWorkerPool(settings, [LOCAL], Servers())
    pool.start()
    try:
        await until(lambda: all(worker.writer is not None for worker in pool._workers))
        yield pool
    finally:
        await asyncio.to_thread(pool.close)


def job(seed: int, task: Task = TASK) -> Job:
    return Job(task=task, episode_id=f"e{seed}", group=f"g{seed // 4}", seed=seed)


async def play(pool: LoopWorkerPool, seed: int, **given: Any) -> Any:
    return await pool.play(job(seed, **given), SamplingParams(temperature=0.5, stop=("x",)), None)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def test_jobs_are_shared_and_each_ends_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        episodes = await asyncio.gather(*(play(pool, seed) for seed in range(20, 60)))
        assert [e.id for e in episodes] == [f"e{seed}" for seed in range(20, 60)]
        assert {e.extra["worker"] for e in episodes} == {0, 1} and all(e.reward == 0.5 for e in episodes)
        assert episodes[0].task == TASK and episodes[0].stop_reason is StopReason.STOP
        lap = pool.lap()
        assert lap["router/requests"] == 4 and lap["router/kept_rate"] == 0.5 and lap["rollout/loop_workers"] == 2
        assert pool.lap()["router/requests"] == 0 and pool.busy_seconds == 1.5


async def test_workers_learn_of_changed_servers_before_the_next_job(tmp_path: Path) -> None:
    async with pool_of(tmp_path, count=1) as pool:
        assert (await play(pool, 1)).extra["servers"]["version"] == 1
        pool._servers.version = 2  # type: ignore[attr-defined]
        assert (await play(pool, 2)).extra["servers"]["version"] == 2
        late = await pool.play(job(3), SamplingParams(), asyncio.get_running_loop().time() + 1000)
        assert late.extra["left"] > 0
        assert (await play(pool, 17)).extra["servers"]["version"] == 2, "it is told again if it asks, changed or not"


@pytest.mark.drill("reliability", "A loop worker dies", "Its episodes are played again by another; no group is lost")
async def test_the_jobs_of_a_dead_worker_are_played_again(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        episodes = await asyncio.gather(*(play(pool, seed) for seed in range(12)))
        assert [e.id for e in episodes] == [f"e{seed}" for seed in range(12)] and (tmp_path / "once").exists()
        await until(lambda: pool.restarts == 1)


@pytest.mark.drill("reliability", "A loop worker hangs", "It is ended and started again; no group is lost")
async def test_the_jobs_of_a_worker_that_hangs_are_played_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool_of(tmp_path, heartbeat=2.0) as pool:
        await asyncio.gather(*(play(pool, seed) for seed in range(40, 48)))
        process = pool._workers[0].process
        assert isinstance(process, ServerProcess)
        [guard, *hung] = family(process.pid)
        for pid in hung:
            os.kill(pid, signal.SIGSTOP)
        episodes = await asyncio.gather(*(play(pool, seed) for seed in range(20, 28)))
        assert [e.id for e in episodes] == [f"e{seed}" for seed in range(20, 28)]
        await until(lambda: pool.restarts >= 1 and pool._workers[0].writer is not None)
        assert "loop worker 0 has not responded for" in caplog.text
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (guard, *hung)))
        await asyncio.gather(*(play(pool, seed) for seed in range(40, 48)))
        assert pool.busy_seconds == 3.0, "it counts on from what the worker had"


async def test_a_blocked_worker_is_reported_and_later_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(tmp_path, count=1, heartbeat=5.0, blocked=6.0) as pool:
        await until(
            lambda: "has been blocked for 6 s by code of a loop, tool or reward that does not await" in caplog.text
        )
        assert pool.restarts == 0, "slow is not hung"
    async with pool_of(tmp_path, count=1, blocked=301.0) as pool:
        await until(lambda: pool.restarts >= 1)
        assert "was blocked for 301 s by code that does not await and is started again" in caplog.text


async def test_a_worker_beats_also_while_its_event_loop_is_blocked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        Heartbeat("127.0.0.1", server.getsockname()[1], {"worker": 3, "token": "t"}).started()
        connection, _ = server.accept()
    with connection, connection.makefile("rb") as stream:

        def read() -> dict[str, Any]:
            return json.loads(stream.read(int.from_bytes(stream.read(4), "big")))

        assert read() == {"worker": 3, "token": "t", "heartbeat": True}
        beats = [read()["blocked"] for _ in range(5)]  # reads block the event loop
        assert beats == sorted(beats) and beats[-1] > beats[1] > 0
        await asyncio.sleep(2.1 * HEARTBEAT_SECONDS)
        while beats[-1]:  # those that were sent before
            beats.append((await asyncio.to_thread(read))["blocked"])


async def test_no_job_waits_for_workers_that_are_gone(tmp_path: Path) -> None:
    async with pool_of(tmp_path, count=1) as pool:
        pass
    with pytest.raises(LoopWorkerError, match="the loop workers were stopped"):
        await play(pool, 1)

    class Elsewhere(LocalNode):
        address = "192.0.2.1"  # none of this machine

    settings = LoopWorkerSettings(count=1, max_jobs=1, plan={}, run=tmp_path)
    pool = LoopWorkerPool(settings, [Elsewhere()], Servers())
    early = asyncio.create_task(play(pool, 2))
    await asyncio.sleep(0)
    pool.start()
    for playing in (early, play(pool, 3)):
        with pytest.raises(LoopWorkerError, match="the loop workers failed: OSError"):
            await playing


async def test_a_job_that_kills_every_worker_is_named(tmp_path: Path) -> None:
    async with pool_of(tmp_path, deadly=5) as pool:
        with pytest.raises(
            LoopWorkerError, match=r"episode e5 was with 3 loop workers, and each of them died or hung; see "
        ):
            await play(pool, 5)


async def test_errors_and_cancelled_jobs(tmp_path: Path) -> None:
    async with pool_of(tmp_path, count=1, max_jobs=1, kept=9) as pool:
        with pytest.raises(LoopWorkerError, match=r"^no$"):
            await play(pool, 13)
        kept = asyncio.create_task(play(pool, 9))
        waiting = asyncio.create_task(play(pool, 10))
        await until(lambda: bool(pool._workers[0].jobs) and bool(pool._waiting))
        assert len(pool._workers[0].jobs) == 1, "the other one waits here"
        kept.cancel()
        assert (await waiting).id == "e10"
        picture = Task(**{**vars(TASK), "extra_info": {"deep": [{"thing": object()}]}})
        with pytest.raises(LoopWorkerError, match=r"holds a builtins.object, which cannot be sent to a loop worker"):
            await play(pool, 1, task=picture)


async def test_a_server_that_joins_gets_further_jobs(tmp_path: Path) -> None:
    async with pool_of(tmp_path, count=1, max_jobs=1, kept=9) as pool:
        kept, waiting = (asyncio.create_task(play(pool, seed)) for seed in (9, 10))
        await until(lambda: bool(pool._workers[0].jobs) and bool(pool._waiting))
        pool._servers.servers = 2  # type: ignore[attr-defined]
        assert (await asyncio.wait_for(waiting, 30)).id == "e10"
        kept.cancel()


async def test_images_of_a_row_travel_as_files_of_the_run(tmp_path: Path) -> None:
    image = make_image(3)
    shown = replace(TASK, prompt=({"role": "user", "content": [{"type": "image", "image": image}]},))
    async with pool_of(tmp_path, count=1) as pool:
        several = await asyncio.gather(*(play(pool, seed, task=shown) for seed in range(1, 5)))
        for episode in several:
            found = episode.task.prompt[0]["content"][0]["image"]
            assert found == image and found.path == str(tmp_path / f"images/{image.hash}.png")
            assert found.read() == image.read()
        elsewhere = replace(TASK, extra_info={"picture": image})
        with pytest.raises(LoopWorkerError, match="holds a picture, which cannot be sent"):
            await play(pool, 1, task=elsewhere)
    assert [file.name for file in (tmp_path / "images").iterdir()] == [f"{image.hash}.png"]


@pytest.mark.drill("security", "A stranger connects as a loop worker", "It lacks the token and gets nothing")
async def test_a_stranger_is_no_worker(tmp_path: Path) -> None:
    async with pool_of(tmp_path, count=1) as pool:
        await play(pool, 1)
        host, _, port = pool._address.rpartition(":")
        for hello in (b'{"worker": 0, "token": "guess"}', b"[]", b"{", json.dumps({"worker": -5}).encode()):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(len(hello).to_bytes(4, "big") + hello)
            assert await reader.read() == b"", "it is hung up on"
            writer.close()
        assert (await play(pool, 2)).id == "e2"
