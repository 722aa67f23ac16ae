"""Detects diverged gradients. No step is taken from a gradient that is not finite or explodes; its batch is saved.

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

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rally.train.packing import Row, joined, per_token
from rally.types import RallyError
from rally.util.atomic_files import atomic_file, write_atomic

WINDOW = 64  # norms in the running median
ENOUGH = 8  # fewest norms for a meaningful median


@dataclass(frozen=True, kw_only=True)
class GradientLimits:
    """`factor`: a norm may be at most this many times the larger of the median of earlier norms and the clipping norm.
    `highest`: an absolute limit. None: no limit."""

    factor: float | None = 1000.0
    highest: float | None = None


class Tried(NamedTuple):
    """The rows of one micro-batch, and the loss of each of their sampled tokens."""

    rows: Sequence[Row]
    loss_M: Tensor


class DivergedError(RallyError):
    """A gradient that must not be applied. `tried` holds the rows it was computed from."""

    def __init__(self, problem: str, tried: Sequence[Tried] = (), saved: str = "") -> None:
        self.problem, self.tried = problem, tried
        where = f"; its batch {saved}" if saved else ""
        super().__init__(
            f"{problem}, so the step was not applied{where}; lower the learning rate, or check the rewards and "
            "the data of this step"
        )


def gradient_problem(norm: float, earlier: Sequence[float], clip: float, limits: GradientLimits) -> str | None:
    """Why a gradient of this norm must not be applied, given the norms of earlier steps; None if it may be."""
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
        f"median in the last {len(earlier)} steps ({usual:.4g}) and the clipping norm ({clip:g})"
    )


@contextmanager
def keeping_diverged(run_dir: Path, step: int, sources: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Saves the batch of a DivergedError and raises it again with the name of the file.

    `sources` describe the episodes by their numbers in the batch.
    """
    try:
        yield
    except DivergedError as error:
        try:
            saved = f"is in {_save(run_dir / 'diverged', step, error, sources)} and the .json beside it"
        except (OSError, SafetensorError) as failure:  # safetensors raises its own error for a full disk
            saved = f"could not be saved ({failure})"
        raise DivergedError(error.problem, error.tried, saved) from error


def _save(folder: Path, step: int, error: DivergedError, sources: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.safetensors"
    rows = [row for part in error.tried for row in part.rows]
    tensors = batch_tensors(error.tried)
    with atomic_file(path) as part:
        save_file(tensors, part)
    description = {
        "step": step,
        "problem": error.problem,
        "sources": {number: dict(sources[number]) for number in dict.fromkeys(row.episode for row in rows)},
        "not_finite": {name: int((~x.isfinite()).sum()) for name, x in tensors.items() if x.is_floating_point()},
    }
    write_atomic(path.with_suffix(".json"), json.dumps(description, indent=1) + "\n")
    return path


def batch_tensors(tried: Sequence[Tried]) -> dict[str, Tensor]:
    """The rows, concatenated: `lengths_R` divides the tensors per token; those in M are per sampled token."""
    rows = [row for part in tried for row in part.rows]
    none = torch.zeros(0)
    return {
        "lengths_R": torch.tensor([len(row.ids) for row in rows], dtype=torch.long),
        "episode_R": torch.tensor([row.episode for row in rows], dtype=torch.long),
        "ids_T": torch.from_numpy(joined((row.ids for row in rows), np.int64)),
        "sampled_T": torch.from_numpy(joined((row.mask for row in rows), np.bool_)),
        "old_logprobs_M": torch.from_numpy(joined((row.logprobs for row in rows), np.float32)),
        "advantages_M": torch.from_numpy(per_token(rows, "advantages", 0.0, np.float32)),
        "weights_M": torch.from_numpy(per_token(rows, "weights", 1.0, np.float32)),
        "losses_M": torch.cat([none, *(part.loss_M.detach().float().cpu() for part in tried)]),
    }
