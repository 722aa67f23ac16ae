"""The curves of a run are drawn from its metrics file alone: one self-contained page, and a picture for a README."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rally.track.curve_page import page
from rally.track.folder import MetricsRow, RunFolder
from rally.track.lines import write_atomic
from rally.track.metrics import NUM_TURNS, REWARD, TOOL_CALLS, TOOL_SUCCESS, VALIDATION, validation_series
from rally.track.plot import COLORS, Panel, Series, bounds
from rally.track.text import one_line
from rally.types import RallyError


class CurveFiles(NamedTuple):
    """Where the curves were written; there is no picture where matplotlib is not installed."""

    png: Path | None
    html: Path


def write_curve(run_path: str | Path, title: str | None = None) -> CurveFiles:
    """Draw reward, validation success, tool success and turns into `curve.html` and `curve.png` of the run folder."""
    folder = RunFolder(run_path)
    rows = folder.read_metrics()
    panels = collect_panels(rows)
    if not panels:
        raise RallyError(f"{run_path} has no metrics to draw yet; let the run finish a step and ask again")
    title = one_line(title or folder.path.resolve().name)
    html = folder.path / "curve.html"
    write_atomic(html, page(title, panels, rows))
    if importlib.util.find_spec("matplotlib") is None:
        return CurveFiles(None, html)
    png = folder.path / "curve.png"
    _draw_png(title, panels, png)
    return CurveFiles(png, html)


def collect_panels(rows: Sequence[MetricsRow]) -> list[Panel]:
    """The panels that have something to show."""
    validation = validation_series({name for row in rows for name in row.metrics})
    wanted = (
        ("Reward", "mean reward", {REWARD: "reward"}),
        ("Validation", "success", {name: name.removeprefix(VALIDATION) for name in validation}),
        ("Tool success", "share of calls", {TOOL_SUCCESS: "tool success"}),
        ("Turns", "per episode", {NUM_TURNS: "turns", TOOL_CALLS: "tool calls"}),
    )
    drawn = ((title, y_label, _series(rows, names)) for title, y_label, names in wanted)
    return [Panel(title, y, series, (rows[0].step, rows[-1].step)) for title, y, series in drawn if series]


def _series(rows: Sequence[MetricsRow], names: Mapping[str, str]) -> tuple[Series, ...]:
    found = []
    for name, label in names.items():
        values = ((row.step, row.metrics.get(name, math.nan)) for row in rows)
        points = tuple((step, value) for step, value in values if math.isfinite(value))
        if points:
            found.append(Series(one_line(label), points))
    return tuple(found)


def _draw_png(title: str, panels: Sequence[Panel], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(
        figsize=(5.6 * columns, 3.2 * lines + 0.5),
        dpi=150,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1),
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left", parse_math=False)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png")
    part.replace(path)


def _draw_panel(axes: Any, panel: Panel) -> None:
    handles = []
    for n, series in enumerate(panel.series):
        steps, values = zip(*series.points, strict=True)
        style = {"marker": "o", "markersize": 3} if len(steps) <= 30 else {}
        handles += axes.plot(steps, values, color=COLORS[n % len(COLORS)], linewidth=1.8, **style)
    axes.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set_xlabel("training step", fontsize=9, color="#555")
    axes.set_ylabel(panel.y_label, fontsize=9, color="#555")
    first, last = panel.steps
    axes.set_xlim(first - (last - first) * 0.02 - 0.1, last + (last - first) * 0.02 + 0.1)
    low, high = bounds(panel)
    axes.set_ylim(low, high + (high - low) * 0.03)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8.5, labelcolor="#555")
    if len(panel.series) > 1:
        legend = axes.legend(handles, [s.name for s in panel.series], frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a data source named "$x" is not a formula
