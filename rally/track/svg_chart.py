"""Renders line charts as SVG, complete without scripts or network access."""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

from rally.track.display_text import number

COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#db2777", "#0891b2")

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 42
MAX_DOTS = 40  # with more points than this the dots would cover the line


class Series(NamedTuple):
    """One line: (step, value) points in order of steps, all finite, at least one."""

    name: str
    points: tuple[tuple[int, float], ...]


class Panel(NamedTuple):
    """One drawing with its lines. `steps` is the x axis, the same in all panels of a run."""

    title: str
    y_label: str
    series: tuple[Series, ...]
    steps: tuple[int, int]


class Mark(NamedTuple):
    """A point of the drawing and its tooltip."""

    step: int
    x: float
    y: float
    text: str


def bounds(panel: Panel) -> tuple[float, float]:
    """The range of the y axis, ending on ticks. Shares use the whole of [0, 1], so that small changes look small."""
    values = [value for series in panel.series for _, value in series.points]
    low, high = min(0.0, *values), max(0.0, *values)
    if low == 0 and high <= 1:
        return 0.0, 1.0
    step = _tick_size(high - low)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def marks(panel: Panel) -> list[list[Mark]]:
    """For each series its points in drawing coordinates."""
    first, last = panel.steps
    low, high = bounds(panel)
    return [
        [Mark(step, _x(step, first, last), _y(value, low, high), number(value)) for step, value in series.points]
        for series in panel.series
    ]


def svg(panel: Panel, index: int) -> str:
    """The drawing. `data-panel` is how the page's script finds its points."""
    label = escape(f"{panel.title}: {panel.y_label} by training step")
    lines = "".join(_line(points, n) for n, points in enumerate(marks(panel)))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" data-panel="{index}">'
        f'{_y_axis(panel)}{_x_axis(panel)}{lines}<line class="guide" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<g class="spots"></g></svg>'
    )


def _line(points: list[Mark], n: int) -> str:
    color = f"c{n % len(COLORS)}"
    path = " ".join(f"{p.x:.1f},{p.y:.1f}" for p in points)
    drawn = f'<polyline class="line {color}" points="{path}"/>'
    if len(points) <= MAX_DOTS:
        drawn += "".join(f'<circle class="dot {color}" cx="{p.x:.1f}" cy="{p.y:.1f}" r="2.6"/>' for p in points)
    return drawn


def _y_axis(panel: Panel) -> str:
    low, high = bounds(panel)
    size = _tick_size(high - low)
    ticks = [low + i * size for i in range(round((high - low) / size) + 1)]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    drawn = f'<text class="name" transform="translate(14 {middle}) rotate(-90)">{escape(panel.y_label)}</text>'
    for tick in ticks:
        y = _y(tick, low, high)
        drawn += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        drawn += f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{round(tick, 12) + 0.0:g}</text>'
    return drawn


def _x_axis(panel: Panel) -> str:
    first, last = panel.steps
    size = max(1, round(_tick_size(last - first)))
    ticks = range(math.ceil(first / size) * size, last + 1, size)
    drawn = f'<text class="name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">training step</text>'
    for tick in ticks:
        drawn += f'<text class="tick" x="{_x(tick, first, last):.1f}" y="{HEIGHT - BOTTOM + 18}">{tick}</text>'
    return drawn


def _x(step: float, first: int, last: int) -> float:
    share = (step - first) / (last - first) if last > first else 0.5
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _tick_size(span: float) -> float:
    """The 1, 2 or 5 times a power of ten that divides `span` into about five parts."""
    if span <= 0:
        return 1.0
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if rough <= power * factor * 1.0000001)
