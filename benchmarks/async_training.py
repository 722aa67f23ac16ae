"""Asynchronous against synchronous training with slow tools: samples per second, reward per sample, staleness.

    python -m benchmarks.async_training --out FOLDER [--steps 16] [--seeds 0 1 2] [--modes sync async lag]
        [--servers 2] [KEY=VALUE]...

Trains the demo's model with GRPO on arithmetic. Each call of the calculator takes 0.2 to 4 seconds, lognormal with a
median of 0.6 s. `sync` waits for the slowest episode of a step; `async` samples one batch ahead and lets episodes go on
across updates; `lag` samples each batch whole, one update ahead. `served`, `separate` and `separate-lag` are these
three over `--servers` servers of Rally's own (`rally serve engine`), which the run starts. All modes train on the same
prompts in the same order. Prints one line per run and the ratios of the means. A run that fails is named and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks.demo_models import demo_models
from benchmarks.kill_drill import quiet_console
from rally.config import load_config
from rally.runs.train import train
from rally.tools.builtin.calculator import Calculator
from rally.track import RunFolder

MODE = "trainer.v1.trainer_mode=colocate_async"
SEPARATE = "trainer.v1.trainer_mode=separate_async"
SERVERS = "actor_rollout_ref.rollout.name=rally"
MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "async": (MODE,),
    "lag": (MODE, "trainer.v1.colocate_async.fixed_lag=true"),
    "served": (SERVERS,),
    "separate": (SERVERS, SEPARATE),
    "separate-lag": (SERVERS, SEPARATE, "trainer.v1.separate_async.fixed_lag=true"),
}
TOOLS = """
tools:
  - class_name: benchmarks.async_training.SlowCalculator
    process: false
"""


class SlowCalculator(Calculator):
    """The calculator, which answers after 0.2 to 4 seconds. The delay of a call follows from the episode and its
    expression."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        digest = hashlib.blake2b(f"{instance_id}:{parameters}".encode(), digest_size=8).digest()
        delay = random.Random(int.from_bytes(digest)).lognormvariate(-0.5, 0.9)
        await asyncio.sleep(min(4.0, max(0.2, delay)))
        return await super().execute(instance_id, parameters, **kwargs)


class Measured(NamedTuple):
    """One run: samples per second over its steps but the first, mean rewards of the first and last quarter, greedy
    validation at the end, and the largest staleness."""

    samples_per_s: float
    first: float
    last: float
    validation: float
    staleness: float
    idle: float


def measure(out: Path, model: Path, data: Path, mode: str, seed: int, steps: int, overrides: list[str]) -> Measured:
    tools = out / "tools.yaml"
    tools.write_text(TOOLS, encoding="utf-8")
    folder = out / f"{mode}-{seed}"
    keys = [
        f"data={{train_files: {data / 'train.parquet'}, val_files: {data / 'test.parquet'}, val_max_samples: 200}}",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=96",
        f"actor_rollout_ref.model={{path: {model}, enable_gradient_checkpointing: false}}",
        "actor_rollout_ref.actor={ppo_mini_batch_size: 16, optim: {lr: 3.0e-4}}",
        "actor_rollout_ref.rollout={n: 8, max_num_seqs: 256, timeout_per_turn: 60}",
        f"actor_rollout_ref.rollout.multi_turn={{enable: true, tool_config_path: {tools}, max_assistant_turns: 3}}",
        f"trainer={{default_local_dir: {folder}, total_training_steps: {steps}, seed: {seed}, device: cpu}}",
        "trainer.val_before_train=false",
        *MODES[mode],
        *overrides,
    ]
    train(load_config(overrides=keys), quiet_console())
    rows = {row.step: row.metrics for row in RunFolder(folder).read_metrics() if row.step}
    quarter = max(1, steps // 4)
    rewards = [rows[step]["critic/rewards/mean"] for step in sorted(rows)]
    later = [rows[step] for step in sorted(rows)[1:]]
    samples = sum(row["episodes/count"] for row in later)
    worst = "training/off_policy/trajectory_staleness_worst/max"
    [validation] = [v for k, v in rows[steps].items() if k.startswith("val-core/") and "reward/mean" in k][:1] or [0.0]
    return Measured(
        samples / sum(row["timing_s/step"] for row in later),
        mean(rewards[:quarter]),
        mean(rewards[-quarter:]),
        validation,
        max(row.get(worst, 0.0) for row in rows.values()),
        mean(row["engine/idle_share"] for row in later),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES)[:3])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    models = demo_models(args.out / "models", quiet_console())
    found: dict[str, list[Measured]] = {mode: [] for mode in args.modes}
    for seed in args.seeds:
        for mode in args.modes:
            began = time.perf_counter()
            count = [f"actor_rollout_ref.rollout.data_parallel_size={args.servers}"] if SERVERS in MODES[mode] else []
            try:
                one = measure(args.out, models.start, models.data, mode, seed, args.steps, [*count, *args.overrides])
            except Exception as problem:  # noqa: BLE001 - the other runs are measured whatever one raises
                print(f"{mode:12} seed {seed}: failed: {type(problem).__name__}: {problem}", flush=True)
                continue
            found[mode].append(one)
            print(
                f"{mode:12} seed {seed}: {one.samples_per_s:6.1f} samples/s, reward {one.first:.3f} -> {one.last:.3f}, "
                f"validation {one.validation:.3f}, staleness <= {one.staleness:.0f}, engine idle {one.idle:.0%}, "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
    found = {mode: runs for mode, runs in found.items() if runs}
    if not found:
        raise SystemExit("no run was measured")
    first, base = next((mode, mean(one.samples_per_s for one in runs)) for mode, runs in found.items())
    for mode, runs in found.items():
        last = [one.last for one in runs]
        spread = stdev(last) if len(last) > 1 else 0.0
        rate = mean(one.samples_per_s for one in runs)
        print(
            f"{mode:12}: {rate / base:.2f} times the samples/s of {first}; last reward {mean(last):.3f} +- {spread:.3f}"
        )


if __name__ == "__main__":
    main()
