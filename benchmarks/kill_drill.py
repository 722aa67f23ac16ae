"""Kills a run repeatedly and checks that it ends exactly where an uninterrupted run ends.

    python -m benchmarks.kill_drill --out FOLDER [--steps 30] [--kills 20] [--signals KILL TERM HUP INT] [--seed 0]
        [--model FOLDER] [KEY=VALUE]...

The run is deterministic GRPO on the arithmetic task with the calculator, on a CPU, from the demo's model (or one of
`--model`, with its rows beside it); keys change its configuration. It runs in a child process that is ended at random
moments by SIGKILL, or by the given signals in turn, all others of which save a checkpoint first. Two thirds of the
moments are anywhere in a step, the start-up included, one third while a checkpoint is being written. After each kill
the same run is started again. At the end weights, optimizer, sampler and every metric but seconds and rates must equal
those of an uninterrupted run to the last bit.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.demo_models import demo_models
from rally.config import Config, load_config
from rally.runs.train import train
from rally.track import RunConsole

SECONDS = re.compile(r"(timing_s|timing_per_token_ms|perf)/|engine/idle_share|.*_s/p\d+$")  # differ from run to run
SAVE_EVERY = 3
POLL = 0.001
PATIENCE = 900.0
FORK = multiprocessing.get_context("fork")  # what was imported need not be imported again for each of many children


class Kill(NamedTuple):
    """A moment: after `step` steps are done, at `fraction` of the following step or checkpoint."""

    step: int
    fraction: float
    saving: bool
    signal: signal.Signals


class Seconds(NamedTuple):
    """Durations in an uninterrupted run."""

    start: float
    step: float
    saving: float


class Killed(NamedTuple):
    """The state that a kill left behind."""

    kill: Kill
    done: int
    saved: int
    torn: bool


def plan(steps: int, kills: int, seed: int, signals: Sequence[str] = ("KILL",)) -> list[Kill]:
    """Random moments in the order of the run, all before its last step, so that each hits a running process."""
    rng = random.Random(f"kill drill:{seed}")
    moments = []
    for number in range(kills):
        saving = number % 3 == 2
        last = steps - 2 - (SAVE_EVERY if saving else 0)
        ended = signal.Signals[f"SIG{signals[number // 3 % len(signals)]}"]
        moments.append(Kill(rng.randint(0, max(0, last)), rng.random(), saving, ended))
    return sorted(moments)


def configuration(model: Path, data: Path, out: Path, steps: int, seed: int) -> dict[str, Any]:
    return {
        "data": {
            "train_files": str(data / "train.parquet"),
            "val_files": str(data / "test.parquet"),
            "val_max_samples": 4,
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "max_response_length": 96,
            "curriculum": {"by": "success"},
        },
        "actor_rollout_ref": {
            "model": {"path": str(model), "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 2e-4}},
            "rollout": {
                "n": 4,
                "deterministic": True,
                "multi_turn": {"max_assistant_turns": 3, "max_tool_response_length": 64},
                "agent_loop_config": {"tools": ["calculator"]},
            },
        },
        "trainer": {
            "default_local_dir": str(out),
            "total_training_steps": steps,
            "save_freq": SAVE_EVERY,
            "test_freq": SAVE_EVERY,
            "val_before_train": False,
            "max_actor_ckpt_to_keep": 2,
            "seed": seed,
            "device": "cpu",
        },
    }


def in_child(work: Callable[[], object], log: Path) -> multiprocessing.process.BaseProcess:
    """Start `work` in a child process whose output goes to `log`."""

    def body() -> None:
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # As from a terminal: a shell starts its background jobs with SIGINT ignored, and nohup with SIGHUP.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        work()

    child = FORK.Process(target=body)
    child.start()
    return child


def quiet_console() -> RunConsole:
    return RunConsole(Console(file=io.StringIO()))


def done_steps(run: Path) -> int:
    """The number of steps with complete metrics; a line that is being written does not count."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".writing_*"))


def undisturbed(config: Config, run: Path) -> Seconds:
    """Run to the end and measure the durations."""
    began = time.monotonic()
    first = last = None
    writings, since = [], None
    child = in_child(lambda: train(config, quiet_console()), run.with_suffix(".log"))
    while child.is_alive():
        now = time.monotonic()
        if first is None and done_steps(run):
            first = now
        if is_saving(run) != (since is not None):
            writings += [now - since] if since is not None else []
            since = now if since is None else None
        last = now
        time.sleep(POLL)
    assert child.exitcode == 0 and first is not None and last is not None, run.with_suffix(".log").read_text()
    steps = max(1, done_steps(run) - 1)
    return Seconds(first - began, (last - first) / steps, sum(writings) / max(1, len(writings)))


def disturbed(config: Config, run: Path, kill: Kill, seconds: Seconds) -> Killed:
    """Start or resume the run and kill it at its moment."""
    child = in_child(lambda: train(config, quiet_console()), run.with_suffix(".log"))
    deadline = time.monotonic() + PATIENCE

    def until(reached: Callable[[], bool]) -> None:
        while not reached():
            assert child.is_alive() and time.monotonic() < deadline, run.with_suffix(".log").read_text()[-4000:]
            time.sleep(POLL)

    until(lambda: done_steps(run) >= kill.step)
    if kill.saving:
        until(lambda: is_saving(run))
        length = seconds.saving
    else:
        length = seconds.step if kill.step else seconds.start
    time.sleep(kill.fraction * length)
    assert child.pid is not None
    os.kill(child.pid, kill.signal)
    child.join()
    assert child.exitcode != 0, f"the run had ended before the kill at {kill}"
    saved = [int(p.name.rpartition("_")[2]) for p in (run / "checkpoints").glob("global_step_*")]
    return Killed(kill, done_steps(run), max(saved, default=0), is_saving(run))


def differences(one: Path, other: Path, steps: int) -> list[str]:
    """What is not equal to the last bit in two runs of `steps` steps; empty if all is well."""
    found = []
    folders = [run / "checkpoints" / f"global_step_{steps}" for run in (one, other)]
    for name in ("actor/model.safetensors", "sampler.json", "counters.json"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        found += [] if first == second else [name]
    first, second = (torch.load(folder / "trainer.pt", weights_only=True) for folder in folders)
    found += [] if equal(first, second) else ["trainer.pt"]
    ours, theirs = metric_rows(one), metric_rows(other)
    found += [] if [row["step"] for row in ours] == list(range(1, steps + 1)) else ["the steps of metrics.jsonl"]
    for row, expected in zip(ours, theirs, strict=True):
        names = {name for name in row.keys() | expected.keys() if row.get(name) != expected.get(name)}
        found += [f"step {row['step']}: {name}" for name in sorted(names)]
    return found


def metric_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if not SECONDS.match(name)} for row in rows]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def drill(
    model: Path,
    data: Path,
    out: Path,
    *,
    steps: int,
    kills: int,
    seed: int,
    signals: Sequence[str] = ("KILL",),
    overrides: Sequence[str] = (),
) -> list[str]:
    """The whole drill; returns the differences at the end."""
    out.mkdir(parents=True, exist_ok=True)
    whole, broken = out / "whole", out / "broken"

    def config(run: Path) -> Config:
        return load_config(base=configuration(model, data, run, steps, seed), overrides=list(overrides))

    seconds = undisturbed(config(whole), whole)
    print(f"undisturbed: {seconds.step:.2f} s a step, {1000 * seconds.saving:.0f} ms to write a checkpoint")
    for number, kill in enumerate(plan(steps, kills, seed, signals), start=1):
        left = disturbed(config(broken), broken, kill, seconds)
        kind = "while saving" if kill.saving else "in a step"
        torn = ", a torn one beside it" if left.torn else ""
        print(
            f"{kill.signal.name} {number:2} {kind:12} after step {left.done:2}; newest checkpoint {left.saved:2}{torn}"
        )
    last = in_child(lambda: train(config(broken), quiet_console()), broken.with_suffix(".log"))
    last.join()
    assert last.exitcode == 0, broken.with_suffix(".log").read_text()[-4000:]
    return differences(broken, whole, steps)


def tool_calls(run: Path) -> float:
    """The mean number of tool calls of an episode over the run."""
    rows = metric_rows(run)
    return float(sum(row["tool_call_counts/mean"] for row in rows) / len(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signals", nargs="+", default=["KILL"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    model, data = args.model, args.model and args.model.parent
    if model is None:
        args.out.mkdir(parents=True, exist_ok=True)
        teacher = in_child(lambda: demo_models(args.out / "models", quiet_console()), args.out / "models.log")
        teacher.join()
        model, data = args.out / "models" / "start", args.out / "models" / "data"
    found = drill(
        model,
        data,
        args.out,
        **{name: getattr(args, name) for name in ("steps", "kills", "seed", "signals", "overrides")},
    )
    for line in found:
        print(f"differs: {line}")
    calls = tool_calls(args.out / "whole")
    print(f"{args.kills} kills, {args.steps} steps, {calls:.2f} tool calls an episode: ", end="")
    print("different" if found else "weights, optimizer, sampler and metrics are bit-identical")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
