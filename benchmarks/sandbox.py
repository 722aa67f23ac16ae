"""Measures the cost of isolation: print(1) in the sandbox against bare python3, alternating in one run.

    python -m benchmarks.sandbox [--repeats 5] [--runs 40]

Machines are noisy, so the ratio to bare python3 means more than the milliseconds. The last rows are for code that needs
numpy and sympy, which the sandbox has already imported and python3 must import.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rally.sandbox import Program, Sandbox, SandboxSettings

CODE = "print(1)"
HEAVY = "import numpy, sympy\nprint(sympy.integrate(sympy.Symbol('x')))"
Run = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Measured:
    median_ms: float
    p95_ms: float
    per_second: float


async def measured(run: Run, runs: int, at_once: int) -> Measured:
    """Latency one at a time, then throughput with `at_once` in flight."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        await run()
        seconds.append(time.perf_counter() - started)
    gate = asyncio.Semaphore(at_once)

    async def gated() -> None:
        async with gate:
            await run()

    started = time.perf_counter()
    await asyncio.gather(*(gated() for _ in range(2 * runs)))
    rate = 2 * runs / (time.perf_counter() - started)
    return Measured(statistics.median(seconds) * 1e3, sorted(seconds)[int(0.95 * runs)] * 1e3, rate)


def in_sandbox(sandbox: Sandbox, code: str) -> Run:
    async def run() -> None:
        outcome = await sandbox.run(Program(code=code, timeout=60.0))
        assert outcome.ok, outcome

    return run


def bare(code: str) -> Run:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await process.communicate()
        assert process.returncode == 0

    return run


async def compare(name: str, code: str, sandbox: Sandbox, repeats: int, runs: int, at_once: int) -> None:
    rounds = []
    for _ in range(repeats):
        ours = await measured(in_sandbox(sandbox, code), runs, at_once)
        theirs = await measured(bare(code), runs, at_once)
        rounds.append((ours, theirs))
    for label, index in (("sandbox", 0), ("python3", 1)):
        row = [pair[index] for pair in rounds]
        best = Measured(min(r.median_ms for r in row), min(r.p95_ms for r in row), max(r.per_second for r in row))
        middle = statistics.median(r.median_ms for r in row)
        numbers = f"median {middle:7.1f} ms, best round {best.median_ms:6.1f} ms, {best.per_second:6.1f}/s"
        print(f"{name:14} {label:8} {numbers}")
    latency = statistics.median(ours.median_ms / theirs.median_ms for ours, theirs in rounds)
    rate = statistics.median(ours.per_second / theirs.per_second for ours, theirs in rounds)
    print(f"{name:14} ratio    latency {latency:.2f}, throughput {rate:.2f}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", type=int, default=40)
    arguments = parser.parse_args()
    at_once = 2 * (os.cpu_count() or 1)
    load = os.getloadavg()[0]
    async with Sandbox(SandboxSettings(max_concurrent=at_once)) as sandbox:
        level = await sandbox.start()
        print(f"isolation {level}, {os.cpu_count()} cores, load {load:.1f} before the start, {at_once} at once")
        await compare("print(1)", CODE, sandbox, arguments.repeats, arguments.runs, at_once)
        await compare("sympy", HEAVY, sandbox, 1, 3, at_once)


if __name__ == "__main__":
    asyncio.run(main())
