"""Rows of environments: a row holds only environment, id and seed, and the number of seats of a match. Weights divide
the rows among the environments.

Row i of a run is a pure function of the sizes, seeds and weights. The seeds of training and of validation are disjoint.
An environment with tasks of its own uses the seed as the number of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from rally.data import RowSet, TaskSet
from rally.data.row_files import RowLocation
from rally.envs.base import EnvError
from rally.envs.session import Environments
from rally.types import Task

VAL_SEED = 1_000_000_000  # of environments whose tasks are made from seeds


@dataclass(frozen=True, kw_only=True)
class SeedPlan:
    """How many rows a run has, and where their seeds begin. `weights` are by label, and so are `val_sizes`, which hold
    instead of `val_size`."""

    weights: Mapping[str, float]
    train_size: int
    train_seed: int = 0
    val_size: int = 0
    val_seed: int | None = None
    val_sizes: Mapping[str, int] = field(default_factory=dict)


class EnvRows:
    """The rows of several environments, interleaved in proportion to their number."""

    def __init__(self, seeds: Mapping[str, range]) -> None:
        placed = [
            ((i + 0.5) / len(some), n, seed) for n, some in enumerate(seeds.values()) for i, seed in enumerate(some)
        ]
        self._labels = list(seeds)
        self._order = [(n, seed) for _, n, seed in sorted(placed)]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> dict[str, Any]:
        label, seed = self._order[number]
        return {"env": self._labels[label], "id": f"{self._labels[label]}:{seed}", "seed": seed}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))


def env_tasks(
    environments: Environments,
    plan: SeedPlan,
    *,
    validate: bool = False,
    complete: Callable[[Task], Task] = lambda task: task,
) -> TaskSet:
    """The tasks of training or validation. Their prompts are empty until they are played, unless `complete` adds
    them."""
    train, val = seed_ranges(environments, plan)
    chosen = {label: seeds for label, seeds in (val if validate else train).items() if len(seeds)}

    seats = {label: 1 if validate else environments.seats(label) for label in chosen}

    def task(place: RowLocation, row: dict[str, Any]) -> Task:
        if seats[row["env"]] > 1:
            row = {**row, "seats": seats[row["env"]]}
        return complete(Task(id=row["id"], data_source=row["env"], prompt=(), row=row))

    return RowSet(["environments"], task, EnvRows(chosen))


def seed_ranges(environments: Environments, plan: SeedPlan) -> tuple[dict[str, range], dict[str, range]]:
    """The training seeds and the validation seeds of each environment. Raises EnvError if they overlap, also under two
    labels, or if an environment has not enough tasks."""
    train: dict[str, range] = {}
    val: dict[str, range] = {}
    for label, size in divided(plan.weights, plan.train_size).items():
        tasks = environments.tasks(label)
        held_out, first = plan.val_sizes.get(label, plan.val_size), plan.val_seed
        if first is None:
            first = VAL_SEED if tasks is None else max(0, len(tasks) - held_out)
        train[label] = range(plan.train_seed, plan.train_seed + size)
        val[label] = range(first, first + held_out)
        _check(label, train[label], val[label], None if tasks is None else len(tasks))
    for label, other in permutations(plan.weights, 2):
        if _overlap(train[label], val[other]) and environments.same_tasks(label, other):
            raise EnvError(
                f"{label} and {other} are the same tasks, and rows {_shown(train[label])} for training overlap rows "
                f"{_shown(val[other])} for validation; lower env.train_size, or set env.val_seed"
            )
    return train, val


def divided(weights: Mapping[str, float], size: int) -> dict[str, int]:
    """`size` rows divided by the weights, the rest by the largest remainders."""
    total = sum(weights.values())
    exact = {label: size * weight / total if total else 0.0 for label, weight in weights.items()}
    counts = {label: int(share) for label, share in exact.items()}
    left = (size if total else 0) - sum(counts.values())
    for label in sorted(exact, key=lambda name: counts[name] - exact[name])[:left]:
        counts[label] += 1
    for label, weight in weights.items():
        if weight and not counts[label]:
            raise EnvError(f"env.train_size={size} leaves no row for {label} with its weight {weight:g}; raise it")
    return counts


def _check(label: str, train: range, val: range, tasks: int | None) -> None:
    if tasks is not None and max(train.stop if train else 0, val.stop if val else 0) > tasks:
        raise EnvError(
            f"{label} has {tasks} tasks, but rows {_shown(train)} for training and {_shown(val)} for validation are "
            "asked for; lower env.train_size, or env.val_size or the val_size of its entry"
        )
    if _overlap(train, val):
        raise EnvError(
            f"the seeds {_shown(train)} of training and {_shown(val)} of validation of {label} overlap; change "
            "env.val_seed, env.train_seed or the sizes"
        )


def _overlap(train: range, val: range) -> bool:
    return bool(train and val) and train.start < val.stop and val.start < train.stop


def _shown(seeds: range) -> str:
    return f"{seeds.start} to {seeds.stop - 1}" if seeds else "none"
