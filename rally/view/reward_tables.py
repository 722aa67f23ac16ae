"""Rewards over steps: their distribution, and how often each task is passed.

Both count every episode of a kind (training or validation) but greedy baselines. Episodes without a reward are counted
separately, never as a reward of 0.
"""

from __future__ import annotations

import math
import sqlite3
from itertools import pairwise
from typing import Any

from rally.types import RallyError

Json = dict[str, Any]
PASSED = 1.0  # the score with which an episode passes, unless another is asked for
ROUNDING = 1e-9  # a sum of parts, such as 0.7 + 0.2 + 0.1, may be slightly below its value
MOST_VALUES = 12  # with more different rewards than this, they are counted in bins
BINS = 20
SMALLEST = 1e-290  # of a bin
_OF_KIND = "FROM episodes WHERE validate = ? AND baseline = 0"


def reward_histograms(db: sqlite3.Connection, kind: str) -> Json:
    """The distribution of the rewards of each step. `bins` are [low, high] of rewards, both included where low is high;
    otherwise high belongs to the next bin, and in the last to it. `steps` are [step, unscored, counts by bin]."""
    validate = _validate(kind)
    found = db.execute(f"SELECT DISTINCT reward {_OF_KIND} AND reward IS NOT NULL LIMIT ?", (validate, MOST_VALUES + 1))
    values = sorted(value for (value,) in found)
    unscored = "SELECT step, count(*) - count(reward) " + _OF_KIND + " GROUP BY step ORDER BY step"
    steps = {step: [step, missing, []] for step, missing in db.execute(unscored, (validate,))}
    bins, place, bound = _bins(db, validate, values)
    for step in steps.values():
        step[2] = [0] * len(bins)
    counted = f"SELECT step, {place} AS bin, count(*) {_OF_KIND} AND reward IS NOT NULL GROUP BY step, bin"
    places = {value: at for at, value in enumerate(values)} if not bound else None
    for step, at, count in db.execute(counted, (*bound, validate)):
        steps[step][2][at if places is None else places[at]] += count
    return {"bins": bins, "steps": list(steps.values())}


def _bins(
    db: sqlite3.Connection, validate: int, values: list[float]
) -> tuple[list[list[float]], str, tuple[float, ...]]:
    """The bins, and SQL for the bin of a reward with its parameters; without parameters, for the reward itself."""
    if len(values) <= MOST_VALUES:
        return [[value, value] for value in values], "reward", ()
    low, high = db.execute(f"SELECT min(reward), max(reward) {_OF_KIND}", (validate,)).fetchone()
    size = _round_size(max(high / BINS - low / BINS, SMALLEST))
    first = math.floor(low / size + ROUNDING)
    last = max(0, math.ceil(high / size - first - ROUNDING) - 1)
    digits = 6 - math.floor(math.log10(size))
    edges = [round((first + at) * size, digits) for at in range(last + 2)]
    place = f"max(0, min({last}, CAST(reward / ? - ? AS INTEGER)))"
    return [list(pair) for pair in pairwise(edges)], place, (size, first - ROUNDING)


def _round_size(size: float) -> float:
    """The next size of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size))
    return float(next(factor * power for factor in (1, 2, 5, 10) if size <= factor * power * (1 + ROUNDING)))


def pass_rates(db: sqlite3.Connection, kind: str, threshold: str = "") -> Json:
    """By task, [step, scored, passed, all episodes] of each step. An episode passes with a score of `threshold`."""
    validate, passed = _validate(kind), _threshold(threshold)
    cells: dict[str, list[list[int]]] = {}
    found = db.execute(
        f"SELECT task, step, count(score), total(score >= ?), count(*) {_OF_KIND} GROUP BY task, step",
        (passed - ROUNDING, validate),
    )
    for task, step, scored, good, count in found:
        cells.setdefault(task, []).append([step, scored, int(good), count])
    questions = db.execute(
        f"SELECT task, question FROM episodes WHERE n IN (SELECT min(n) {_OF_KIND} GROUP BY task)", (validate,)
    )
    asked = dict(questions.fetchall())
    (highest,) = db.execute(f"SELECT max(score) {_OF_KIND}", (validate,)).fetchone()
    tasks = [{"task": task, "question": asked[task], "cells": sorted(own)} for task, own in cells.items()]
    return {"threshold": passed, "highest": highest, "tasks": tasks}


def _validate(kind: str) -> int:
    if kind not in ("train", "val"):
        raise RallyError(f"kind={kind} is unknown; it is train or val")
    return int(kind == "val")


def _threshold(text: str) -> float:
    try:
        value = float(text) if text else PASSED
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RallyError(f"pass={text} is not a number; write the score with which an episode passes, such as 0.5")
    return value
