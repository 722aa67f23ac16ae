"""Compares runs at equal numbers of sampled episodes, from their run folders alone.

    python -m benchmarks.compare_runs plain=runs/rally/gsm8k_tool dapo=runs/rally/gsm8k_tool_dapo --out compared.png

Draws validation and training score over the sampled episodes, including those that dynamic sampling discarded, and
prints a table at the largest number that all runs reached. The score is the task's own, without shaping.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.rollout import table
from rally.track import MetricsRow, RunFolder
from rally.types import RallyError

SCORE = "reward/score/mean"
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d")


class Point(NamedTuple):
    episodes: float
    value: float


class Run(NamedTuple):
    """`minutes` are those of its training steps, without validation."""

    name: str
    score: tuple[Point, ...]
    validation: tuple[Point, ...]
    minutes: tuple[Point, ...]

    @property
    def episodes(self) -> float:
        return self.score[-1].episodes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_runs", description="Runs at equal episodes.")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, help="a PNG file to draw")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(*named(text)) for text in options.runs]
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
    print(told(runs))
    if options.out:
        draw(runs, options.out)


def named(text: str) -> tuple[str, Path]:
    name, _, folder = text.rpartition("=")
    return name or Path(folder).name, Path(folder)


def read_run(name: str, folder: Path) -> Run:
    rows = RunFolder(folder).read_metrics()
    sampled = list(accumulate(row.metrics.get("episodes/count", 0.0) for row in rows))
    trained = [(at, row) for at, row in zip(sampled, rows, strict=True) if SCORE in row.metrics]
    if not trained:
        raise RallyError(f"{folder} has no training step yet; let the run finish one and ask again")
    seconds = accumulate(row.metrics["timing_s/step"] for _, row in trained)
    return Run(
        name,
        tuple(Point(at, row.metrics[SCORE]) for at, row in trained),
        tuple(Point(at, mean(found)) for at, row in zip(sampled, rows, strict=True) if (found := validated(row))),
        tuple(Point(at, spent / 60) for (at, _), spent in zip(trained, seconds, strict=True)),
    )


def validated(row: MetricsRow) -> list[float]:
    """The mean of each validation set."""
    return [value for key, value in row.metrics.items() if key.startswith("val-core/") and "/mean@" in key]


def at_most(points: Sequence[Point], episodes: float) -> Point | None:
    """The last point within the given number of episodes."""
    return next((point for point in reversed(points) if point.episodes <= episodes), None)


def told(runs: Sequence[Run]) -> str:
    """A table at the number of episodes that all runs reached."""
    equal = min(run.episodes for run in runs)
    rows = []
    for run in runs:
        first = at_most(run.validation, 0)
        last, score, minutes = (at_most(points, equal) for points in (run.validation, run.score, run.minutes))
        rows.append((run.name, _share(first), _share(last), _share(score), f"{minutes.value:.1f}" if minutes else ""))
    heads = ("run", "validation before", f"validation by {equal:,.0f} episodes", "score on train", "minutes of steps")
    return table(heads, rows)


def _share(point: Point | None) -> str:
    return f"{point.value:.1%} (at {point.episodes:,.0f})" if point else ""


def draw(runs: Sequence[Run], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.2, 3.7), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, title, what in ((left, "Validation", "validation"), (right, "Score on train", "score")):
        for run, color in zip(runs, cycle(COLORS), strict=False):
            if points := getattr(run, what):
                at, values = zip(*points, strict=True)
                axes.plot(at, values, color=color, linewidth=1.8, marker="o", markersize=3, label=run.name)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xlabel("episodes sampled", fontsize=9, color="#555")
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=8.5, labelcolor="#555")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main()
