"""The torch.distributed process group of a run, and FSDP2 sharding of a model over it.

Numbers and messages go over gloo. Weights and gradients go over NCCL between GPUs and over gloo between CPU processes.
On one machine all of it stays on the loopback device, and the rendezvous is a file in a private folder. Across nodes
the rendezvous is a TCP store of rank 0, and every rank listens on the address of its node only. Others can connect to
gloo's ports while the group forms. Each rank therefore proves to every other, over the connection between them, that it
knows the secret of the rendezvous. (NCCL does the same with the random number of its group.) With gloo alone, a TCP
store is sealed with the secret. NCCL's own threads ask their store until the process ends, so it must be none of
Python's. Traffic is not encrypted.

Shapes: X any numbers.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from rally.config import Config, SftConfig
from rally.distributed.message_encoding import decode, encode
from rally.models import attention
from rally.models.residence import DEVICE_ATTRIBUTE
from rally.models.sequence_parallel import SequenceGroup, check_divisible
from rally.models.sharding import RANKS_ATTRIBUTE, HostedEngine, M, Message
from rally.models.vision import image_parts_of, patches_of
from rally.platforms import PLATFORMS, SEVERAL_ON_ONE_GPU, rank_device, shared_backend
from rally.train.value_model import HEAD
from rally.types import RallyError
from rally.util.rendezvous import LOOPBACK, SealedStore, gloo_on, interface_of, membership_proofs

GLOO = "gloo"
FOREVER = timedelta(days=3650)  # between two messages there may be a rollout of any length
SUMMON_METHOD = "rally_summon"
SECRET_VARIABLE = "RALLY_RANKS_SECRET"
NO_TEXT = "\0"  # a store keeps no empty values
REPORT_SECONDS = 0.05
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a run meet: the path of a file, or host:port of rank 0's TCP store. `address` is that of this
    rank's node, and `local_rank` its number there."""

    place: str
    secret: str = field(repr=False)
    address: str = LOOPBACK
    local_rank: int = 0

    @property
    def is_file(self) -> bool:
        return self.place.startswith("/")

    def store(self, world_size: int) -> Store:
        """The store, as a client."""
        if self.is_file:
            return FileStore(self.place, world_size)
        host, _, port = self.place.rpartition(":")
        return TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=600))


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How ranks divide the work. Consecutive ranks are on one node, as far as possible.

    `fsdp_size` consecutive ranks shard a model among them; the others hold replicas of these shards (HSDP). None: all
    ranks. `sequence_size` consecutive ranks divide the tokens of a micro-batch (Ulysses)."""

    fsdp_size: int | None = None
    sequence_size: int = 1


def layout_of(config: Config | SftConfig) -> RankLayout:
    fsdp = (config.model if isinstance(config, SftConfig) else config.actor).fsdp_config
    size = config.sequence_parallel_size if isinstance(config, SftConfig) else config.actor.sequence_parallel_size
    return RankLayout(fsdp_size=fsdp.fsdp_size if fsdp.fsdp_size > 0 else None, sequence_size=size)


class ProcessGroup:
    """One rank's view of the group. `seconds` bounds every collective within a computation; workers wait for the next
    message without a limit."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        rendezvous: Rendezvous,
        device: str,
        seconds: float,
        store: Store | None = None,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.address = rendezvous.address
        self.token = hmac.digest(rendezvous.secret.encode(), b"engines of the ranks", "sha256").hex()
        self.hosted: HostedEngine | None = None
        interface = interface_of(rendezvous.address)
        self._interface, self._secret, self._seconds = interface, rendezvous.secret.encode(), seconds
        self._proved = 0
        platform, shared = PLATFORMS.get(device), shared_backend()
        backend = GLOO if platform is None else shared or platform.backend
        self._proves = backend == GLOO  # whether members of its groups must prove that they know the secret
        self._device = torch.device("cpu")
        if shared is not None:
            os.environ.setdefault(SEVERAL_ON_ONE_GPU, "1")
        if platform is not None:
            self._device = rank_device(platform, rendezvous.local_rank)
            platform.module.set_device(self._device)
            if interface is not None:  # the backend reads it and opens ports at the first collective
                os.environ.setdefault(platform.socket_interface, interface)
        timeout = timedelta(seconds=seconds)
        self._store = rendezvous.store(world_size) if store is None else store
        if self._proves and not rendezvous.is_file:  # a file is in a private folder
            self._store = SealedStore(self._store, self._secret)
        with gloo_on(interface):
            dist.init_process_group(
                backend,
                store=self._store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
            self._numbers = dist.new_group(backend=GLOO, timeout=timeout)
            self._messages = dist.new_group(backend=GLOO, timeout=FOREVER if rank else timeout)
        if world_size > 1:
            groups = [self._numbers, self._messages]
            self._check_members([dist.group.WORLD, *groups] if self._proves else groups)
        self._mesh = self._whole_mesh()
        self._sharded: list[FSDPModule] = []
        self.sequence_group: SequenceGroup | None = None

    def arrange(self, layout: RankLayout) -> None:
        """Form the groups of a layout, which models that are sharded from now on use. All ranks call it."""
        size, shards, together = self.world_size, layout.fsdp_size or self.world_size, layout.sequence_size
        assert size % shards == 0 and size % together == 0, "groups of equal size"
        self._mesh, self.sequence_group = self._whole_mesh(), None
        if shards < size:
            ranks_RF = torch.arange(size).view(-1, shards)
            groups = [self._subgroup(ranks.tolist()) for ranks in (ranks_RF.t(), ranks_RF)]
            names = ("replicate", "shard")
            self._mesh = DeviceMesh.from_group(groups, self.device, mesh=ranks_RF, mesh_dim_names=names)
        if together > 1:
            self.sequence_group = SequenceGroup(self._subgroup(torch.arange(size).view(-1, together).tolist()))

    def _whole_mesh(self) -> DeviceMesh:
        """All ranks, over the group that they have: `init_device_mesh` would form one of another backend beside gloo's
        where there are GPUs."""
        assert dist.group.WORLD is not None, "the group was initialized"
        return DeviceMesh.from_group(dist.group.WORLD, self.device)

    def _subgroup(self, lists: list[list[int]]) -> dist.ProcessGroup:
        """The group of this rank, among groups of equally many ranks that all ranks form together."""
        timeout = timedelta(seconds=self._seconds)
        with gloo_on(self._interface):
            own, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout)
        assert isinstance(own, dist.ProcessGroup), "every rank is in a group"
        if self._proves:
            self._check_members([own])
        return own

    def _check_members(self, groups: Sequence[Any]) -> None:
        """Raise unless every member of the groups knows the secret, which exists since before they formed."""
        for group in groups:
            number, self._proved = self._proved, self._proved + 1  # so that no proof is used twice
            members = dist.get_process_group_ranks(group)
            sent, expected = membership_proofs(self._secret, number, self.rank, members)
            got = torch.zeros_like(expected)
            dist.all_to_all_single(got, sent, group=group)
            if not torch.equal(got, expected):
                raise RallyError("a process that is not a rank of this run has joined its process group; the run stops")

    def during(self, message: Message) -> AbstractContextManager[None]:
        """A context in which this rank's engine, if it has one, leaves the device to the computation of a message."""
        return nullcontext() if self.hosted is None else self.hosted.during(message)

    def send(self, message: Message) -> None:
        """Send from rank 0 to all others, each of which must call `receive`."""
        content = torch.frombuffer(encode(message), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(content)]), 0, group=self._messages)
        dist.broadcast(content, 0, group=self._messages)

    def receive(self) -> Message:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._messages)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self._messages)
        return decode(content.numpy().data)

    def scatter(self, messages: Sequence[M]) -> M:
        """Send one message to each rank from rank 0, which gets its own as it is."""
        length = torch.zeros(1, dtype=torch.int64)
        if self.rank > 0:
            dist.scatter(length, src=0, group=self._numbers)
            content = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(content, 0, group=self._numbers)
            return cast(M, decode(content.numpy().data))
        contents = [torch.frombuffer(encode(message), dtype=torch.uint8) for message in messages[1:]]
        lengths = [length, *(torch.tensor([len(content)]) for content in contents)]
        dist.scatter(length, lengths, src=0, group=self._numbers)
        sent = [dist.isend(content, rank, group=self._numbers) for rank, content in enumerate(contents, 1)]
        for one in sent:
            assert one is not None, "rank 0 is in the group"
            one.wait()
        return messages[0]

    def all_gather(self, numbers_X: Tensor) -> list[Tensor]:
        mine = numbers_X.detach().double().cpu()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._numbers)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.float64)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self._numbers)
        return [one[: int(size)] for one, size in zip(gathered, sizes, strict=True)]

    def shard(self, model: PreTrainedModel, *, ranks: Any, reshard: bool, offload: bool = False) -> None:
        """Shard layer by layer, so that no device holds more than one layer whole. Gradients are summed over the ranks
        in float32, not averaged: the weight of each token was fixed before rows were divided among ranks. `offload`:
        shards and their gradients stay in main memory."""
        if self.sequence_group is not None:
            check_divisible(model, self.sequence_group.size)
        attention.install(model)
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": reshard,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device in PLATFORMS)
            setattr(model, DEVICE_ATTRIBUTE, self._device)
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
        if model.base_model is model and patches_of(model) is None:  # then `work` calls the module's own forward
            return work(model, *args)
        result: T = getattr(model, SUMMON_METHOD)(work, *args)
        return result

    def report(self, ticket: str, text: str) -> None:
        """Leave a text for rank 0 in the store, from any thread: no collective, so training goes on."""
        self._store.set(f"{ticket}/{self.rank}", text or NO_TEXT)

    def reports(self, ticket: str, check: Callable[[], None] = lambda: None) -> list[str]:
        """The texts of all other ranks. `check` is called while some are missing, and may raise."""
        keys = [f"{ticket}/{rank}" for rank in range(1, self.world_size)]
        while not self._store.check(keys):
            check()
            time.sleep(REPORT_SECONDS)
        return [self._store.get(key).decode().removesuffix(NO_TEXT) for key in keys]

    def reshard(self) -> None:
        """Free the gathered weights that a forward pass left behind. Otherwise ranks could differ in which layers they
        still have to gather, and their collectives would not match."""
        for module in self._sharded:
            module.reshard()

    def close_engine(self) -> None:
        if self.hosted is not None:
            self.hosted.close()
            self.hosted = None

    def leave(self) -> None:
        """Destroy the group. All ranks must do so together: with NCCL, one may wait forever for those that are gone."""
        dist.destroy_process_group()


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers, each a unit of its own. Where images are shown, the vision tower has none: a rank whose micro-batch
    has no image does not call its layers, and gathering a unit takes all ranks."""
    names = set(model._no_split_modules or ())
    tower = {module for part in _shown_parts(model) for module in part.modules()}
    return [module for module in model.modules() if type(module).__name__ in names and module not in tower]


def _shown_parts(model: PreTrainedModel) -> list[nn.Module]:
    """What only images reach; nothing in a model that is used for text."""
    return [] if patches_of(model) is None else list(image_parts_of(model).values())


def _separate_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that need an FSDP unit of their own: those with weights of another dtype, because gradients that are
    reduced together share one dtype, and a value head, which the forward of its body does not call."""
    usual = model.dtype
    tower = {module for part in _shown_parts(model) for module in part.modules()}
    other = [m for m in model.modules() if any(p.dtype != usual for p in m.parameters(recurse=False))]
    if mixed := next((type(module).__name__ for module in other if module in tower), None):
        raise RallyError(
            f"{mixed} in the vision tower of {type(model).__name__} has weights of another dtype than the model, which "
            "several GPUs do not support; set model.dtype=float32, or train on one GPU"
        )
    head = getattr(model, HEAD, None)
    return other if head is None or head in other else [*other, head]


def _call(model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
    """Registered as a forward method, so that FSDP gathers the weights that belong to no layer while it runs."""
    return work(model, *args)
