"""The summary table at the end of a run, made from the run folder: rewards, validation, stop reasons and times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rally.track.console import text_table
from rally.track.display_text import number
from rally.track.metrics.episode_metrics import NUM_TURNS, REWARD, TOOL_SUCCESS, VALIDATION, validation_series
from rally.track.run_folder.folder import MetricsRow, RunFolder
from rally.types import RallyError

Rows = list[tuple[str, str]]


def run_summary(run_path: str | Path) -> Table:
    """A two-column table: first and last reward, best validation, tool success, stop reasons, time per phase, path."""
    steps = RunFolder(run_path).read_metrics()
    if not steps:
        raise RallyError(f"{run_path} has no metrics yet; let the run finish a step and try again")
    rows: Rows = [("steps", str(steps[-1].step))]
    rows += _first_to_last("reward", REWARD, steps)
    rows += _best_validation(steps)
    rows += _first_to_last("tool success", TOOL_SUCCESS, steps)
    rows += _first_to_last("turns", NUM_TURNS, steps)
    rows += _stop_reasons(steps)
    rows += _phase_times(steps)
    return text_table("Run summary", [*rows, ("folder", str(run_path))])


def _column(name: str, steps: Sequence[MetricsRow]) -> list[tuple[int, float]]:
    return [(row.step, row.metrics[name]) for row in steps if name in row.metrics]


def _names(steps: Sequence[MetricsRow]) -> list[str]:
    return list(dict.fromkeys(name for row in steps for name in row.metrics))


def _first_to_last(label: str, name: str, steps: Sequence[MetricsRow]) -> Rows:
    column = _column(name, steps)
    return [(label, f"{number(column[0][1])} -> {number(column[-1][1])}")] if column else []


def _best_validation(steps: Sequence[MetricsRow]) -> Rows:
    rows: Rows = []
    for name in validation_series(_names(steps)):
        step, value = max(_column(name, steps), key=lambda point: (point[1] == point[1], point[1]))
        rows.append((f"best {name.removeprefix(VALIDATION)}", f"{number(value)} at step {step}"))
    return rows


def _stop_reasons(steps: Sequence[MetricsRow]) -> Rows:
    """The stop reasons of the last step that has them."""
    for row in reversed(steps):
        reasons = {k.removeprefix("stop/"): v for k, v in row.metrics.items() if k.startswith("stop/") and v > 0}
        if reasons:
            ordered = sorted(reasons.items(), key=lambda item: -item[1])
            return [("stop reasons, last step", ", ".join(f"{name} {share:.0%}" for name, share in ordered))]
    return []


def _phase_times(steps: Sequence[MetricsRow]) -> Rows:
    """Seconds spent in each phase over the run; `timing_s/<phase>` has one level, deeper names are per episode."""
    totals: dict[str, float] = {}
    for row in steps:
        for name, value in row.metrics.items():
            prefix, _, phase = name.partition("/")
            if prefix == "timing_s" and "/" not in phase:
                totals[phase] = totals.get(phase, 0.0) + value
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return [("time", ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in ordered))] if ordered else []
