"""The ranks that hold one model together, as seen from one of them, and tensors that are sharded over them.

A rank is one of the processes that hold the policy together. Rank 0 runs the training loop; the others execute the
messages that it broadcasts. A sharded module carries its `Ranks` as an attribute; any other module belongs to `ALONE`,
the single process.

Shapes: X any numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

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

    def start(self, plan: Message) -> None:
        """Start all ranks; each builds what the plan describes."""
        ...

    def shard(self, model: PreTrainedModel, *, offload: bool = False) -> None:
        """Shard a module that every rank has loaded, and attach these ranks to it. `offload`: the shards stay in main
        memory."""
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

    def report(self, ticket: str, text: str) -> None:
        """Tell rank 0 something, from another rank and any thread."""
        ...

    def reports(self, ticket: str) -> list[str]:
        """What the other ranks report under a ticket, in their order. Rank 0 waits for all of them, in any thread."""
        ...


class Alone:
    """A single process that holds everything."""

    rank, world_size = 0, 1

    def start(self, plan: Message) -> None:
        """There are no other ranks to start."""

    def shard(self, model: PreTrainedModel, *, offload: bool = False) -> None:
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

    def report(self, ticket: str, text: str) -> None:
        raise AssertionError("a single process has nobody to report to")

    def reports(self, ticket: str) -> list[str]:
        return []


ALONE = Alone()


def ranks_of(model: PreTrainedModel) -> Ranks:
    ranks: Ranks = getattr(model, RANKS_ATTRIBUTE, ALONE)
    return ranks


def full_tensor(value: Tensor) -> Tensor:
    """A tensor gathered into main memory of rank 0 if it is sharded. All ranks must call it; the others get an empty
    tensor."""
    if not isinstance(value, DTensor):
        return value
    full: Tensor = value.full_tensor().detach()
    return full.cpu() if value.device_mesh.get_rank() == 0 else torch.empty(0)


def local_tensor(value: Tensor) -> Tensor:
    """This rank's shard of a tensor, in the same memory; the tensor itself if it is not sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


class ShardPlace(NamedTuple):
    """The place of a rank's shard in a tensor. Ranks that hold the same shard have different numbers of `replica`."""

    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    replica: int = 0

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + count) for start, count in zip(self.offset, self.size, strict=True))


def shard_place(value: Tensor) -> ShardPlace:
    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return ShardPlace(shape, (0,) * len(shape), shape)
    size, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    at = value.device_mesh.get_coordinate()
    assert at is not None, "a rank holds a part of every tensor"
    copies = [number for number, one in zip(at, value.placements, strict=True) if not one.is_shard()]
    return ShardPlace(shape, tuple(offset), tuple(size), max(copies, default=0))


def total_norm(gradients: Mapping[str, tuple[Tensor, Tensor]], ranks: Ranks) -> Tensor:
    """The norm of all gradients over all ranks. Each comes with its parameter, which knows how it is sharded. Gradients
    in main memory cannot be reduced over GPUs, so their norms go over the ranks as numbers."""
    first = next((parameter for _, parameter in gradients.values() if isinstance(parameter, DTensor)), None)
    kinds = {gradient.device.type for gradient, _ in gradients.values()}
    if first is None or kinds == {first.device_mesh.device_type}:
        total = get_total_norm([_as_sharded(gradient, like) for gradient, like in gradients.values()])
        return total.full_tensor() if isinstance(total, DTensor) else total
    counted = [gradient for gradient, like in gradients.values() if shard_place(like).replica == 0]
    square = get_total_norm(counted).double().square().reshape(1)
    return sum(ranks.all_gather(square), torch.zeros(1, dtype=torch.float64)).sqrt().float()[0]


def _as_sharded(gradient: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def model_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by name; sharded ones are gathered one by one. Tied weights stay one tensor."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        known = tied.get(name, name)
        state[name] = state[known] if known in state else full_tensor(value)
    return state
