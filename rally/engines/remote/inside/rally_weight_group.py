"""A group of torch.distributed in which a trainer sends weights to servers, on both sides.

It also runs inside vLLM's workers, whose Python need not have Rally: it needs torch and `rendezvous.py` of this Rally.
Both sides cut the weights into the same buckets: the bytes of whole tensors, each at a multiple of ALIGNMENT.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

if __package__:
    from rally.util.rendezvous import GLOO, address_towards, gloo_on, interface_of, membership_proof, peer_group
else:  # in vLLM
    from runpy import run_path

    _functions = run_path(str(Path(__file__).resolve().parents[3] / "util" / "rendezvous.py"))
    address_towards, gloo_on, interface_of = (_functions[n] for n in ("address_towards", "gloo_on", "interface_of"))
    membership_proof, peer_group, GLOO = (_functions[n] for n in ("membership_proof", "peer_group", "GLOO"))

ALIGNMENT = 16
GAVE_UP = "gave-up"
POLL_SECONDS = 0.05


class GroupError(RuntimeError):
    """A group that cannot be formed, or weights that cannot be received in it."""


class TensorForm(NamedTuple):
    """A weight without its numbers. `dtype` is torch's name of it, such as bfloat16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, weight: Tensor) -> TensorForm:
        return cls(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise GroupError(f"{self.name} has the dtype {self.dtype!r}, which torch does not have")
        return dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


class Place(NamedTuple):
    """Where the bytes of a weight are in its bucket."""

    form: TensorForm
    start: int

    def view(self, bucket: Tensor) -> Tensor:
        part = bucket[self.start : self.start + self.form.bytes]
        return part.view(self.form.torch_dtype).view(self.form.shape)


class Bucket(NamedTuple):
    places: tuple[Place, ...]
    bytes: int


def buckets_of(forms: Sequence[TensorForm], most: int) -> Iterator[Bucket]:
    """The buckets of these weights, in their order: of `most` bytes, or of one weight that is larger."""
    places: list[Place] = []
    end = 0
    for form in forms:
        size = -(-form.bytes // ALIGNMENT) * ALIGNMENT
        if places and end + size > most:
            yield Bucket(tuple(places), end)
            places, end = [], 0
        places.append(Place(form, end))
        end += size
    if places:
        yield Bucket(tuple(places), end)


@dataclass(frozen=True, kw_only=True)
class GroupInvitation:
    """What a process needs to join a group of weights. Process 0 is the trainer, at whose TCP store `place` they meet;
    every operation of the `backend` is bounded by `seconds`."""

    backend: str
    place: str
    name: str
    rank: int
    size: int
    secret: str = field(repr=False)
    seconds: float


class WeightGroup:
    """The trainer and its servers, as a group in which process 0 sends tensors to all others."""

    def __init__(
        self,
        invitation: GroupInvitation,
        device: torch.device,
        store: Any = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """`given_up` is set when a process turns out not to come; the others then stop waiting for it."""
        self.name, self.device = invitation.name, device
        host, _, port = invitation.place.rpartition(":")
        interface = interface_of(address_towards(host.strip("[]")))
        if store is None:
            store = TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=invitation.seconds))
        if interface is not None and invitation.backend != GLOO:  # NCCL opens ports at the first operation
            os.environ.setdefault(f"{invitation.backend.upper()}_SOCKET_IFNAME", interface)
        prefixed = PrefixStore(invitation.name, store)
        _meet(prefixed, invitation, given_up)
        with gloo_on(interface):
            self._group = peer_group(
                invitation.backend, device, prefixed, invitation.rank, invitation.size, invitation.seconds
            )
            self._check_members(invitation)

    def _check_members(self, invitation: GroupInvitation) -> None:
        """Raise unless every member knows the secret."""
        secret = invitation.secret.encode()
        proofs = [membership_proof(secret, 0, rank).to(self.device) for rank in range(invitation.size)]
        gathered = [torch.zeros_like(proof) for proof in proofs]
        self._group.allgather([gathered], [proofs[invitation.rank]]).wait()
        if not all(map(torch.equal, gathered, proofs)):
            self.close()
            raise GroupError("a process that is no server of this run has joined the group of its weights")

    def broadcast(self, bucket: Tensor) -> None:
        """Send a tensor from process 0; the others receive it into theirs."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([bucket], options).wait()

    def close(self) -> None:
        """Leave the group. The others, if they wait, fail at once (gloo) or when their time is over (NCCL)."""
        with suppress(RuntimeError, AttributeError):  # gloo has nothing to abort
            self._group.abort()
        self._group = None


def _meet(store: PrefixStore, invitation: GroupInvitation, given_up: threading.Event | None) -> None:
    """Wait at the store until all members are there. NCCL would wait without end for one that does not come."""
    members = [f"here/{rank}" for rank in range(invitation.size)]
    if invitation.rank >= len(members):
        raise GroupError(f"this is process {invitation.rank} of a group of {len(members)} processes")
    store.set(members[invitation.rank], "")
    deadline = time.monotonic() + invitation.seconds
    while not store.check(members):
        if given_up is not None and given_up.is_set():
            store.set(GAVE_UP, "")
        if store.check([GAVE_UP]):
            raise GroupError("the group of weights was given up, because another process cannot join it")
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank, key in enumerate(members) if not store.check([key]))
            raise GroupError(
                f"process {missing} of the group of weights did not come to {invitation.place} within "
                f"{invitation.seconds:g} s"
            )
        time.sleep(POLL_SECONDS)


def received(group: WeightGroup, forms: Sequence[TensorForm], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The weights of a version by name, as they arrive."""
    for bucket in buckets_of(forms, bucket_bytes):
        content = torch.empty(bucket.bytes, dtype=torch.uint8, device=group.device)
        group.broadcast(content)
        for place in bucket.places:
            yield place.form.name, place.view(content)


class WeightWorker:
    """Methods for vLLM's workers (`--worker-extension-cls`), called by `/collective_rpc` with texts. Each worker is a
    process of the group."""

    rank: int
    device: torch.device
    reload_weights: Any
    _rally_group: WeightGroup | None = None

    def rally_join_weights(self, invitation: str) -> None:
        self._rally_leave()
        words = json.loads(invitation)
        words["rank"] += self.rank
        self._rally_group = WeightGroup(GroupInvitation(**words), self.device)

    def rally_receive_weights(self, broadcast: str) -> None:
        words = json.loads(broadcast)
        group = self._rally_group
        if group is None or group.name != words["group"]:
            raise GroupError("this worker is not in the group of these weights")
        forms = [TensorForm(name, dtype, tuple(shape)) for name, dtype, shape in words["weights"]]
        try:
            self.reload_weights(weights_iterator=received(group, forms, words["bucket_bytes"]))
        except BaseException:
            self._rally_leave()
            raise

    def _rally_leave(self) -> None:
        if self._rally_group is not None:
            self._rally_group.close()
            self._rally_group = None
