"""Draws the curves of a run from its metrics: a self-contained HTML page and, with matplotlib, a PNG."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rally.track.display_text import number, one_line
from rally.track.metrics.episode_metrics import (
    NUM_TURNS,
    REWARD,
    TOOL_CALLS,
    TOOL_SUCCESS,
    VALIDATION,
    validation_series,
)
from rally.track.run_folder.folder import MetricsRow, RunFolder
from rally.track.svg_chart import COLORS, Panel, Series, bounds, marks, svg
from rally.types import RallyError
from rally.util.atomic_files import atomic_file, write_atomic

_DARK = ("#60a5fa", "#fbbf24", "#34d399", "#c084fc", "#f472b6", "#22d3ee")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --page: #f8fafc; --card: #fff; --ink: #0f172a; --soft: #64748b; --rule: #e2e8f0;
  %(light)s }
@media (prefers-color-scheme: dark) { :root { --page: #0b1120; --card: #131c2e; --ink: #e2e8f0; --soft: #94a3b8;
  --rule: #26334a; %(dark)s } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 56px }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 15px; margin: 0 }
.sub { color: var(--soft); margin: 4px 0 24px }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%%), 1fr)); gap: 16px }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px 8px }
header { display: flex; justify-content: space-between; align-items: baseline; gap: 12px }
.now { font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums }
.now small { font-size: 13px; font-weight: 400; color: var(--soft); margin-right: 6px }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft); min-height: 20px }
.legend i { display: inline-block; width: 12px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: currentColor }
.plot { position: relative }
svg { display: block; width: 100%%; height: auto; touch-action: pan-y }
.grid { stroke: var(--rule) }
.tick, .name { fill: var(--soft); font-size: 12px; text-anchor: middle; font-variant-numeric: tabular-nums }
.tick.end { text-anchor: end }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
.dot { fill: currentColor }
.spots circle { fill: var(--card); stroke: currentColor; stroke-width: 2.5 }
.guide { stroke: var(--soft); stroke-dasharray: 3 3; visibility: hidden }
.tip { position: absolute; top: 16px; left: 0; z-index: 1; pointer-events: none; visibility: hidden;
  background: var(--ink); color: var(--page);
  border-radius: 8px; padding: 6px 10px; font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap }
.tip b { display: block }
details { margin-top: 16px; background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 12px 18px }
summary { cursor: pointer; font-weight: 600 }
.scroll { overflow: auto; max-height: 480px; margin-top: 10px }
table { border-collapse: collapse; width: 100%%; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 600 }
th:first-child, td:first-child { text-align: left }
%(classes)s
"""

_SCRIPT = """
const panels = JSON.parse(document.getElementById("data").textContent);
const drawings = [...document.querySelectorAll("svg[data-panel]")];
const make = (tag, text) => { const e = document.createElement(tag); e.textContent = text; return e; };

function hide() {
  for (const svg of drawings) {
    svg.querySelector(".guide").style.visibility = "hidden";
    svg.querySelector(".spots").replaceChildren();
    svg.parentNode.querySelector(".tip").style.visibility = "hidden";
  }
}

function point(svg, step, withTip) {
  const series = panels[+svg.dataset.panel];
  const hits = series.map((s, n) => [s.name, n, s.points.find(p => p.step === step)]).filter(h => h[2]);
  if (!hits.length) return;
  const x = hits[0][2].x, guide = svg.querySelector(".guide");
  guide.setAttribute("x1", x); guide.setAttribute("x2", x); guide.style.visibility = "visible";
  svg.querySelector(".spots").replaceChildren(...hits.map(([, n, p]) => {
    const spot = document.createElementNS(svg.namespaceURI, "circle");
    spot.setAttribute("cx", p.x); spot.setAttribute("cy", p.y); spot.setAttribute("r", 4.5);
    spot.setAttribute("class", "c" + n % COLOR_COUNT);
    return spot;
  }));
  if (!withTip) return;
  const tip = svg.parentNode.querySelector(".tip");
  tip.replaceChildren(make("b", "step " + step), ...hits.map(([name, , p]) => make("div", name + "  " + p.text)));
  const scale = svg.clientWidth / svg.viewBox.baseVal.width, right = x * scale > svg.clientWidth / 2;
  tip.style.left = x * scale + (right ? -12 - tip.offsetWidth : 12) + "px";
  tip.style.visibility = "visible";
}

for (const svg of drawings) {
  const steps = new Map(panels[+svg.dataset.panel].flatMap(s => s.points.map(p => [p.step, p.x])));
  const move = event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const step = [...steps].reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a)[0];
    hide();
    for (const other of drawings) point(other, step, other === svg);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", hide);
}
"""


def page(title: str, panels: Sequence[Panel], rows: Sequence[MetricsRow]) -> str:
    """The page as HTML."""
    drawn = "".join(_section(panel, n) for n, panel in enumerate(panels))
    steps = f"{len(rows)} steps logged, {rows[0].step} to {rows[-1].step}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_style()}</style></head>'
        f'<body><main><h1>{escape(title)}</h1><p class="sub">{steps}</p><div class="panels">{drawn}</div>'
        f"{_step_table(panels)}{_metric_table(rows)}</main>"
        f'<script type="application/json" id="data">{_data(panels)}</script>'
        f"<script>{_SCRIPT.replace('COLOR_COUNT', str(len(COLORS)))}</script></body></html>\n"
    )


def _style() -> str:
    light = " ".join(f"--c{n}: {color};" for n, color in enumerate(COLORS))
    dark = " ".join(f"--c{n}: {color};" for n, color in enumerate(_DARK))
    classes = " ".join(f".c{n} {{ color: var(--c{n}) }}" for n in range(len(COLORS)))
    return _STYLE % {"light": light, "dark": dark, "classes": classes}


def _data(panels: Sequence[Panel]) -> str:
    """The points for the script; `<` is escaped so that no name can close the script element."""
    data = [
        [
            {"name": series.name, "points": [point._asdict() for point in points]}
            for series, points in zip(panel.series, marks(panel), strict=True)
        ]
        for panel in panels
    ]
    return json.dumps(data).replace("<", "\\u003c")


def _section(panel: Panel, index: int) -> str:
    first, last = panel.series[0].points[0][1], panel.series[0].points[-1][1]
    legend = "".join(
        f'<span><i class="c{n % len(COLORS)}"></i>{escape(series.name)}</span>' for n, series in enumerate(panel.series)
    )
    return (
        f"<section><header><h2>{escape(panel.title)}</h2>"
        f'<span class="now"><small>{number(first)} →</small>{number(last)}</span></header>'
        f'<div class="legend">{legend}</div>'
        f'<div class="plot">{svg(panel, index)}<div class="tip"></div></div></section>'
    )


def _step_table(panels: Sequence[Panel]) -> str:
    columns = [series for panel in panels for series in panel.series]
    values = [dict(series.points) for series in columns]
    steps = sorted({step for column in values for step in column})
    body = [[str(step), *(number(c[step]) if step in c else "" for c in values)] for step in steps]
    return _table("Every step", ["step", *(series.name for series in columns)], body)


def _metric_table(rows: Sequence[MetricsRow]) -> str:
    names = sorted({name for row in rows for name in row.metrics})
    body = []
    for name in names:
        values = [v for row in rows if math.isfinite(v := row.metrics.get(name, math.nan))]
        if values:
            cells = (values[0], values[-1], min(values), fmean(values), max(values))
            body.append([one_line(name), *map(number, cells)])
    return _table("All metrics", ["metric", "first", "last", "min", "mean", "max"], body)


def _table(title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in body)
    return (
        f'<details><summary>{title}</summary><div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></details>"
    )


class CurveFiles(NamedTuple):
    """The files that were written; `png` is None without matplotlib."""

    png: Path | None
    html: Path


def write_curve(run_path: str | Path, title: str | None = None) -> CurveFiles:
    """Draw reward, validation success, tool success and turns into `curve.html` and `curve.png` of the run folder."""
    folder = RunFolder(run_path)
    rows = folder.read_metrics()
    panels = collect_panels(rows)
    if not panels:
        raise RallyError(f"{run_path} has no metrics to draw yet; let the run finish a step and try again")
    title = one_line(title or folder.path.resolve().name)
    html = folder.path / "curve.html"
    write_atomic(html, page(title, panels, rows))
    if importlib.util.find_spec("matplotlib") is None:
        return CurveFiles(None, html)
    png = folder.path / "curve.png"
    _draw_png(title, panels, png)
    return CurveFiles(png, html)


def collect_panels(rows: Sequence[MetricsRow]) -> list[Panel]:
    """The panels that have data."""
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
    series = []
    for name, label in names.items():
        values = ((row.step, row.metrics.get(name, math.nan)) for row in rows)
        points = tuple((step, value) for step, value in values if math.isfinite(value))
        if points:
            series.append(Series(one_line(label), points))
    return tuple(series)


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
    with atomic_file(path) as part:
        figure.savefig(part, format="png")


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
