"""Ranks that hold one model together, as seen from one of them, and tensors that are sharded over them.

A rank is one of the processes that hold the policy together. Rank 0 is the run; the others execute the messages that it
broadcasts. A sharded module carries its `Ranks` with it; any other module is on one rank, `ALONE`.

Shapes: X any numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

CARRIED = "rally_ranks"
Found = TypeVar("Found")


class Message:
    """Base of what rank 0 broadcasts to all ranks."""


class Ranks(Protocol):
    """Those that hold a policy together, seen from one of them."""

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    def begin(self, plan: Message) -> None:
        """From now on all ranks are there, and each builds what the plan says."""
        ...

    def spread(self, model: PreTrainedModel) -> None:
        """Let a module that all ranks have loaded lie on all of them, and carry them with it."""
        ...

    def watching(self) -> AbstractAsyncContextManager[None]:
        """What is awaited within ends, with the reason, as soon as a rank is lost."""
        ...

    def doing(self, order: Message) -> AbstractContextManager[None]:
        """What all ranks do within it is `order`; rank 0 tells the others, who do the same."""
        ...

    def within(self, model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
        """`work(model, *given)`, which may use weights that no layer of the module would ask for."""
        ...

    def gathered(self, numbers_X: Tensor) -> list[Tensor]:
        """Of every rank, as many numbers as it has, on the CPU in float64."""
        ...


class Alone:
    """One process that holds everything."""

    number, count = 0, 1

    def begin(self, plan: Message) -> None:
        """There is nobody to wait for."""

    def spread(self, model: PreTrainedModel) -> None:
        """It lies where it was loaded."""

    def watching(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def doing(self, order: Message) -> AbstractContextManager[None]:
        return nullcontext()

    def within(self, model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
        return work(model, *given)

    def gathered(self, numbers_X: Tensor) -> list[Tensor]:
        return [numbers_X.detach().double().cpu()]


ALONE = Alone()


def ranks_of(model: PreTrainedModel) -> Ranks:
    found: Ranks = getattr(model, CARRIED, ALONE)
    return found


def whole(value: Tensor) -> Tensor:
    """A tensor that may lie on several ranks, in main memory of rank 0; all of them must ask. Others get nothing."""
    if not isinstance(value, DTensor):
        return value
    full: Tensor = value.full_tensor().detach()
    return full.cpu() if value.device_mesh.get_rank() == 0 else torch.empty(0)


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, where `like` lies on several ranks."""
    if not isinstance(like, DTensor):
        return value
    here = value.to(device=like.device, dtype=like.dtype)
    part = distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()


def model_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by name, those that lie on several ranks gathered one by one. Weights that are one stay one."""
    first: dict[int, str] = {}
    same = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        known = same.get(name, name)
        found[name] = found[known] if known in found else whole(value)
    return found
