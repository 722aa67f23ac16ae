"""Prints and writes tables of ratios, always with the date, machine, load and versions of the measurement."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Row

HEADINGS = ("what", "against", "ours", "other", "ratio", "goal", "verdict")
PACKAGES = ("rally-rl", "torch", "transformers", "trl")


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def installed_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Read when the measurement starts."""

    date: str = field(default_factory=_now)
    cpu: str = field(default_factory=cpu_model)
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    threads: int = field(default_factory=torch.get_num_threads)
    load: tuple[float, float, float] = field(default_factory=os.getloadavg)
    versions: dict[str, str] = field(default_factory=installed_versions)

    def sentence(self) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        load = ", ".join(f"{x:.1f}" for x in self.load)
        return (
            f"{self.date}; {self.cpu}, {self.cores} cores, {self.threads} torch threads; "
            f"load averages at the start {load}; {packages}"
        )


def publish(rows: Sequence[Row], circumstances: Circumstances, folder: Path, console: Console) -> None:
    """Print the table, and write it as bench.json and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(as_json(rows, circumstances), indent=2) + "\n", encoding="utf-8")
    (folder / "bench.md").write_text(as_markdown(rows, circumstances), encoding="utf-8")
    table = Table(*HEADINGS, title="Rally against the alternative, on this CPU")
    for row in rows:
        table.add_row(*_cells(row), end_section=True)
    console.print(table)
    for row in rows:
        console.print(f"- {row.what}: {_details(row)}", highlight=False)
    console.print(circumstances.sentence(), highlight=False)


def _cells(row: Row) -> tuple[str, ...]:
    timings = row.timings
    other, ratio = timings.other_median, timings.ratio
    return (
        row.what,
        row.against,
        f"{timings.ours_median:.3g} s",
        "-" if other is None else f"{other:.3g} s",
        "-" if ratio is None else f"{ratio:.2f}x",
        f">= {row.goal:g}x",
        row.verdict,
    )


def summary(row: Row) -> str:
    _, _, ours, other, ratio, goal, verdict = _cells(row)
    return f"{ours} against {other}: {ratio} (goal {goal}), {verdict}; {_details(row)}"


def _details(row: Row) -> str:
    spread = row.timings.spread
    between = f"; ratios of single runs {spread[0]:.2f} to {spread[1]:.2f}" if spread else ""
    return f"{row.note}{between}; load {row.load:.1f}"


def as_markdown(rows: Sequence[Row], circumstances: Circumstances) -> str:
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(_cells(row) for row in rows)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    notes = "\n".join(f"- {row.what}: {_details(row)}" for row in rows)
    return f"{circumstances.sentence()}\n\n{table}\n\n{notes}\n"


def as_json(rows: Sequence[Row], circumstances: Circumstances) -> dict[str, Any]:
    return {
        **asdict(circumstances),
        "rows": [{**asdict(row), "ratio": row.timings.ratio, "verdict": row.verdict} for row in rows],
    }
