"""The ranks that hold one model together, as seen from one of them, and tensors that are sharded over them.

A rank is one of the processes that hold the policy together. Rank 0 runs the training loop; the others execute the
messages that it broadcasts. A sharded module carries its `Ranks` as an attribute; any other module belongs to `ALONE`,
the single process.

Shapes: X any numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rally.models.sequence_parallel import SequenceGroup

RANKS_ATTRIBUTE = "rally_ranks"
T = TypeVar("T")


class Message:
    """Base of what rank 0 broadcasts to all ranks."""


M = TypeVar("M", bound=Message)


class Ranks(Protocol):
    """The processes that hold a policy together, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def sequence_group(self) -> SequenceGroup | None:
        """The ranks that compute the same micro-batches as this one, each a part of the tokens; None: only this one."""
        ...

    def start(self, plan: Message) -> None:
        """Start all ranks; each builds what the plan describes."""
        ...

    def shard(self, model: PreTrainedModel) -> None:
        """Shard a module that every rank has loaded, and attach these ranks to it."""
        ...

    def watch(self) -> AbstractAsyncContextManager[None]:
        """A context whose awaited work is cancelled, with the reason, as soon as a rank is lost."""
        ...

    def broadcast(self, message: Message) -> AbstractContextManager[None]:
        """A context for the computation that `message` names. Rank 0 sends the message; the others run the same
        computation."""
        ...

    def scatter(self, messages: Sequence[M]) -> M:
        """Rank 0 gives one message for each rank; the others give none. Each rank gets its own."""
        ...

    def summon(self, model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
        """`work(model, *args)` with the weights gathered that belong to no layer."""
        ...

    def all_gather(self, numbers_X: Tensor) -> list[Tensor]:
        """The numbers of every rank, on the CPU in float64. Ranks may differ in how many they have."""
        ...


class Alone:
    """A single process that holds everything."""

    rank, world_size = 0, 1
    sequence_group = None

    def start(self, plan: Message) -> None:
        """There are no other ranks to start."""

    def shard(self, model: PreTrainedModel) -> None:
        """The module stays whole on its device."""

    def watch(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def broadcast(self, message: Message) -> AbstractContextManager[None]:
        return nullcontext()

    def scatter(self, messages: Sequence[M]) -> M:
        return messages[0]

    def summon(self, model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
        return work(model, *args)

    def all_gather(self, numbers_X: Tensor) -> list[Tensor]:
        return [numbers_X.detach().double().cpu()]


ALONE = Alone()


def ranks_of(model: PreTrainedModel) -> Ranks:
    ranks: Ranks = getattr(model, RANKS_ATTRIBUTE, ALONE)
    return ranks


def sequence_size(ranks: Ranks) -> int:
    """How many ranks compute a micro-batch together."""
    return 1 if ranks.sequence_group is None else ranks.sequence_group.size


def gather_groups(ranks: Ranks, numbers_X: Tensor) -> list[Tensor]:
    """The numbers of the ranks of different micro-batches: all ranks of a sequence-parallel group have the same ones,
    which count once."""
    return ranks.all_gather(numbers_X)[:: sequence_size(ranks)]


def full_tensor(value: Tensor) -> Tensor:
    """A tensor gathered into main memory of rank 0 if it is sharded. All ranks must call it; the others get an empty
    tensor."""
    if not isinstance(value, DTensor):
        return value
    full: Tensor = value.full_tensor().detach()
    return full.cpu() if value.device_mesh.get_rank() == 0 else torch.empty(0)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a full tensor, laid out as `like`; the tensor itself if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return value
    here = value.to(device=like.device, dtype=like.dtype)
    part = distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()


def model_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by name; sharded ones are gathered one by one. Tied weights stay one tensor."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        known = tied.get(name, name)
        state[name] = state[known] if known in state else full_tensor(value)
    return state
