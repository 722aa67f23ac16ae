"""No step is taken from a gradient that is not finite or that explodes; what it was computed from is kept on disk.

Shapes: R rows, T tokens of all of them, M sampled tokens of all of them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rally.train.packing import Row
from rally.types import RallyError
from rally.util.jsonl import write_atomic

WINDOW = 64  # norms that the running median is taken of
ENOUGH = 8  # norms without which there is no median to speak of


@dataclass(frozen=True, kw_only=True)
class GradientLimits:
    """`factor`: how many times the median of earlier norms a norm may be, and how many times the norm that is clipped
    to: what clipping leaves alone is no explosion. `highest`: what it may be at all. None: no such limit."""

    factor: float | None = 1000.0
    highest: float | None = None


class Tried(NamedTuple):
    """The rows of one micro-batch, and what each of their sampled tokens added to the loss."""

    rows: Sequence[Row]
    loss_M: Tensor


class DivergedError(RallyError):
    """A gradient that no step may be taken from. `tried` is what it was computed from."""

    def __init__(self, problem: str, tried: Sequence[Tried] = (), kept: str = "") -> None:
        self.problem, self.tried = problem, tried
        where = f"; what it was computed from {kept}" if kept else ""
        super().__init__(
            f"{problem}, so the step was not applied{where}; lower the learning rate, or look at the rewards and the "
            "data of this step"
        )


def gradient_problem(norm: float, earlier: Sequence[float], clip: float, limits: GradientLimits) -> str | None:
    """What is wrong with a gradient of this norm, `earlier` ones being those of the steps before; None: nothing."""
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    if limits.highest is not None and norm > limits.highest:
        return f"the gradient norm is {norm:.4g}, over trainer.guards.max_grad_norm={limits.highest:g}"
    if limits.factor is None or len(earlier) < ENOUGH:
        return None
    usual = statistics.median(earlier)
    if norm <= limits.factor * max(usual, clip):
        return None
    return (
        f"the gradient norm is {norm:.4g}, over trainer.guards.grad_norm_factor={limits.factor:g} times both its "
        f"median in the last {len(earlier)} steps ({usual:.4g}) and what it is clipped to ({clip:g})"
    )


@contextmanager
def keeping_diverged(run_dir: Path, step: int, sources: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """A DivergedError from within is told again with the files that hold its batch.

    `sources` say what a row's `episode` number stands for.
    """
    try:
        yield
    except DivergedError as error:
        try:
            kept = f"is in {_save(run_dir / 'diverged', step, error, sources)} and the .json beside it"
        except (OSError, SafetensorError) as refused:  # the latter says what the disk refused
            kept = f"could not be kept ({refused})"
        raise DivergedError(error.problem, error.tried, kept) from error


def _save(folder: Path, step: int, error: DivergedError, sources: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.safetensors"
    rows = [row for part in error.tried for row in part.rows]
    tensors = batch_tensors(error.tried)
    aside = path.with_name(f".{path.name}.part")
    save_file(tensors, aside)
    aside.replace(path)
    told = {
        "step": step,
        "problem": error.problem,
        "sources": {number: dict(sources[number]) for number in dict.fromkeys(row.episode for row in rows)},
        "not_finite": {name: int((~x.isfinite()).sum()) for name, x in tensors.items() if x.is_floating_point()},
    }
    write_atomic(path.with_suffix(".json"), json.dumps(told, indent=1) + "\n")
    return path


def batch_tensors(tried: Sequence[Tried]) -> dict[str, Tensor]:
    """Rows one after the other: `lengths_R` cuts what is per token, and what is `_M` belongs to the sampled tokens."""
    rows = [row for part in tried for row in part.rows]
    positions = [set(row.sampled) for row in rows]
    none = torch.zeros(0)
    return {
        "lengths_R": torch.tensor([len(row.ids) for row in rows], dtype=torch.long),
        "episode_R": torch.tensor([row.episode for row in rows], dtype=torch.long),
        "ids_T": torch.tensor([token for row in rows for token in row.ids], dtype=torch.long),
        "sampled_T": torch.tensor(
            [i in at for row, at in zip(rows, positions, strict=True) for i in range(len(row.ids))]
        ),
        "old_logprobs_M": torch.tensor([p for row in rows for p in row.logprobs]),
        "advantages_M": _per_token(rows, [row.advantages for row in rows], 0.0),
        "weights_M": _per_token(rows, [row.weights for row in rows], 1.0),
        "losses_M": torch.cat([none, *(part.loss_M.detach().float().cpu() for part in tried)]),
    }


def _per_token(rows: Sequence[Row], given: Sequence[Sequence[float]], usual: float) -> Tensor:
    return torch.tensor(
        [x for row, values in zip(rows, given, strict=True) for x in values or [usual] * len(row.sampled)]
    )
