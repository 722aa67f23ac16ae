"""The torch.distributed process group of one machine, and FSDP2 sharding of a model over it.

Numbers and messages go over gloo on the loopback device. Weights and gradients go over NCCL between GPUs and over gloo
between CPU processes. The rendezvous is a file in a private folder, so no port is open to other machines. Other users
of this machine can connect to gloo's ports while the group forms. Each rank therefore proves to all others, over every
connection, that it knows a secret of that folder. (NCCL does the same with the random number of its group.)

Shapes: X any numbers.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from rally.distributed.message_encoding import decode, encode
from rally.models import attention
from rally.models.sharding import RANKS_ATTRIBUTE, Message
from rally.train.value_model import HEAD
from rally.types import RallyError

FOREVER = timedelta(days=3650)  # between two messages there may be a rollout of any length
SUMMON_METHOD = "rally_summon"
SECRET = "secret"
T = TypeVar("T")


class ProcessGroup:
    """One rank's view of the group. `seconds` bounds every collective within a computation; workers wait for the next
    message without a limit."""

    def __init__(self, rank: int, world_size: int, rendezvous: Path, device: str, seconds: float) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        if device == "cuda":
            torch.cuda.set_device(rank)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # NCCL reads it and opens ports at the first collective
        timeout = timedelta(seconds=seconds)
        if rank == 0:
            write_secret(rendezvous.parent)
        with _on_loopback():
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=FileStore(str(rendezvous), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
            self._numbers = dist.new_group(backend="gloo", timeout=timeout)
            self._messages = dist.new_group(backend="gloo", timeout=FOREVER if rank else timeout)
        if world_size > 1:
            self._check_members(rendezvous.parent, [self._numbers, self._messages])
        self._mesh = init_device_mesh(device, (world_size,))
        self._sharded: list[FSDPModule] = []

    def _check_members(self, folder: Path, groups: Sequence[Any]) -> None:
        """Raise unless every member of the groups knows the secret, which exists since before they formed."""
        secret = (folder / SECRET).read_bytes()
        everyone = groups if self.device == "cuda" else [None, *groups]  # None: all ranks, over gloo
        for number, group in enumerate(everyone):
            proofs = [_proof(secret, number, rank) for rank in range(self.world_size)]
            gathered = [torch.zeros_like(proofs[0]) for _ in proofs]
            dist.all_gather(gathered, proofs[self.rank].clone(), group=group)
            if not all(map(torch.equal, gathered, proofs)):
                raise RallyError("a process that is not a rank of this run has joined its process group; the run stops")

    def send(self, message: Message) -> None:
        """Send from rank 0 to all others, each of which must call `receive`."""
        content = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(content)]), 0, group=self._messages)
        dist.broadcast(content, 0, group=self._messages)

    def receive(self) -> Message:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._messages)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self._messages)
        return decode(content.numpy().tobytes())

    def all_gather(self, numbers_X: Tensor) -> list[Tensor]:
        mine = numbers_X.detach().double().cpu()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._numbers)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.float64)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self._numbers)
        return [one[: int(size)] for one, size in zip(gathered, sizes, strict=True)]

    def shard(self, model: PreTrainedModel, *, ranks: Any, reshard: bool) -> None:
        """Shard layer by layer, so that no device holds more than one layer whole. Gradients are summed over the ranks
        in float32, not averaged: the weight of each token was fixed before rows were divided among ranks."""
        attention.install(model)
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": reshard,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        for module in [*_separate_modules(model), *_layers(model)]:
            fully_shard(module, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                self._sharded.append(module)
        setattr(model, SUMMON_METHOD, MethodType(_call, model))
        register_fsdp_forward_method(model, SUMMON_METHOD)
        setattr(model, RANKS_ATTRIBUTE, ranks)

    def summon(self, model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
        if model.base_model is model:  # then `work` calls the module's own forward
            return work(model, *args)
        result: T = getattr(model, SUMMON_METHOD)(work, *args)
        return result

    def reshard(self) -> None:
        """Free the gathered weights that a forward pass left behind. Otherwise ranks could differ in which layers they
        still have to gather, and their collectives would not match."""
        for module in self._sharded:
            module.reshard()

    def leave(self) -> None:
        """Destroy the group. All ranks must do so together: with NCCL, one may wait forever for those that are gone."""
        dist.destroy_process_group()


def write_secret(folder: Path) -> None:
    """Write a new secret that only this user can read."""
    descriptor = os.open(folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))


def _proof(secret: bytes, group: int, rank: int) -> Tensor:
    """What a rank sends to prove that it knows the secret. It differs for each, so that no other can repeat it."""
    digest = hmac.new(secret, f"{group}/{rank}".encode(), "sha256").digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _separate_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that need an FSDP unit of their own: those with weights of another dtype, because gradients that are
    reduced together share one dtype, and a value head, which the forward of its body does not call."""
    usual = model.dtype
    other = [m for m in model.modules() if any(p.dtype != usual for p in m.parameters(recurse=False))]
    head = getattr(model, HEAD, None)
    return other if head is None or head in other else [*other, head]


def _call(model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
    """Registered as a forward method, so that FSDP gathers the weights that belong to no layer while it runs."""
    return work(model, *args)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """By default gloo listens on the address that the host name resolves to."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
