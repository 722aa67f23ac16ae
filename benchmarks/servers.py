"""Guarantees: what vLLM and SGLang are worth behind our adapter is measured with the parts that a training run uses.

    python -m benchmarks.servers --model FOLDER --rows data/gsm8k/train.parquet --out runs/servers \
        [--engine vllm,sglang] [--vllm-python PYTHON] [--sglang-python PYTHON] [--parts mismatch,update,speed,train] \
        [KEY=VALUE ...]

For each server: `mismatch`, how far its log-probabilities are from the trainer's; `update`, seconds until it samples
from new weights; `speed`, samples/s of a workload of several turns through adapter, router and HTTP, against the bare
engine in a process of its own; `train`, three steps of `rally train` with a calculator. `rally data gsm8k --tool
calculator` writes the rows. KEY=VALUE are keys of the configuration. `--small` divides everything, to try the script on
a CPU. Writes servers.json and servers.md into --out.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.mismatch import PROMPTS, Mismatch, compare
from benchmarks.report import Circumstances
from benchmarks.rollout import table
from benchmarks.rollout_workloads import Reply, Workload, play
from rally.chat import ChatCodec
from rally.config import load_config
from rally.engines.remote import RemoteEngine
from rally.engines.remote.canary import canary
from rally.track import RunFolder
from rally.train.load import load_model, load_tokenizer, pick_device
from rally.train.server_parts import remote_engine_of
from rally.types import Generation, RallyError, SamplingParams, Segment

ROOT = Path(__file__).parents[1]
PARTS = ("mismatch", "update", "speed", "train")
MEMORY_SHARE = 0.5
UPDATES = 3
STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is asked."""

    workload: Workload
    shrink: int = 1
    running: int = 256
    episodes: int = 64
    new: int = 256
    batch: int = 32
    n: int = 8
    response: int = 512

    @classmethod
    def of(cls, name: str, small: bool) -> Plan:
        if not small:
            return cls(workload=Workload.named(name))
        workload = Workload.named(name).shortened(32)
        return cls(workload=workload, shrink=32, running=16, episodes=4, new=16, batch=2, n=2, response=48)

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
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    try:
        run(options)
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)


def run(options: argparse.Namespace) -> dict[str, Any]:
    parts = options.parts.split(",")
    if "train" in parts and options.rows is None:
        raise RallyError("the training steps need --rows; write them with `rally data gsm8k --tool calculator`")
    circumstances, plan = Circumstances(), Plan.of(options.workload, options.small)
    found: dict[str, Any] = {}
    for engine in options.engine.split(","):
        began = time.perf_counter()
        found[engine] = measured(engine, parts, plan, options)
        found[engine]["minutes"] = (time.perf_counter() - began) / 60
        write(options.out, circumstances, found)  # after each: the machine may be taken back
    print(as_markdown(circumstances, found))
    return found


def measured(engine: str, parts: Sequence[str], plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "speed" in parts:
        result["bare"] = bare(engine, plan, options)
        print(f"{engine}, bare: {result['bare']}", flush=True)
    if set(parts) - {"train"}:
        model = load_model(str(options.model), device=pick_device(), dtype=options.dtype)
        result |= asyncio.run(served(engine, model, parts, plan, options))
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if "train" in parts:
        result["train"] = trained(engine, plan, options)
    return result


def python_of(engine: str, options: argparse.Namespace) -> str:
    return str(getattr(options, f"{engine}_python"))


def bare(engine: str, plan: Plan, options: argparse.Namespace) -> dict[str, float]:
    """The engine in the process of its own Python."""
    words = [python_of(engine, options), "-m", "benchmarks.bare_engine", engine, str(options.model), options.workload]
    words += ["--running", str(plan.running), "--shrink", str(plan.shrink)]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise RallyError(f"the bare engine failed: {' '.join(words)}\n{asked.stderr[-2000:]}")
    told: dict[str, float] = json.loads(asked.stdout.splitlines()[-1])
    return told


def tree_of(engine: str, plan: Plan, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The configuration of a run over this server."""
    return {
        "data": {
            "train_files": str(options.rows) if options.rows else None,
            "train_batch_size": plan.batch,
            "max_prompt_length": plan.window - plan.response,
            "max_response_length": plan.response,
        },
        "actor_rollout_ref": {
            "model": {"path": str(options.model), "dtype": options.dtype},
            "actor": {"ppo_mini_batch_size": plan.batch, "optim": {"lr": 1e-6}, "ppo_max_token_len_per_gpu": 16384},
            "rollout": {
                "name": engine,
                "mode": "standalone",
                "n": plan.n,
                "max_model_len": plan.window,
                "max_num_seqs": plan.running,
                "gpu_memory_utilization": MEMORY_SHARE,
                "server": {"python": python_of(engine, options), "max_start_wait_time": 600},
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


async def served(
    name: str, model: PreTrainedModel, parts: Sequence[str], plan: Plan, options: argparse.Namespace
) -> dict[str, Any]:
    config = load_config(base=tree_of(name, plan, options, options.out / f"{name}-server"), overrides=options.overrides)
    engine = remote_engine_of(config, model, SamplingParams(max_tokens=plan.new))
    began = time.perf_counter()
    result: dict[str, Any] = {}
    try:
        await engine.start()
        result["start_seconds"] = time.perf_counter() - began
        if "mismatch" in parts:
            result["mismatch"] = await mismatch(engine, model, plan, options)
            print(f"{name}, mismatch: {result['mismatch']}", flush=True)
        if "update" in parts:
            result["updates"] = [await update(engine, sleep) for sleep in _sleeps(engine)]
            print(f"{name}, updates: {result['updates']}", flush=True)
        if "speed" in parts:
            result["served"] = await speed(engine, plan, model.config.get_text_config().vocab_size)
            print(f"{name}, served: {result['served']}", flush=True)
    finally:
        await engine.close()
    return result


async def mismatch(
    engine: RemoteEngine, model: PreTrainedModel, plan: Plan, options: argparse.Namespace
) -> dict[str, float]:
    codec = ChatCodec(load_tokenizer(str(options.model)))
    asked = itertools.islice(itertools.cycle(PROMPTS), plan.episodes)
    prompts = [codec.encode_prompt([{"role": "user", "content": text}]) for text in asked]

    async def one(number: int, ids: Sequence[int]) -> Generation:
        params = SamplingParams(temperature=1.0, max_tokens=plan.new, seed=number, stop_ids=codec.stop_ids)
        return await engine.generate(ids, params, session=str(number))

    generations = await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts)))
    pairs = zip(prompts, generations, strict=True)
    segments = [Segment(prompt_ids=tuple(ids)).append_sampled(generation) for ids, generation in pairs]
    return Mismatch.of(*compare(model, segments))._asdict()


def _sleeps(engine: RemoteEngine) -> list[bool]:
    """Updates of servers that are awake; where they share the trainer's GPU, of sleeping ones too."""
    return [False] * UPDATES + [True] * (UPDATES if engine.settings.sleeps else 0)


async def update(engine: RemoteEngine, sleep: bool) -> dict[str, float]:
    """What `rally train` does between two steps; the weights are written anew, though they are the same."""
    began = time.perf_counter()
    if sleep:
        await engine.rest()
    resting = time.perf_counter() - began
    with engine.updating():
        pass
    began = time.perf_counter()
    told = await engine.publish()
    whole = time.perf_counter() - began
    began = time.perf_counter()
    await canary(engine.servers[0], engine.oracle)
    return {
        "asleep": float(sleep),
        "sleep": resting,
        "whole": whole,
        "write": told["timing_s/write_weights"],
        "canary": time.perf_counter() - began,
    }


async def speed(engine: RemoteEngine, plan: Plan, vocabulary: int) -> dict[str, float]:
    async def sample(ids: Sequence[int], count: int) -> Reply:
        generation = await engine.generate(ids, SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True))
        return Reply(generation.ids, generation.logprobs, generation.cached_tokens)

    await play(sample, plan.workload, vocabulary, seed=-1)
    played = await play(sample, plan.workload, vocabulary, seed=0)
    return {"seconds": played.seconds, "samples_per_second": plan.workload.conversations / played.seconds}


def trained(engine: str, plan: Plan, options: argparse.Namespace) -> list[dict[str, float]]:
    """Metrics of the steps of a whole run."""
    folder = options.out / f"{engine}-train-{int(time.time())}"
    tree = options.out / f"{engine}-train.yaml"
    tree.parent.mkdir(parents=True, exist_ok=True)
    tree.write_text(json.dumps(tree_of(engine, plan, options, folder.resolve())), encoding="utf-8")
    words = [sys.executable, "-m", "rally.cli", "train", str(tree.resolve()), *options.overrides]
    subprocess.run(words, cwd=ROOT, check=True)
    return [
        {name: row.metrics[name] for name in STEP if name in row.metrics} for row in RunFolder(folder).read_metrics()
    ]


STEP = (
    *("timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/update_weights"),
    *("actor/rollout_mismatch_kl", "critic/score/mean", "num_turns/mean", "engine/canary_difference"),
)


def write(folder: Path, circumstances: Circumstances, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
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
    for one in result.get("updates", ()):
        of = "sleeping" if one["asleep"] else "awake"
        told = f"{one['whole']:.2f} s (write {one['write']:.2f}, canary {one['canary']:.2f}, sleep {one['sleep']:.2f})"
        rows.append((f"weight update, {of}", told))
    if "served" in result:
        ours, other = (result[name]["samples_per_second"] for name in ("served", "bare"))
        rows.append(("samples/s, served and bare", f"{ours:.1f} and {other:.1f}: {ours / other:.0%}"))
    for step, one in enumerate(result.get("train", ()), 1):
        told = ", ".join(f"{name} {value:.3g}" for name, value in one.items())
        rows.append((f"training step {step}", told))
    rows.append(("all of this", f"{result['minutes']:.1f} minutes"))
    return [(engine, *row) for row in rows]


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
