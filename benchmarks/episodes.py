"""Runs 2,000 episodes at once, each calling a tool that sleeps 0.1 to 2 s, and measures the overhead of Rally's code.

    OMP_NUM_THREADS=1 python -m benchmarks.episodes [--episodes N] [--turns N] [--repetitions N] [--limited] [--plain]

It uses the real tool loop, runner, codec and tool session. The engine returns prepared text at once, so that nothing
else is measured. Sleeps are drawn by (episode, turn), so the slowest chain is known beforehand. `--limited` sends the
calls through a rate limiter that never limits, `--plain` sleeps in threads, as a tool that is no coroutine does. Memory
is that of the process after each repetition. Exit status 1: more than 15 % over the slowest chain, or memory not
flat.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rally.chat import ChatCodec, tiny_tokenizer
from rally.loops import Job, LoopSettings, Runner
from rally.runs.train import frozen_gc
from rally.tools import CallLimits, FunctionTool, ToolBox, ToolLimits, function_tool
from rally.types import Generation, SamplingParams, StopReason, Task

OVER = 1.15
GROWTH_MB = 8.0  # after the first repetition, which fills caches and allocator pools
SLEEP = (0.1, 2.0)
GROUP = 8


def seconds_of(episode: int, turn: int) -> float:
    return random.Random(f"{episode}/{turn}").uniform(*SLEEP)


def make_tool(*, plain: bool) -> FunctionTool:
    async def rest(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"

    def rest_in_thread(seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    return function_tool(name="rest")(rest_in_thread if plain else rest)


@dataclass
class PreparedEngine:
    """Returns the prepared calls of each episode, then a final text; takes no time."""

    replies: dict[str, list[tuple[int, ...]]]
    weight_version: int = 0
    max_model_len: int = 4096
    said: dict[str, int] = field(default_factory=dict)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        assert session is not None
        turn = self.said.get(session, 0)
        self.said[session] = turn + 1
        ids = self.replies[session][turn]
        return Generation(ids=ids, logprobs=(-1.0,) * len(ids), finish="stop")

    async def close(self) -> None:
        """Nothing to stop."""


def prepared(codec: ChatCodec, episodes: int, turns: int) -> dict[str, list[tuple[int, ...]]]:
    def call(episode: int, turn: int) -> tuple[int, ...]:
        function = {"name": "rest", "arguments": {"seconds": round(seconds_of(episode, turn), 4)}}
        return codec.encode_assistant(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )

    end = codec.encode_assistant({"role": "assistant", "content": "#### 1"})
    return {f"e{e}": [*(call(e, turn) for turn in range(turns)), end] for e in range(episodes)}


def make_jobs(episodes: int) -> list[Job]:
    """Jobs as in training: groups share a prompt, and one episode of each is compared with the full rendering."""

    def job(i: int) -> Job:
        row = i // GROUP
        task = Task(id=str(row), data_source="rest", prompt=({"role": "user", "content": f"What is {row}+1?"},))
        return Job(task=task, episode_id=f"e{i}", group=str(row), seed=i, check_tokens=i % GROUP == 0)

    return [job(i) for i in range(episodes)]


@dataclass(frozen=True)
class Repetition:
    wall: float
    cpu: float
    resident_mb: float


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def repeat(runner: Runner, jobs: Sequence[Job], turns: int) -> Repetition:
    engine = runner.engine
    assert isinstance(engine, PreparedEngine)
    engine.said.clear()
    gc.collect()
    cpu, began = time.process_time(), time.perf_counter()
    sampling = SamplingParams(max_tokens=256, stop_ids=runner.codec.stop_ids)
    episodes = asyncio.run(runner.run(jobs, sampling))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert all(e.stop_reason is StopReason.STOP and len(e.tool_results) == turns for e in episodes)
    assert all(r.ok for e in episodes for r in e.tool_results)
    del episodes
    gc.collect()
    return Repetition(wall, cpu, resident_mb())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--limited", action="store_true")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    tool = make_tool(plain=given.plain)
    if given.limited:
        tool.limits = CallLimits(max_concurrency=given.episodes, rate_limit=1e6, max_queue=given.episodes)
    toolbox = ToolBox([tool], ToolLimits(timeout=30.0))
    codec = ChatCodec(tiny_tokenizer(), "hermes", toolbox.schemas())
    runner = Runner(
        engine=PreparedEngine(prepared(codec, given.episodes, given.turns)),
        codec=codec,
        toolbox=toolbox,
        settings=LoopSettings(response_length=2048, max_repeated_calls=0),
        default_loop="tool_agent",
    )
    jobs = make_jobs(given.episodes)
    chains = [sum(seconds_of(e, turn) for turn in range(given.turns)) for e in range(given.episodes)]
    print(f"{given.episodes} episodes of {given.turns} calls, slowest chain {max(chains):.2f} s")
    done: list[Repetition] = []
    with frozen_gc():
        for number in range(1, given.repetitions + 1):
            one = repeat(runner, jobs, given.turns)
            done.append(one)
            turn = 1e6 * one.cpu / given.episodes / (given.turns + 1)
            print(
                f"{number}: {one.wall:.2f} s, {one.wall / max(chains):.3f} of the slowest chain, "
                f"processor {one.cpu:.2f} s ({turn:.0f} us a turn), {one.resident_mb:.1f} MB"
            )
    slow = sorted(one.wall for one in done)[len(done) // 2] > OVER * max(chains)
    grown = done[-1].resident_mb - done[min(1, len(done) - 1)].resident_mb > GROWTH_MB
    sys.exit(1 if slow or grown else 0)


if __name__ == "__main__":
    main()
