"""Times rollout engines on the same conversations after a warm-up. Every ratio names what it is measured against.

    python -m benchmarks.rollout --engine embedded,hf --shape qwen2.5-1.5b --workloads single,multi-256,multi-1024
    python -m benchmarks.rollout --engine vllm --running 256,512 --out runs/vllm.md
    python -m benchmarks.rollout --engine embedded --workloads single --profile runs/profile.txt
    python -m benchmarks.rollout --engine embedded --quantization fp8 --mismatch

An engine that is not installed is named and skipped, and one that fails is named; the tables have what was measured
until then. `--shape tiny` divides all lengths and numbers by 16, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from transformers.utils.logging import disable_progress_bar

from benchmarks.report import Circumstances
from benchmarks.rollout_engines import (
    ENGINES,
    SHAPES,
    Contestant,
    Conversing,
    Embedded,
    Shape,
    forget_peak,
    missing,
    shape_named,
)
from benchmarks.rollout_workloads import Played, Workload, scripts
from rally.models.routing import Routing
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, micro_batches, pack
from rally.types import RallyError, SamplingParams

ELSEWHERE = "measured elsewhere on the same machine type on 2026-11-15"
PUBLISHED: dict[tuple[str, str], dict[str, float]] = {  # tokens/s for single, samples/s for multi-turn
    ("qwen2.5-1.5b", "single"): {
        "transformers generate": 2756,
        "transformers continuous batching": 1320,
        "vLLM 0.26.0": 13_646,
        "SGLang 0.5.16": 30_828,
    },
    ("qwen2.5-1.5b", "multi-256"): {"vLLM 0.26.0": 21.7, "SGLang 0.5.16": 39.7},
    ("qwen2.5-1.5b", "multi-1024"): {"SGLang 0.5.16": 50.8},
    ("smollm2-135m", "single"): {
        "transformers generate": 3047,
        "transformers continuous batching": 1588,
        "vLLM 0.26.0": 13_511,
    },
    ("smollm2-135m", "multi-256"): {"vLLM 0.26.0": 17.6},
}
PROFILED_STEPS = 20
PREFILL = 8192  # tokens of a step at most


MOST_WARM_UPS = 6


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One engine on one workload: the median of its repetitions."""

    engine: str
    running: int
    workload: Workload
    played: Played
    steps: int | None
    peak_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.played.sampled / self.played.seconds

    @property
    def samples_per_second(self) -> float:
        return self.workload.conversations / self.played.seconds

    @property
    def speed(self) -> float:
        """The number that ratios compare."""
        return self.tokens_per_second if self.workload.turns == 1 else self.samples_per_second


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description="Rollout engines, side by side.")
    parser.add_argument("--engine", default="embedded,hf", help=f"some of {','.join(ENGINES)}")
    parser.add_argument("--shape", default="qwen2.5-1.5b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--workloads", default="single,multi-256,multi-1024,multi-256-groups")
    parser.add_argument("--running", default="256", help="requests that may run at once; several: 256,512,1024")
    parser.add_argument("--repeat", type=int, default=1, help="timed repetitions, of which the median counts")
    parser.add_argument("--out", type=Path, help="a Markdown file for the tables")
    parser.add_argument("--profile", type=Path, help="a file for torch's profile of 20 decode steps of our engine")
    parser.add_argument("--mismatch", action="store_true", help="compare our engine with the training forward, too")
    parser.add_argument("--quantization", choices=["fp8"], help="of the linear layers of our engine")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    try:
        run(options)
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)


def run(options: argparse.Namespace) -> None:
    others = [name for name in options.engine.split(",") if not issubclass(ENGINES.get(name, Embedded), Embedded)]
    if options.quantization and others:
        raise RallyError(f"--quantization is for engines of Rally, not for {', '.join(others)}; leave them out")
    Embedded.quantization = options.quantization
    shape = shape_named(options.shape)
    workloads = [Workload.named(name).shortened(shape.shrink) for name in options.workloads.split(",")]
    circumstances = Circumstances()
    timings: list[Timing] = []
    failed = False
    for name in options.engine.split(","):
        if reason := missing(name):
            print(reason)
            continue
        conversing = issubclass(ENGINES[name], Conversing)
        played = workloads if conversing else [w for w in workloads if w.turns == 1]
        for running in sorted({int(n) for n in options.running.split(",")}) if conversing else [0]:
            forget_peak()
            try:
                asyncio.run(time_engine(name, shape, played, running, options, timings))
            except Exception as problem:  # noqa: BLE001 - whatever another engine raises, the others are measured
                print(f"{name} failed: {type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
                failed = True
    text = tables(timings, shape, circumstances)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    if failed:
        sys.exit(1)


async def time_engine(
    name: str,
    shape: Shape,
    workloads: Sequence[Workload],
    running: int,
    options: argparse.Namespace,
    timings: list[Timing],
) -> None:
    """Time one engine from start to end, and append what was measured. It stays in one event loop, since engines bind
    to the first they see."""
    if not workloads:
        return
    began = time.perf_counter()
    engine: Contestant = ENGINES[name](shape, max(w.longest for w in workloads), running)
    at_once = f" with {running} running" if running else ""
    print(f"{name}{at_once}: started in {time.perf_counter() - began:.1f} s", flush=True)
    try:
        for workload in workloads:
            print(f"  {workload.name}: {await warm_up(engine, workload)}", flush=True)
            timings.append(await time_workload(engine, workload, running, options.repeat))
            print(f"  {' | '.join(cells(timings[-1]))}", flush=True)
        if options.mismatch and isinstance(engine, Embedded):
            print(f"  {await mismatch(engine, workloads[0])}", flush=True)
        if options.profile and isinstance(engine, Embedded):
            options.profile.parent.mkdir(parents=True, exist_ok=True)
            file = options.profile.with_stem(f"{options.profile.stem}-{running}")
            file.write_text(await profile_decode(engine, max(workloads, key=lambda w: w.longest), running), "utf-8")
            print(f"  profile of {PROFILED_STEPS} decode steps: {file}")
    finally:
        await engine.close()


async def warm_up(engine: Contestant, workload: Workload) -> str:
    """Run until kernels are compiled and graphs captured for all sizes; each run meets other sizes."""
    began = time.perf_counter()
    for number in range(1, MOST_WARM_UPS + 1):
        before = engine.captured
        await engine.play(workload, seed=-number)
        new = engine.captured - before
        if number > 1 and new == 0:
            break
    return f"warmed up in {time.perf_counter() - began:.1f} s by {number} playings, {new} graphs captured in the last"


async def time_workload(engine: Contestant, workload: Workload, running: int, repeat: int) -> Timing:
    rounds: list[tuple[Played, int | None]] = []
    for seed in range(repeat):
        before = engine.steps
        played = await engine.play(workload, seed)
        after = engine.steps
        rounds.append((played, after - before if after is not None and before is not None else None))
    middle = statistics.median_low([played.seconds for played, _ in rounds])
    played, steps = next((p, s) for p, s in rounds if p.seconds == middle)
    return Timing(
        engine=engine.name,
        running=running,
        workload=workload,
        played=played,
        steps=steps,
        peak_bytes=engine.peak_bytes(),
    )


async def mismatch(engine: Embedded, workload: Workload, requests: int = 32) -> str:
    """How far the training forward is from the log-probabilities that the engine recorded, over whole rows."""
    few = [script.prompt for script in scripts(workload, engine.vocabulary, seed=-9)[:requests]]
    params = SamplingParams(temperature=1.0, max_tokens=workload.new, ignore_eos=True)
    replies = await asyncio.gather(*(engine.engine.generate(prompt, params) for prompt in few))
    rows = [
        Row(
            ids=(*prompt, *reply.ids),
            sampled=tuple(range(len(prompt), len(prompt) + len(reply.ids))),
            logprobs=reply.logprobs,
            episode=number,
            routes=reply.routes,
        )
        for number, (prompt, reply) in enumerate(zip(few, replies, strict=True))
    ]
    found = {"rollout": _differences(engine, rows, PREFILL, replay=False)}
    if rows[0].routes is not None:
        found["rollout, with its experts replayed"] = _differences(engine, rows, PREFILL, replay=True)
    # two forwards of the same rows that are packed differently: what rounding alone does
    found["itself, packed differently"] = found["rollout"] - _differences(engine, rows, 1, replay=False)
    return "\n  ".join(
        f"training forward against {name}, {len(off):,} tokens: k3 {float((off.exp() - 1 - off).mean()):.1e}, mean "
        f"difference {float(off.abs().mean()):.4f}, largest {float(off.abs().max()):.3f}"
        for name, off in found.items()
    )


def _differences(engine: Embedded, rows: Sequence[Row], max_tokens: int, replay: bool) -> Tensor:
    """Of the training forward's log-probabilities from the recorded ones."""
    model, found = engine.engine.core.model, []
    for batch in micro_batches(rows, max_tokens=max_tokens):
        packed = pack(batch, model.device)
        routing = Routing(replay_TLk=packed.routes_TLk) if replay else None
        with torch.no_grad():
            found.append(token_logprobs(model, packed, routing=routing).logp_M - packed.old_logp_M)
    return torch.cat(found).double()


async def profile_decode(engine: Embedded, workload: Workload, running: int) -> str:
    """Torch's table of pure decode steps, below a line with the share of time the GPU was busy."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities):
        pass  # the first start of the profiler takes seconds, during which the requests below would finish
    settled = 8 + 2 * -(-running * workload.prompt // PREFILL)
    new = workload.longest - workload.prompt
    endless = Workload(name="profile", conversations=running, prompt=workload.prompt, new=new)
    first = engine.steps + settled
    playing = asyncio.create_task(engine.play(endless, seed=-3))
    await _until(engine, first, playing)
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # the engine steps in a thread of its own
    with profile(activities=activities, experimental_config=every_thread) as recorded:
        first, began = engine.steps, time.perf_counter()
        await _until(engine, first + PROFILED_STEPS, playing)
        steps, seconds = engine.steps - first, time.perf_counter() - began
    playing.cancel()
    await asyncio.wait([playing])
    return _profile_text(recorded, running, steps, seconds)


async def _until(engine: Embedded, steps: int, playing: asyncio.Task[Played]) -> None:
    while engine.steps < steps:
        if playing.done():
            raise RallyError("the workload was over before it could be profiled; give --workloads a longer one")
        await asyncio.sleep(0.0005)


def _profile_text(recorded: profile, running: int, steps: int, seconds: float) -> str:
    events = recorded.key_averages()
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    gpu = f", of which the GPU computed {1e3 * busy / steps:.2f} ms ({busy / seconds:.0%})" if kernels else ""
    order = "self_device_time_total" if kernels else "self_cpu_time_total"
    return (
        f"{steps} steps with {running} requests under the profiler: {1e3 * seconds / steps:.2f} ms a step{gpu}\n\n"
        f"{events.table(sort_by=order, row_limit=60, max_name_column_width=80)}\n"
    )


HEADINGS = (
    "engine",
    "running",
    "workload",
    "tokens/s",
    "samples/s",
    "seconds",
    "steps",
    "tokens a step",
    "requests inside",
    "prompt reused",
    "peak GiB",
)


def cells(timing: Timing) -> tuple[str, ...]:
    played = timing.played
    return (
        timing.engine,
        str(timing.running or "-"),
        timing.workload.name,
        f"{timing.tokens_per_second:,.0f}",
        f"{timing.samples_per_second:.1f}",
        f"{played.seconds:.2f}",
        "-" if timing.steps is None else str(timing.steps),
        "-" if not timing.steps else f"{played.sampled / timing.steps:.0f}",
        f"{played.waited / played.seconds:.0f}",
        f"{played.cached / played.prompted:.0%}",
        f"{timing.peak_bytes / 2**30:.1f}",
    )


def tables(timings: Sequence[Timing], shape: Shape, circumstances: Circumstances) -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    shrunk = f", workloads divided by {shape.shrink}" if shape.shrink > 1 else ""
    ratios = [row for timing in timings for row in ratio_cells(timing, timings, shape)]
    parts = [
        f"{circumstances.sentence()}; {gpu}; shape {shape.name}{shrunk}",
        table(HEADINGS, [cells(t) for t in timings]),
        "Requests inside: running or waiting, on average. Tokens a step: sampled ones. Peak: for vllm and sglang what "
        "the whole GPU has in use.",
    ]
    if ratios:
        parts.append(table(("engine", "running", "workload", "against", "ratio"), ratios))
    return "\n\n".join(parts) + "\n"


def ratio_cells(timing: Timing, timings: Sequence[Timing], shape: Shape) -> list[tuple[str, ...]]:
    """The speed-up over `generate` in this run, and over figures from elsewhere."""
    against = {}
    for other in timings:
        if other.engine == "hf" and other is not timing and other.workload == timing.workload:
            against["hf, in this run"] = other.speed
    for name, speed in PUBLISHED.get((shape.name, timing.workload.name), {}).items():
        unit = "tokens/s" if timing.workload.turns == 1 else "samples/s"
        against[f"{name}, {speed:,g} {unit}, {ELSEWHERE}"] = speed
    start = cells(timing)[:3]
    return [(*start, name, f"{timing.speed / speed:.2f}x") for name, speed in against.items()]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
