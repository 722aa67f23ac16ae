"""The ranks that hold one model together, as seen from one of them, and tensors that are sharded over them.

A rank is one of the processes that hold the policy together. Rank 0 runs the training loop; the others execute the
messages that it broadcasts. A sharded module carries its `Ranks` as an attribute; any other module belongs to `ALONE`,
the single process.

Shapes: X any numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from rally.models.sequence_parallel import SequenceGroup

RANKS_ATTRIBUTE = "rally_ranks"
BUCKET_BYTES = 256 << 20
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
T = TypeVar("T")


class Message:
    """Base of what rank 0 broadcasts to all ranks."""


M = TypeVar("M", bound=Message)


class HostedEngine(Protocol):
    """An engine in the process of a rank. Either a message or the engine computes, never both."""

    def during(self, message: Message) -> AbstractContextManager[None]:
        """A context for the computation of a message, in which the engine makes no step."""
        ...

    def close(self) -> None: ...


class Ranks(Protocol):
    """The processes that hold a policy together, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def address(self) -> str:
        """Where this rank may listen: loopback, or the address of its node."""
        ...

    @property
    def token(self) -> str:
        """A secret that all ranks of the run know, and nobody else: what their engines require of clients."""
        ...

    def host(self, engine: HostedEngine) -> None:
        """From now on this rank has an engine. It pauses while a message runs, and is closed with the ranks."""
        ...

    @property
    def sequence_group(self) -> SequenceGroup | None:
        """The ranks that compute the same micro-batches as this one, each a part of the tokens; None: only this one."""
        ...

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
    sequence_group = None
    address, token = "127.0.0.1", ""

    def host(self, engine: HostedEngine) -> None:
        raise AssertionError("a single process generates with its own module")

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


def gathered(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors with their names, on every rank. All ranks must ask for the same ones, up to the last.

    Sharded ones are gathered in buckets, one collective each. Beside the result a rank holds one bucket, of
    `bucket_bytes` or one tensor that is larger. A tensor that is not sharded is returned as it is."""
    bucket: list[_ShardPiece] = []
    for name, value in tensors:
        if not isinstance(value, DTensor):
            yield name, value
            continue
        if (dim := _shard_dim(value)) is None:  # laid out in another way
            yield name, value.full_tensor().detach()
            continue
        piece = _ShardPiece(name, value, value.device_mesh.get_group(dim))
        if bucket and (not piece.fits(bucket[0]) or sum(one.bytes for one in (*bucket, piece)) > bucket_bytes):
            yield from _gather_bucket(bucket)
            bucket = []
        bucket.append(piece)
    if bucket:
        yield from _gather_bucket(bucket)


def _shard_dim(value: DTensor) -> int | None:
    """The dimension of the mesh over which rows are divided; None if it is not exactly one."""
    divided = [dim for dim, placement in enumerate(value.placements) if placement != Replicate()]
    return divided[0] if len(divided) == 1 and value.placements[divided[0]] == Shard(0) else None


class _ShardPiece(NamedTuple):
    """A tensor whose rows are divided among the ranks of a group, as torch.chunk does."""

    name: str
    value: DTensor
    group: dist.ProcessGroup

    @property
    def chunk(self) -> torch.Size:
        """The shape of the first rank's part, which is the largest."""
        return torch.Size((-(-self.value.shape[0] // self.group.size()), *self.value.shape[1:]))

    @property
    def bytes(self) -> int:
        return self.value.numel() * self.value.element_size()

    def fits(self, other: _ShardPiece) -> bool:
        return self.value.dtype == other.value.dtype and self.group.group_name == other.group.group_name

    def padded(self) -> Tensor:
        """This rank's part, flat, with the size of the largest."""
        local = self.value.to_local().detach().reshape(-1)
        if local.device.type != self.value.device_mesh.device_type:  # offloaded to main memory
            local = local.to(self.value.device_mesh.device_type)
        return torch.nn.functional.pad(local, (0, self.chunk.numel() - local.numel()))


def _gather_bucket(bucket: Sequence[_ShardPiece]) -> Iterator[tuple[str, Tensor]]:
    group, mine = bucket[0].group, torch.cat([piece.padded() for piece in bucket])
    everyone = mine.new_empty(group.size(), mine.numel())
    ALL_GATHER(everyone.view(-1), mine, group=group)
    start = 0
    for piece in bucket:
        end = start + piece.chunk.numel()
        whole = everyone[:, start:end].reshape(-1, *piece.chunk[1:])
        if group.size() == 1:
            whole = whole.clone()  # not a view into the bucket
        yield piece.name, whole[: piece.value.shape[0]]
        start = end


@torch.no_grad()
def copy_gathered(source: PreTrainedModel, target: PreTrainedModel, *, trained_only: bool) -> None:
    """Copy the weights of a sharded module into a whole one of the same model, on every rank."""
    into = dict(target.named_parameters())
    weights = ((name, p) for name, p in source.named_parameters() if p.requires_grad or not trained_only)
    for name, whole in gathered(weights):
        into[name].copy_(whole)


def model_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by name, in main memory of rank 0 if they are sharded; the other ranks then get empty tensors. Tied
    weights stay one tensor."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    stored = model.state_dict()
    state = dict.fromkeys(stored, torch.empty(0))
    for name, whole in gathered((name, value) for name, value in stored.items() if tied.get(name, name) == name):
        part = stored[name]
        if not isinstance(part, DTensor):
            state[name] = whole
        elif part.device_mesh.get_rank() == 0:
            state[name] = whole.detach().cpu()
    return {name: state[tied.get(name, name)] for name in stored}
