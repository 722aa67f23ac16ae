"""Trains the demo's agent with every estimator and every loss from one start, and reports whether it improves.

    OMP_NUM_THREADS=1 python -m benchmarks.learn [--methods grpo cispo dapo] [--steps 10] [--seeds 0 1] [--out FOLDER]

The names are those that a configuration accepts, so a new estimator or loss enters the table automatically. An
estimator is trained with the vanilla loss, a loss with grpo. `dapo`, `turn_returns` and `ppo` are whole methods with
their own number of steps, trained until the task is solved. Success is that of 200 held-out problems, sampled at
temperature 1 and greedy. The start is made once under FOLDER, in a minute or two, and the run folders go there too.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console

from benchmarks.demo_models import DemoModels, demo_models
from benchmarks.report import Circumstances
from rally.algos.advantages import ESTIMATORS
from rally.algos.losses import SURROGATES
from rally.config import Config, algorithm, load_config
from rally.config.actor import LOSS_MODES
from rally.config.errors import ConfigError
from rally.demo.demo import CALCULATOR
from rally.demo.training_stages import CourseResult, CourseSettings, before_and_after, course_config
from rally.runs import train as run
from rally.track import RunConsole

ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
BY_SEQUENCE = ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",)
CRITIC = (
    "algorithm.lam=0.95",
    "critic.optim={lr: 1e-3, betas: [0.9, 0.95], weight_decay: 0.0}",
    "critic.model.enable_gradient_checkpointing=false",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_epochs=2",
)
NEEDS: dict[str, tuple[str, ...]] = {
    "gae": CRITIC,
    "turn_gae": CRITIC,
    "gspo": BY_SEQUENCE,
    "geo_mean": BY_SEQUENCE,
    "gdpo": ("algorithm.gdpo_reward_keys=[score]",),
    "dro": ("actor_rollout_ref.actor.policy_loss.dro_beta=0.1",),
}
"""Keys that some methods require, and those with which a critic learns in a few steps."""
SOLVED = 0.9


@dataclass(frozen=True)
class Method:
    """One row of the table: its changes to the demo's configuration, and its number of steps."""

    kind: str
    name: str
    overrides: tuple[str, ...]
    steps: int | None = None  # None: as many as asked for


WHOLE = (
    Method(
        "method",
        "dapo",
        (
            "algorithm.filter_groups={enable: true, metric: acc, max_num_gen_batches: 4}",
            "actor_rollout_ref.actor.clip_ratio_low=0.2",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "reward_model.reward_manager=dapo",
            "reward_model.reward_kwargs.overlong_buffer_cfg={enable: true, len: 64, penalty_factor: 1.0, log: true}",
        ),
        30,
    ),
    Method(
        "method",
        "turn_returns",
        ("algorithm.turn_rewards=returns", "reward_shaping.intermediate_rewards.tool_call_success=0.2"),
        40,
    ),
    Method("method", "ppo", ("algorithm.adv_estimator=gae", "trainer.critic_warmup=5", *CRITIC), 60),
)


@dataclass(frozen=True)
class Learned:
    method: Method
    seed: int
    steps: int
    result: CourseResult
    seconds: float

    @property
    def improved(self) -> bool:
        return self.result.after["sampled"] > self.result.before["sampled"]


def methods(demo: DemoModels) -> list[Method]:
    """Every estimator and loss that a configuration accepts, each under one name only, then the whole methods."""
    found = [
        Method(kind, name, (f"{key}={name}", *NEEDS.get(name, ())))
        for kind, key, names in (("estimator", ESTIMATOR, algorithm.ESTIMATORS), ("loss", LOSS, LOSS_MODES))
        for name in names
        if _first_name(name, kind)
    ]
    return [m for m in found if _built(demo, m)] + list(WHOLE)


def _first_name(name: str, kind: str) -> bool:
    """Whether no earlier name denotes the same function."""
    registry: dict[str, object] = {**(ESTIMATORS if kind == "estimator" else SURROGATES)}
    names = [n for n, function in registry.items() if function is registry.get(name)]
    return not names or names[0] == name


def _built(demo: DemoModels, method: Method) -> bool:
    """Any other error means that `NEEDS` lacks something, and is raised."""
    try:
        configured(demo, method, 0, 1, demo.folder)
    except ConfigError as refusal:
        if "is not built yet" in str(refusal):
            return False
        raise
    return True


def configured(demo: DemoModels, method: Method, seed: int, steps: int, folder: Path) -> Config:
    settings = CourseSettings(grpo_steps=steps, seed=seed)
    places = [f"trainer.default_local_dir={folder}", "trainer.save_freq=-1"]
    return load_config(overrides=[*places, *method.overrides], base=course_config(CALCULATOR, demo.folder, settings))


def learn(demo: DemoModels, method: Method, seed: int, steps: int, out: Path) -> Learned:
    folder = out / f"{method.kind}-{method.name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    config = configured(demo, method, seed, method.steps or steps, folder)
    run.train(config, RunConsole(Console(file=StringIO())))
    seconds = time.perf_counter() - began
    return Learned(method, seed, method.steps or steps, before_and_after(folder, CALCULATOR.data_source), seconds)


def lines(rows: Sequence[Learned]) -> Iterator[str]:
    """The table in Markdown."""
    yield "| kind | name | seed | steps | sampled before | after | greedy before | after | improved | 0.9 | seconds |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        before, after = row.result.before, row.result.after
        shares = (before["sampled"], after["sampled"], before["greedy"], after["greedy"])
        cells = [
            *(row.method.kind, f"`{row.method.name}`", str(row.seed), str(row.steps)),
            *(f"{share:.3f}" for share in shares),
            "yes" if row.improved else "**no**",
            "reached" if after["sampled"] >= SOLVED else "",
            f"{row.seconds:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learn", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="names to train with; all without it")
    parser.add_argument("--steps", type=int, default=10, help="steps of an estimator or loss (10)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the training (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), help="where everything is written (runs/learn)")
    given = parser.parse_args(arguments)
    console, circumstances = RunConsole(), Circumstances()
    demo = demo_models(given.out / "models", console)
    known = methods(demo)
    unknown = sorted(set(given.methods or ()) - {m.name for m in known})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; choose among {', '.join(dict.fromkeys(m.name for m in known))}")
    rows = []
    for method in (m for m in known if not given.methods or m.name in given.methods):
        for seed in given.seeds:
            rows.append(learn(demo, method, seed, given.steps, given.out))
            console.note(list(lines(rows))[-1])
    console.note("\n".join((circumstances.sentence(), "", *lines(rows))))


if __name__ == "__main__":
    main()
