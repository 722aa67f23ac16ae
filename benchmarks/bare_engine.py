"""Runs a workload on a server's own engine in this process, without HTTP, and prints how long it took.

    PYTHON -m benchmarks.bare_engine vllm MODEL_FOLDER multi-256 [--running 256] [--shrink 1]

PYTHON is the interpreter that has the engine installed; `benchmarks.servers` starts it. The last line of the output is
JSON. The weights are random, with the sizes of the folder, which does not change the engine's speed. The workload runs
once to warm up before it is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from benchmarks.rollout_engines import ENGINES, Shape
from benchmarks.rollout_workloads import Workload


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_engine", description="An engine without HTTP.")
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("model", help="a folder with a config.json")
    parser.add_argument("workload", help="such as multi-256")
    parser.add_argument("--running", type=int, default=256, help="requests that may run at once")
    parser.add_argument("--shrink", type=int, default=1, help="divides lengths and numbers, to try the script")
    options = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(measure(options))), flush=True)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(options.model, AutoConfig.from_pretrained(options.model))
    workload = Workload.named(options.workload).shortened(options.shrink)
    engine = ENGINES[options.engine](shape, workload.longest, options.running)
    await engine.play(workload, seed=-1)
    played = await engine.play(workload, seed=0)
    await engine.close()
    return {"seconds": played.seconds, "samples_per_second": workload.conversations / played.seconds}


if __name__ == "__main__":
    main()
