"""Runs recipes one after the other, as docs/results.md reports them, within a time budget.

    python -m benchmarks.recipe_runs search_r1 retool --model FOLDER [--minutes 25] [--dry] [KEY=VALUE]...

Each plan has the model's own score, the supervised start and the training; keys change the training. The data that
`rally recipes` names is expected under data/, and for BFCL an environment in envs/bfcl. A training of all weights is
ended once its last validation is recorded, since the checkpoint that would follow is tens of gigabytes; `tool_use`
keeps it and evaluates it on BFCL. Runs that exceed the time are ended too. Of
a supervised start the weights are kept, and the state for resuming is removed. Metrics and episodes stay in runs/, the
output in runs/printed/. Existing runs are not touched: move them away first.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rally.track import RunFolder

RUNS = Path("runs/rally")
POLL = 0.5


class Stage(NamedTuple):
    """One command, which writes to the run folder of its name. With `steps` it is ended after the validation of
    the last step.
    """

    name: str
    words: tuple[str, ...]
    steps: int | None = None

    @property
    def folder(self) -> Path:
        return RUNS / self.name


def evaluated(recipe: str, model: str, name: str | None = None) -> Stage:
    name = name or f"{recipe}_as_it_is"
    path = f"actor_rollout_ref.model.path={model}"
    return Stage(name, ("eval", "--recipe", recipe, path, f"trainer.experiment_name={name}"))


def taught(recipe: str, name: str, model: str) -> Stage:
    """`name` is the recipe's own, since its training starts from that run."""
    return Stage(name, ("sft", "--recipe", recipe, f"model.path={model}"))


def trained(recipe: str, name: str, steps: int, every: int, *more: str) -> Stage:
    keys = (f"trainer.total_training_steps={steps}", f"trainer.test_freq={every}", f"trainer.experiment_name={name}")
    return Stage(name, ("train", "--recipe", recipe, *keys, *more), steps)


def variant(name: str, model: str, *more: str) -> Stage:
    """As many episodes as the other variants, from the model as it is."""
    recipe = "gsm8k_tool" if name == "plain" else f"gsm8k_tool/{name}"
    keys = (f"actor_rollout_ref.model.path={model}", "data.train_batch_size=64")
    return trained(recipe, f"gsm8k_12_steps_{name}", 12, 12, *keys, *more)


def plans(model: str) -> dict[str, tuple[Stage, ...]]:
    base = f"actor_rollout_ref.model.path={model}"
    adapters = trained("gsm8k_tool/lora", "gsm8k_tool_lora", 24, 12, base)
    tools = trained("tool_use", "tool_use", 40, 10, "trainer.save_freq=40")
    checkpoint = str(tools.folder / "checkpoints" / "global_step_40" / "actor")
    return {
        "shaping": (
            taught("gsm8k_tool", "gsm8k_tool_sft", model),
            trained("gsm8k_tool/shaping", "gsm8k_tool_shaping", 60, 10),
        ),
        "reasoning_gym": (trained("reasoning_gym", "reasoning_gym", 40, 10, base),),  # validated before its first step
        "tool_use": (
            evaluated("tool_use", model),
            evaluated("tool_use/eval_bfcl", model, "bfcl_as_it_is"),
            taught("tool_use", "tool_use_sft", model),
            tools._replace(steps=None),
            evaluated("tool_use/eval_bfcl", checkpoint, "bfcl_after_tool_use"),
        ),
        "repair": (
            evaluated("repair", model),
            taught("repair", "repair_sft", model),
            trained("repair", "repair", 30, 10),
        ),
        "search_r1": (
            evaluated("search_r1", model),
            taught("search_r1", "search_r1_sft", model),
            trained("search_r1", "search_r1", 40, 10),
        ),
        "retool": (
            evaluated("retool", model),
            taught("retool", "retool_sft", model),
            trained("retool", "retool", 30, 10),
        ),
        "lora": (
            taught("gsm8k_tool/sft_lora", "gsm8k_tool_sft_lora", model),
            adapters._replace(steps=None),
        ),  # its checkpoint is small
        "plain": (variant("plain", model),),
        "interaction": (variant("interaction", model),),
        "curriculum": (variant("curriculum", model, "data.curriculum.grow_steps=9"),),
        "dapo": (variant("dapo", model),),
        "ppo": (variant("ppo", model, "trainer.critic_warmup=3"),),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe_runs", description="Recipes, as measured.")
    parser.add_argument("words", nargs="+", metavar="PLAN|KEY=VALUE", help=f"some of {', '.join(plans(''))}")
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which what still runs is ended")
    parser.add_argument("--dry", action="store_true", help="print the commands only")
    options = parser.parse_intermixed_args(arguments)
    keys = [word for word in options.words if "=" in word]
    known = plans(options.model)
    if unknown := [word for word in options.words if "=" not in word and word not in known]:
        parser.error(f"there is no plan {unknown[0]}; choose from {', '.join(known)}")
    stages = [stage for word in options.words if "=" not in word for stage in known[word]]
    if there := [str(stage.folder) for stage in stages if stage.folder.exists()]:
        parser.error(f"{', '.join(there)} would be written to, and is there already; move it away")
    begun = time.monotonic()
    for stage in stages:
        command = [sys.executable, "-m", "rally", *stage.words, *(keys if stage.words[0] == "train" else ())]
        if options.dry:
            print(shlex.join(command[2:]))
            continue
        end = play(stage, command, begun + 60 * options.minutes)
        print(f"{time.monotonic() - begun:7.1f} s  {stage.name}: {end}", flush=True)


def play(stage: Stage, command: Sequence[str], deadline: float) -> str:
    """Run one stage and return how it ended, as text."""
    if time.monotonic() > deadline:
        return "not begun, the time is up"
    printed = RUNS.parent / "printed" / f"{stage.name}.txt"
    printed.parent.mkdir(parents=True, exist_ok=True)
    with printed.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            while process.poll() is None:
                done = stage.steps is not None and validated(stage.folder, stage.steps)
                if done or time.monotonic() > deadline:
                    return "ended after its last validation" if done else "ended, the time is up"
                time.sleep(POLL)
        finally:  # after Ctrl-C too, which does not reach the child's own session
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                shutil.rmtree(stage.folder / "checkpoints", ignore_errors=True)
    if process.returncode:
        return f"failed ({process.returncode}), see {printed}"
    if stage.words[:1] == ("sft",):
        for state in stage.folder.glob("checkpoints/*/trainer.pt"):
            state.unlink()
    return "done"


def validated(folder: Path, step: int) -> bool:
    rows = RunFolder(folder).read_metrics() if folder.exists() else ()
    return any(row.step >= step and any(key.startswith("val-core/") for key in row.metrics) for row in rows[-1:])


if __name__ == "__main__":
    main()
