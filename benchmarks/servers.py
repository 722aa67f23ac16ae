"""Measures vLLM and SGLang behind Rally's adapter, with the components that a training run uses.

    python -m benchmarks.servers --model FOLDER --rows data/gsm8k/train.parquet --out runs/servers \
        [--engine vllm,sglang] [--vllm-python PYTHON] [--sglang-python PYTHON] \
        [--parts mismatch,speed,update,train,bare] [KEY=VALUE ...]

For each server: `mismatch`, how far its log-probabilities are from the trainer's; `speed`, samples/s of a workload of
several turns through adapter, router and HTTP; `update`, seconds until it samples from new weights; `train`, three
steps of `rally train` with a calculator, all of them over one start of the server; and `bare`, the workload in the
engine's own process, without Rally. `rally data gsm8k --tool calculator` writes the rows. KEY=VALUE are keys of the
configuration; with `actor_rollout_ref.rollout.checkpoint_engine.backend=ipc` updates are measured both ways. PYTHON may
be a script that sets variables and runs an interpreter. `--small` divides everything, to try the script on a CPU. Each
part has a time limit (`--patience` multiplies it). Its results are written to --out at once (ENGINE.json), and at the
end to servers.json and servers.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.report import Circumstances
from benchmarks.rollout import table
from benchmarks.rollout_workloads import Workload
from benchmarks.served import Spec
from rally.types import RallyError

ROOT = Path(__file__).parents[1]
PARTS = ("mismatch", "speed", "update", "train", "bare")
MEMORY_SHARE = 0.5
STEPS = 3
SECONDS = {"start": 270.0, "served": 450.0, "bare": 330.0}
"""Time limits of the server's start, of all parts over it, and of the bare engine; multiplied by --patience."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The amount of work."""

    workload: Workload
    shrink: int = 1
    running: int = 256
    episodes: int = 64
    new: int = 256
    batch: int = 32
    n: int = 8
    response: int = 512
    patience: float = 1.0

    @classmethod
    def of(cls, name: str, small: bool, patience: float) -> Plan:
        if not small:
            return cls(workload=Workload.named(name), patience=patience)
        workload = Workload.named(name).shortened(32)
        sizes = {"shrink": 32, "running": 16, "episodes": 4, "new": 16, "batch": 2, "n": 2, "response": 48}
        return cls(workload=workload, patience=4 * patience, **sizes)

    @property
    def window(self) -> int:
        return max(self.workload.longest, 1024) + 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description="Rollout servers, measured.")
    parser.add_argument("--model", required=True, type=Path, help="a model folder")
    parser.add_argument("--rows", type=Path, help="GSM8K rows for the training steps (.parquet, .jsonl)")
    parser.add_argument("--out", required=True, type=Path, help="a folder")
    parser.add_argument("--engine", default="vllm,sglang")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--sglang-python", default=sys.executable, help="the Python that has SGLang")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--workload", default="multi-256")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time limits")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args(arguments)
    try:
        run(options)
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)


def run(options: argparse.Namespace) -> dict[str, Any]:
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise RallyError(f"there is no part {', '.join(unknown)}; name some of {', '.join(PARTS)}")
    if "train" in parts and options.rows is None:
        raise RallyError("the training steps need --rows; write them with `rally data gsm8k --tool calculator`")
    circumstances, plan = Circumstances(), Plan.of(options.workload, options.small, options.patience)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for engine in options.engine.split(","):
        began = time.perf_counter()
        found[engine] = {}
        if set(parts) - {"bare"}:
            found[engine] |= served(engine, parts, plan, options)
            write(options.out, circumstances, found)  # after each: the machine may be taken back
        if "bare" in parts:
            found[engine] |= bare(engine, plan, options)
        found[engine]["minutes"] = (time.perf_counter() - began) / 60
        write(options.out, circumstances, found)
    print(as_markdown(circumstances, found))
    return found


def python_of(engine: str, options: argparse.Namespace) -> str:
    return str(getattr(options, f"{engine}_python"))


def served(engine: str, parts: Sequence[str], plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The parts over one start of the server, in a child process."""
    out = (options.out / f"{engine}.json").resolve()
    out.unlink(missing_ok=True)
    folder = (options.out / f"{engine}-{int(time.time())}").resolve()
    spec = Spec(
        tree=tree_of(engine, plan, options, folder),
        overrides=tuple(options.overrides),
        parts=tuple(parts),
        workload=plan.workload,
        episodes=plan.episodes,
        new=plan.new,
        patience=plan.patience,
        out=str(out),
    )
    path = options.out / f"{engine}-spec.json"
    path.write_text(json.dumps(dataclasses.asdict(spec)), encoding="utf-8")
    words = [sys.executable, "-m", "benchmarks.served", str(path.resolve())]
    failed = {}
    try:
        subprocess.run(words, cwd=ROOT, check=True, timeout=SECONDS["served"] * plan.patience)
    except subprocess.SubprocessError as problem:
        failed = {"served_failed": str(problem)}
    return (json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}) | failed


def bare(engine: str, plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The engine in a process of its own interpreter."""
    words = [python_of(engine, options), "-m", "benchmarks.bare_engine", engine, str(options.model), options.workload]
    words += ["--running", str(plan.running), "--shrink", str(plan.shrink)]
    log, told = options.out / f"{engine}-bare.log", options.out / f"{engine}-bare.json"
    try:
        with log.open("w") as errors, told.open("w") as answer:
            _run_all_of(words, SECONDS["bare"] * plan.patience, answer, errors)
    except subprocess.SubprocessError as problem:
        return {"bare_failed": f"{problem}; its log is {log}"}
    return {"bare": json.loads(told.read_text(encoding="utf-8").splitlines()[-1])}


def _run_all_of(words: Sequence[str], seconds: float, stdout: IO[str], stderr: IO[str]) -> None:
    """Run a command; on a time-out kill all its processes, since a child that survives would keep the GPU's memory."""
    child = subprocess.Popen(words, cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        code = child.wait(seconds)
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    if code:
        raise subprocess.CalledProcessError(code, words)


def tree_of(engine: str, plan: Plan, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The configuration of a run over this server."""
    return {
        "data": {
            "train_files": str(options.rows.resolve()) if options.rows else None,
            "train_batch_size": plan.batch,
            "max_prompt_length": plan.window - plan.response,
            "max_response_length": plan.response,
        },
        "actor_rollout_ref": {
            "model": {"path": str(options.model.resolve()), "dtype": options.dtype},
            "actor": {"ppo_mini_batch_size": plan.batch, "optim": {"lr": 1e-6}, "ppo_max_token_len_per_gpu": 16384},
            "rollout": {
                "name": engine,
                "mode": "standalone",
                "n": plan.n,
                "max_model_len": plan.window,
                "max_num_seqs": plan.running,
                "gpu_memory_utilization": MEMORY_SHARE,
                "server": {
                    "python": python_of(engine, options),
                    "max_start_wait_time": SECONDS["start"] * plan.patience,
                },
                **(
                    {"engine_kwargs": {"vllm": {"disable_log_stats": True}}} if engine == "vllm" else {}
                ),  # as when bare
                "multi_turn": {"enable": True, "max_assistant_turns": 8},
                "agent_loop_config": {"tools": ["calculator"]},
            },
        },
        "trainer": {
            "default_local_dir": str(folder),
            "total_training_steps": STEPS,
            "val_before_train": False,
            "save_freq": -1,
            "resume_mode": "disable",
        },
    }


def write(folder: Path, circumstances: Circumstances, found: dict[str, Any]) -> None:
    told = {**dataclasses.asdict(circumstances), "device": _device(), "servers": found}
    (folder / "servers.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    (folder / "servers.md").write_text(as_markdown(circumstances, found), encoding="utf-8")


def as_markdown(circumstances: Circumstances, found: dict[str, Any]) -> str:
    rows = [row for engine, result in found.items() for row in _rows(engine, result)]
    return f"{circumstances.sentence()}; {_device()}\n\n{table(('server', 'what', 'number'), rows)}\n"


def _rows(engine: str, result: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str]] = []
    if "start_seconds" in result:
        rows.append(("start, with probe", f"{result['start_seconds']:.0f} s"))
    if found := result.get("mismatch"):
        rows.append(("k3 against the trainer", f"{found['k3']:.1e} over {found['tokens']} tokens"))
    rows += _speed_rows(result)
    for one in result.get("update", ()):
        of = f"weight update by {one['way']}, {'sleeping' if one['asleep'] else 'awake'}"
        told = f"{one['whole']:.2f} s (write {one['write']:.2f}, canary {one['canary']:.2f}, sleep {one['sleep']:.2f})"
        rows.append((of, told))
    for step, one in enumerate(result.get("train", ()), 1):
        told = ", ".join(f"{name} {value:.3g}" for name, value in one.items())
        rows.append((f"training step {step}", told))
    rows += [(name.replace("_", " "), str(why)) for name, why in result.items() if name.endswith("_failed")]
    if "minutes" in result:
        rows.append(("all of this", f"{result['minutes']:.1f} minutes"))
    return [(engine, *row) for row in rows]


def _speed_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rates = {
        name: result[key]["samples_per_second"]
        for name, key in (("served", "speed"), ("bare", "bare"))
        if key in result
    }
    rows = [(f"samples/s, {name}", f"{rate:.1f}") for name, rate in rates.items()]
    if len(rates) == 2:
        rows.append(("served against bare", f"{rates['served'] / rates['bare']:.0%}"))
    return rows


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
