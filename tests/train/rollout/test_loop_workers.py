"""Jobs that loop workers play: every job ends once, whoever dies; strangers are refused."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from train_cases import TASK

from rally.loops import Job
from rally.nodes import LOCAL
from rally.train.rollout import loop_workers
from rally.train.rollout.loop_workers import LoopWorkerError, LoopWorkerPool, LoopWorkerSettings
from rally.types import SamplingParams, StopReason, Task

# A worker that answers every job, except those whose seed it is told to die of or to keep.
WORKER = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from rally.util.frames import read_frame, write_frame

async def main():
    host, _, port = sys.argv[1].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    write_frame(writer, dict(worker=int(sys.argv[2]), token=os.environ["RALLY_LOOP_WORKER_TOKEN"]))
    plan = (await read_frame(reader))["plan"]
    write_frame(writer, dict(ready=True))
    servers = None
    while True:
        message = await read_frame(reader)
        servers = message.get("servers", servers)
        if "job" not in message:
            continue
        job = message["job"]
        dies = job["seed"] == plan["deadly"] or (job["seed"] == 7 and not os.path.exists(plan["once"]))
        if dies:
            open(plan["once"], "a").close()
            os._exit(1)
        if job["seed"] == plan["kept"]:
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
        self.version = 1

    def describe_servers(self) -> dict[str, Any]:
        return {"version": self.version, "servers": []}


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
async def pool_of(tmp_path: Path, count: int = 2, max_jobs: int = 4, **plan: Any) -> AsyncIterator[LoopWorkerPool]:
    given = {"deadly": -1, "kept": -1, "once": str(tmp_path / "once"), **plan}
    settings = LoopWorkerSettings(count=count, max_jobs=max_jobs, plan=given, logs=tmp_path / "logs")
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


@pytest.mark.drill("reliability", "A loop worker dies", "Its episodes are played again by another; no group is lost")
async def test_the_jobs_of_a_dead_worker_are_played_again(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        episodes = await asyncio.gather(*(play(pool, seed) for seed in range(12)))
        assert [e.id for e in episodes] == [f"e{seed}" for seed in range(12)] and (tmp_path / "once").exists()
        await until(lambda: pool.restarts == 1)


async def test_a_job_that_kills_every_worker_is_named(tmp_path: Path) -> None:
    async with pool_of(tmp_path, deadly=5) as pool:
        with pytest.raises(LoopWorkerError, match=r"episode e5 was with 3 loop workers, and each of them died; see "):
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
