"""The controller's CPU time per turn with loop workers: jobs out, episodes in, JSON both ways.

    python -m benchmarks.loop_workers [--workers 4] [--episodes 512] [--turns 8] [--tokens 300]

The workers are real processes that speak the real protocol, but answer at once with episodes of random tokens. So only
the cost of the controller is measured: encoding jobs, dispatching them, and decoding and checking episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rally.loops import Job
from rally.nodes import LOCAL, LocalNode
from rally.train.rollout.loop_workers import LoopWorkerPool, LoopWorkerSettings
from rally.types import SamplingParams, Task

WORKER = """
import asyncio, json, os, random, sys
from rally.util.frames import read_frame, write_frame

def episode(job, turns, tokens):
    rng = random.Random(job["seed"])
    count = turns * tokens
    told = [
        dict(role="assistant", text="x" * tokens, segment=0, start=i * tokens, end=(i + 1) * tokens,
             tool_calls=[], tool_results=[])
        for i in range(turns)
    ]
    segment = dict(
        prompt_ids=[rng.randrange(150000) for _ in range(500)],
        response_ids=[rng.randrange(150000) for _ in range(count)],
        response_mask=[1] * count,
        response_logprobs=[-rng.random() for _ in range(count)],
        spans=[[1, 0, count]],
    )
    return dict(id=job["episode_id"], task=job["task"], group=job["group"], stop_reason="stop", turns=told,
                segments=[segment], reward=0.5)

async def main():
    host, _, port = sys.argv[1].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    write_frame(writer, dict(worker=int(sys.argv[2]), token=os.environ["RALLY_LOOP_WORKER_TOKEN"]))
    plan = (await read_frame(reader))["plan"]
    write_frame(writer, dict(ready=True))
    while True:
        message = await read_frame(reader)
        if "job" in message:
            answer = dict(number=message["number"], episode=episode(message["job"], plan["turns"], plan["tokens"]))
            write_frame(writer, dict(answer, counts={}, busy_seconds=0.0))
            await writer.drain()

asyncio.run(main())
"""


class _Servers:
    def describe_servers(self) -> dict[str, Any]:
        return {"version": 1, "servers": []}


class _Node(LocalNode):
    """This machine, with the workers of this benchmark."""

    def launch(self, command: Any, environment: Any, log: Path) -> Any:
        return LOCAL.launch([sys.executable, "-c", WORKER, *command[3:]], environment, log)


class Cost(NamedTuple):
    """Of one turn."""

    cpu_ms: float  # of this process, the controller
    turns_per_second: float


def measure(workers: int, episodes: int, turns: int, tokens: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        plan = {"turns": turns, "tokens": tokens}
        settings = LoopWorkerSettings(
            count=workers, max_jobs=64, plan=plan, run=Path(folder), heartbeat_seconds=float("inf")
        )
        pool = LoopWorkerPool(settings, [_Node()], _Servers())
        pool.start()
        try:
            cpu, wall = asyncio.run(_play(pool, episodes))
        finally:
            pool.close()
    return Cost(1000 * cpu / (episodes * turns), episodes * turns / wall)


async def _play(pool: LoopWorkerPool, episodes: int) -> tuple[float, float]:
    """CPU and wall seconds of this process for so many episodes."""
    while any(worker.writer is None for worker in pool._workers):
        await asyncio.sleep(0.05)
    task = Task(id="row", data_source="benchmark", prompt=({"role": "user", "content": "x" * 2000},))
    jobs = [Job(task=task, episode_id=f"e{i}", group=f"g{i // 8}", seed=i) for i in range(episodes)]
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(pool.play(job, SamplingParams(), None) for job in jobs))
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("workers", 4), ("episodes", 512), ("turns", 8), ("tokens", 300)):
        options.add_argument(f"--{name}", type=int, default=value)
    args = options.parse_args()
    cost = measure(args.workers, args.episodes, args.turns, args.tokens)
    print(f"{args.workers} workers, {args.episodes} episodes of {args.turns} turns of {args.tokens} tokens")
    print(f"controller: {cost.cpu_ms:.3f} ms of CPU per turn; {cost.turns_per_second:,.0f} turns/s through it")


if __name__ == "__main__":
    main()
