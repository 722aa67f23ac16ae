"""Draws a figure of lines, circles and labels as a PNG, deterministically.

The whole figure fits into the image, and text is upright. Coordinates are mathematical: x to the right, y up.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rally.images.loading import load_pil

Point = tuple[float, float]
SIDE, MARGIN, TEXT, STROKE = 336, 36, 18, 2  # pixels
MARK = 14  # the little square of a right angle


class Figure(NamedTuple):
    """A figure. `square`: a corner with a right angle, and the ends of its two sides."""

    lines: tuple[tuple[Point, Point], ...]
    labels: tuple[tuple[Point, str], ...]
    circles: tuple[tuple[Point, float], ...] = ()
    square: tuple[Point, Point, Point] | None = None


def at(degrees: float, far: float = 1.0) -> Point:
    """The point in this direction from the origin."""
    return (far * math.cos(math.radians(degrees)), far * math.sin(math.radians(degrees)))


def middle(*points: Point) -> Point:
    return (sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points))


def toward(a: Point, b: Point, share: float) -> Point:
    """The point at this share of the way from a to b."""
    return (a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]))


def turned(figure: Figure, degrees: float, *, mirrored: bool) -> Figure:
    """The figure rotated and optionally mirrored. Angles and lengths do not change."""
    cos, sin = at(degrees)

    def move(point: Point) -> Point:
        x, y = (-point[0] if mirrored else point[0]), point[1]
        return (cos * x - sin * y, sin * x + cos * y)

    return _mapped(figure, move, 1.0)


def drawn(figure: Figure) -> bytes:
    """The figure as a PNG."""
    from PIL import ImageDraw, ImageFont

    picture = load_pil().new("RGB", (SIDE, SIDE), "white")
    figure = _fitted(figure)
    pen = ImageDraw.Draw(picture)
    for line in figure.lines:
        pen.line(line, fill="black", width=STROKE)
    for (x, y), r in figure.circles:
        pen.ellipse((x - r, y - r, x + r, y + r), outline="black", width=STROKE)
    if figure.square is not None:
        pen.line(_square(*figure.square), fill="black", width=1)
    font = ImageFont.load_default(size=TEXT)
    for place, text in figure.labels:
        _write(pen, place, text, font)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _write(pen: Any, place: Point, text: str, font: Any) -> None:
    """Write text on white, so that a line behind a number does not make it unreadable."""
    left, top, right, bottom = pen.textbbox(place, text, font=font, anchor="mm")
    pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), fill="white")
    pen.text(place, text, fill="black", font=font, anchor="mm")


def _fitted(figure: Figure) -> Figure:
    """The figure in pixels, y down, as large as the margin allows."""
    points = [*(p for line in figure.lines for p in line), *(p for p, _ in figure.labels)]
    for (x, y), r in figure.circles:
        points += [(x - r, y - r), (x + r, y + r)]
    low = (min(p[0] for p in points), min(p[1] for p in points))
    size = (max(p[0] for p in points) - low[0], max(p[1] for p in points) - low[1])
    scale = (SIDE - 2 * MARGIN) / max(size)
    left, top = ((SIDE - scale * extent) / 2 for extent in size)

    def move(point: Point) -> Point:
        return (left + scale * (point[0] - low[0]), SIDE - top - scale * (point[1] - low[1]))

    return _mapped(figure, move, scale)


def _mapped(figure: Figure, move: Callable[[Point], Point], scale: float) -> Figure:
    return Figure(
        lines=tuple((move(a), move(b)) for a, b in figure.lines),
        labels=tuple((move(place), text) for place, text in figure.labels),
        circles=tuple((move(centre), scale * radius) for centre, radius in figure.circles),
        square=None if figure.square is None else _triple([move(point) for point in figure.square]),
    )


def _triple(points: Sequence[Point]) -> tuple[Point, Point, Point]:
    a, b, c = points
    return a, b, c


def _square(corner: Point, a: Point, b: Point) -> list[Point]:
    one, two = (toward(corner, end, min(0.5, MARK / math.dist(corner, end))) for end in (a, b))
    across = (one[0] + two[0] - corner[0], one[1] + two[1] - corner[1])
    return [one, across, two]
