"""Guarantees: says whether PPO with a critic, over tokens or over turns, teaches the demo's agent its task.

    OMP_NUM_THREADS=1 python -m benchmarks.ppo [--estimators gae turn_gae] [--seeds 0 1] [--out FOLDER]

Each run is the whole demo, with `PPO` in place of GRPO: docs/methods.md has the same as one command.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rally.demo import DemoSettings, run_demo
from rally.track import RunConsole

PPO = (
    "algorithm.lam=0.95",
    "critic.optim={lr: 1e-3, betas: [0.9, 0.95], weight_decay: 0.0}",
    "critic.model.enable_gradient_checkpointing=false",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_epochs=2",
    "trainer.critic_warmup=5",
)
STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ppo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--estimators", nargs="+", default=["gae", "turn_gae"], choices=["gae", "turn_gae"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("runs/ppo"), help="where the runs are written (runs/ppo)")
    given = parser.parse_args()
    console, rows = RunConsole(), [["estimator", "seed", "before", "after", "seconds"]]
    for estimator in given.estimators:
        for seed in given.seeds:
            began = time.perf_counter()
            overrides = (f"algorithm.adv_estimator={estimator}", *PPO)
            folder = given.out / f"{estimator}_{seed}"
            result = run_demo(folder, DemoSettings(seed=seed, grpo_steps=STEPS), console, overrides)
            before, after = (f"{x['sampled']:.3f} / {x['greedy']:.3f}" for x in (result.before, result.after))
            rows.append([estimator, str(seed), before, after, f"{time.perf_counter() - began:.0f}"])
    console.table("success, sampled / greedy", rows)


if __name__ == "__main__":
    main()
