r"""Geometry problems with drawn figures as rows, generated or converted from Geometry3K.

The numbers are only in the image, so no question can be answered without it. Every answer is checked by measuring the
figure. A problem belongs to the split `test` when the MD5 of its kind and numbers is a multiple of ten, however it is
rotated and drawn. Rows in the format of geometry3k (images, problem, answer) are converted to the same form.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rally.data.messages import load_images
from rally.data.row_files import DataError, Row, read_rows
from rally.recipes.data_files import WrittenFile, write_file
from rally.recipes.geometry.drawing import Figure, Point, at, drawn, middle, toward, turned
from rally.types import Message

DATA_SOURCE, GEOMETRY3K = "rally/geometry", "hiyouga/geometry3k"
SPLITS = ("train", "test")
SYSTEM = (
    "You are given a figure and a question about it. First think inside <think> and </think>. You may call tools: one "
    r"calculates, one shows you a part of the figure larger. End with the answer in \boxed{}, a number without a unit."
)
DEGREES = "What is x, in degrees?"
TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29))
_MISSES_IN_A_ROW = 4_000


class GeometryProblem(NamedTuple):
    """A problem. `name` is its kind and numbers; `measured` is the unknown, measured in the figure."""

    name: str
    level: int
    question: str
    answer: int
    figure: Figure
    measured: float


def triangle(rng: random.Random) -> GeometryProblem:
    """Two angles are given."""
    a, b = rng.randint(30, 100), rng.randint(30, 100)
    while a + b > 150:
        a, b = rng.randint(30, 100), rng.randint(30, 100)
    corners = _corners(a, b)
    labels = _inside(corners, (f"{a}°", f"{b}°", "x°"))
    figure = Figure(lines=_closed(corners), labels=labels)
    return GeometryProblem(f"triangle {a} {b}", 1, DEGREES, 180 - a - b, figure, _angle(corners[2], *corners[:2]))


def parallels(rng: random.Random) -> GeometryProblem:
    """A line crosses two parallel ones; x is on the same side of it, on the same or the other side of its line."""
    a, inner = rng.choice([*range(35, 81), *range(100, 146)]), rng.random() < 0.5
    low, along = (0.0, 0.0), at(a)
    high = (along[0] / along[1], 1.0)
    ends = (-0.8, max(1.0, high[0] + 1))
    lines = [((ends[0], y), (ends[1], y)) for y in (0.0, 1.0)]
    lines.append((toward(low, high, -0.5), toward(low, high, 1.5)))
    other = at(180 + a / 2 + 90) if inner else at(a / 2)
    labels = ((_moved(low, at(a / 2), 0.22), f"{a}°"), (_moved(high, other, 0.22), "x°"))
    arms = ((high[0] + 1, 1.0), low if inner else toward(low, high, 2.0))
    question = f"The two lines that do not meet are parallel. {DEGREES}"
    name = f"parallels {a} {'inner' if inner else 'outer'}"
    return GeometryProblem(
        name, 1, question, 180 - a if inner else a, Figure(tuple(lines), labels), _angle(high, *arms)
    )


def right_triangle(rng: random.Random) -> GeometryProblem:
    """Two sides are given; all three are whole numbers."""
    scale, unknown = rng.randint(1, 6), rng.randrange(3)
    a, b, c = (scale * side for side in rng.choice(TRIPLES))
    corners: list[Point] = [(0.0, 0.0), (float(b), 0.0), (0.0, float(a))]
    given = [f"{n}" if i != unknown else "x" for i, n in enumerate((a, b, c))]
    edges = ((corners[0], corners[2]), (corners[0], corners[1]), (corners[1], corners[2]))
    labels = _beside(edges, given, middle(*corners), 0.08 * c)
    figure = Figure(lines=_closed(corners), labels=labels, square=(corners[0], corners[1], corners[2]))
    question = "One angle is marked as a right angle. How long is the side marked x?"
    name = f"right {a} {b} {unknown}"
    return GeometryProblem(name, 2, question, (a, b, c)[unknown], figure, math.dist(*edges[unknown]))


def inscribed(rng: random.Random) -> GeometryProblem:
    """An angle at the centre of a circle, and one on it over the same arc."""
    a, reverse = rng.randint(20, 70), rng.random() < 0.5
    centre = (0.0, 0.0)
    left, right, top = at(270 - a), at(270 + a), at(90 + rng.uniform(-30, 30))
    lines = ((centre, left), (centre, right), (top, left), (top, right))
    shown = ("x°", f"{a}°") if reverse else (f"{2 * a}°", "x°")
    below = _moved(centre, at(270), 0.25)
    labels = ((below, shown[0]), (toward(top, middle(left, right), 0.25), shown[1]), (at(90, 0.14), "O"))
    corner = (centre, left, right) if reverse else (top, left, right)
    question = f"O is the centre of the circle. {DEGREES}"
    figure = Figure(lines=lines, labels=labels, circles=((centre, 1.0),))
    return GeometryProblem(f"inscribed {a} {reverse}", 2, question, 2 * a if reverse else a, figure, _angle(*corner))


def similar(rng: random.Random) -> GeometryProblem:
    """A line parallel to one side cuts a smaller triangle off; three lengths are given."""
    part, times = rng.randint(2, 9), rng.randint(2, 4)
    rest, short = part * (times - 1), rng.randint(2, 15)
    b, c = (0.0, 0.0), (float(short * times), 0.0)
    lean = math.radians(rng.randint(50, 100))
    a = (part * times * math.cos(lean), part * times * math.sin(lean))
    d, e = toward(a, b, 1 / times), toward(a, c, 1 / times)
    inside, gap = middle(a, b, c), 0.08 * max(math.dist(a, b), math.dist(b, c), math.dist(a, c))
    sides = _beside(((a, d), (d, b), (b, c)), (f"{part}", f"{rest}", "x"), inside, gap)
    labels = (*sides, *_beside(((d, e),), (f"{short}",), a, gap))
    figure = Figure(lines=(*_closed([a, b, c]), (d, e)), labels=labels)
    question = "The line inside the triangle is parallel to the side marked x. How long is x?"
    return GeometryProblem(f"similar {part} {times} {short}", 3, question, short * times, figure, math.dist(b, c))


def exterior(rng: random.Random) -> GeometryProblem:
    """The angle outside of an isosceles triangle, at its base, gives the one at its top."""
    outside = rng.randint(105, 155)
    corners = _corners(180 - outside, 180 - outside)
    beyond = toward(corners[0], corners[1], 1.5)
    outer = _moved(corners[1], at(outside / 2), 0.16)
    labels = ((outer, f"{outside}°"), *_inside(corners, ("", "", "x°")))
    strokes = (_stroke(corner, corners[2]) for corner in corners[:2])
    figure = Figure(lines=(*_closed(corners), (corners[1], beyond), *strokes), labels=labels)
    question = f"The two sides marked with a stroke are equally long. {DEGREES}"
    measured = _angle(corners[2], *corners[:2])
    return GeometryProblem(f"exterior {outside}", 3, question, 2 * outside - 180, figure, measured)


KINDS: tuple[Callable[[random.Random], GeometryProblem], ...] = (
    *(triangle, parallels, right_triangle),
    *(inscribed, similar, exterior),
)


def held_out(name: str) -> bool:
    """Whether a problem belongs to the test split."""
    return int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def problems(count: int, seed: int, split: str, levels: Sequence[int] = (1, 2, 3)) -> list[GeometryProblem]:
    """`count` different problems of these levels. A larger count only appends to them."""
    rng = random.Random(f"geometry:{seed}:{split}")
    found: dict[str, GeometryProblem] = {}
    misses = 0
    while len(found) < count and misses < _MISSES_IN_A_ROW:
        problem = rng.choice(KINDS)(rng)
        misses += 1
        if problem.level in levels and held_out(problem.name) == (split == "test") and problem.name not in found:
            found[problem.name], misses = problem, 0
    if len(found) < count:
        problem_kind = f"different {split} problems of level {', '.join(map(str, levels))}"
        raise DataError(f"only {len(found)} of {count} {problem_kind} were found; ask for fewer, or for more levels")
    return list(found.values())


def rows(count: int, seed: int, split: str, levels: Sequence[int] = (1, 2, 3)) -> Iterator[Row]:
    """Problems as rows, with rotated and drawn figures."""
    for index, problem in enumerate(problems(count, seed, split, levels)):
        rng = random.Random(f"{seed}:{problem.name}")
        picture = drawn(turned(problem.figure, rng.uniform(0, 360), mirrored=rng.random() < 0.5))
        extra = {"split": split, "index": index, "level": problem.level, "kind": problem.name.split()[0]}
        yield _row(DATA_SOURCE, problem.question, [picture], str(problem.answer), extra)


def converted(source: Path, split: str) -> Iterator[Row]:
    """The rows of a folder with `<split>.parquet` or `.jsonl` and the columns images, problem and answer."""
    names = [f"{split}.parquet", f"{split}.jsonl", f"data/{split}-00000-of-00001.parquet"]
    file = next((source / name for name in names if (source / name).is_file()), None)
    if file is None:
        raise DataError(f"{source} has no geometry problems; it must have one of {', '.join(names)}")
    for index, row in enumerate(read_rows(file)):
        problem, answer = row.get("problem"), row.get("answer")
        if not isinstance(problem, str) or not isinstance(answer, str):
            raise DataError(f"{file}, row {index}: a row must have images, and a problem and an answer as text")
        pictures = [image.read() for image in load_images(row, "images", file.parent)]
        question = problem.replace("<image>", "").strip()
        yield _row(GEOMETRY3K, question, pictures, answer, {"split": split, "index": index})


def _row(source: str, question: str, pictures: Sequence[bytes], answer: str, extra: Row) -> Row:
    prompt: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "<image>" * len(pictures) + question},
    ]
    return {
        "data_source": source,
        "prompt": prompt,
        "images": [{"bytes": picture} for picture in pictures],
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {**extra, "question": question, "answer": answer},
    }


def _corners(a: int, b: int) -> list[Point]:
    """A triangle with a base of length 1 and these angles at the base."""
    left, right = math.radians(a), math.radians(b)
    side = math.sin(right) / math.sin(left + right)
    return [(0.0, 0.0), (1.0, 0.0), (side * math.cos(left), side * math.sin(left))]


def _closed(corners: Sequence[Point]) -> tuple[tuple[Point, Point], ...]:
    return tuple(zip(corners, [*corners[1:], corners[0]], strict=True))


def _inside(corners: Sequence[Point], texts: Sequence[str]) -> tuple[tuple[Point, str], ...]:
    """A text in each corner, a little towards the middle."""
    centre = middle(*corners)
    return tuple((toward(corner, centre, 0.42), text) for corner, text in zip(corners, texts, strict=True) if text)


def _beside(
    edges: Sequence[tuple[Point, Point]], texts: Sequence[str], inside: Point, gap: float
) -> tuple[tuple[Point, str], ...]:
    """A text at the middle of each edge, on the side away from `inside`."""
    labels = []
    for (a, b), text in zip(edges, texts, strict=True):
        here, across = middle(a, b), _across(a, b)
        away = (here[0] - inside[0]) * across[0] + (here[1] - inside[1]) * across[1]
        labels.append((_moved(here, across, math.copysign(gap, away)), text))
    return tuple(labels)


def _stroke(a: Point, b: Point) -> tuple[Point, Point]:
    """A short line across the middle of the one from a to b."""
    here, across = middle(a, b), _across(a, b)
    return _moved(here, across, -0.04), _moved(here, across, 0.04)


def _across(a: Point, b: Point) -> Point:
    return (-(b[1] - a[1]) / math.dist(a, b), (b[0] - a[0]) / math.dist(a, b))


def _moved(point: Point, direction: Point, by: float) -> Point:
    return (point[0] + by * direction[0], point[1] + by * direction[1])


def _angle(corner: Point, a: Point, b: Point) -> float:
    """Between the rays to a and to b, in degrees."""
    one, two = (math.atan2(p[1] - corner[1], p[0] - corner[0]) for p in (a, b))
    turn = abs(math.degrees(one - two)) % 360
    return min(turn, 360 - turn)


class GeometrySizes(NamedTuple):
    train: int
    test: int


def write_geometry(
    out: Path, sizes: GeometrySizes, levels: Sequence[int], source: Path | None, seed: int
) -> list[WrittenFile]:
    """Write train.parquet and test.parquet with images: generated, or from a folder in geometry3k's format."""
    counts = dict(zip(SPLITS, sizes, strict=True))
    return [
        write_file(
            out / f"{split}.parquet",
            converted(source, split) if source else rows(count, seed, split, levels),
        )
        for split, count in counts.items()
    ]
