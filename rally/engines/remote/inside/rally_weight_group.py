"""A group of torch.distributed in which a trainer sends weights to servers, on both sides.

It also runs inside vLLM's workers, whose Python need not have Rally: it needs torch and `rendezvous.py` of this Rally.
Both sides cut the weights into the same buckets: the bytes of whole tensors, each at a multiple of ALIGNMENT.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

if __package__:
    from rally.util.rendezvous import (
        GLOO,
        SealedStore,
        address_towards,
        gloo_on,
        interface_of,
        membership_proofs,
        peer_group,
    )
else:  # in vLLM
    from runpy import run_path

    _functions = run_path(str(Path(__file__).resolve().parents[3] / "util" / "rendezvous.py"))
    address_towards, gloo_on, interface_of = (_functions[n] for n in ("address_towards", "gloo_on", "interface_of"))
    membership_proofs, peer_group, GLOO = (_functions[n] for n in ("membership_proofs", "peer_group", "GLOO"))
    SealedStore = _functions["SealedStore"]  # type: ignore[misc]

ALIGNMENT = 16
GAVE_UP = "gave-up"
POLL_SECONDS = 0.05
FORMING = 2  # times `seconds` of an invitation: to meet, and to connect


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
    meeting, connecting and every operation of the `backend` are bounded by `seconds` each."""

    backend: str
    place: str
    name: str
    rank: int
    size: int
    secret: str = field(repr=False)
    seconds: float


class WeightGroup:
    """The trainer and its servers, as a group in which process 0 sends tensors to all others. Nobody waits forever for
    a process that dies, stops or does not answer while the group forms."""

    def __init__(
        self,
        invitation: GroupInvitation,
        device: torch.device,
        store: Any = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """`given_up` is set when a process turns out not to come; the others then stop waiting for it."""
        self.name, self.device = invitation.name, device
        form = partial(_form, invitation, device, store, given_up)
        self._group, self._store = _in_time(form, FORMING * invitation.seconds)

    def broadcast(self, bucket: Tensor) -> None:
        """Send a tensor from process 0; the others receive it into theirs."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([bucket], options).wait()

    def close(self) -> None:
        """Leave the group. The others, if they wait, fail at once (gloo) or when their time is over (NCCL)."""
        _abort(self._group)
        self._group = self._store = None


def _in_time(work: Callable[[], tuple[Any, Any]], seconds: float) -> tuple[Any, Any]:
    """The group that `work` forms in a thread of its own, for which nobody waits when its time is over: a TCP store
    that accepts and does not answer, and NCCL when a process dies while it connects, keep a thread without end. A group
    that forms later is closed."""
    outcomes: SimpleQueue[tuple[Any, Any] | BaseException] = SimpleQueue()
    over = threading.Event()

    def run() -> None:
        outcome: tuple[Any, Any] | BaseException
        try:
            outcome = work()
        except BaseException as problem:  # noqa: BLE001 - any failure is passed to who waits
            outcome = problem
        outcomes.put(outcome)
        if over.is_set() and not isinstance(outcome, BaseException):
            _abort(outcome[0])

    threading.Thread(target=run, name="rally-weight-group", daemon=True).start()
    try:
        outcome = outcomes.get(timeout=seconds)
    except Empty:
        over.set()
        raise GroupError(f"the group of weights did not form within {seconds:g} s; a process of it hangs") from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _form(
    invitation: GroupInvitation, device: torch.device, store: Any, given_up: threading.Event | None
) -> tuple[Any, Any]:
    """The group, and the store over which it formed: closed, since all members are connected."""
    host, _, port = invitation.place.rpartition(":")
    interface = interface_of(address_towards(host.strip("[]")))
    if store is None:
        store = TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=invitation.seconds))
    if interface is not None and invitation.backend != GLOO:  # NCCL opens ports at the first operation
        os.environ.setdefault(f"{invitation.backend.upper()}_SOCKET_IFNAME", interface)
    sealed = SealedStore(PrefixStore(invitation.name, store), invitation.secret.encode())
    _meet(sealed, invitation, given_up)

    def check(group: Any) -> str | None:
        try:
            return _problem_of_members(group, invitation, device)
        except RuntimeError as problem:
            return str(problem)

    with gloo_on(interface):
        rank, size = invitation.rank, invitation.size
        group, problem = peer_group(invitation.backend, device, sealed, rank, size, invitation.seconds, check)
    sealed.close()
    if problem is not None:
        _abort(group)
        del group  # an exception would keep it; its end joins threads, which a fork that collects garbage lacks
        raise GroupError(problem)
    return group, sealed


def _problem_of_members(group: Any, invitation: GroupInvitation, device: torch.device) -> str | None:
    """None if every member knows the secret: over every connection with gloo. NCCL makes connections only with a random
    number of the group, which the store keeps secret."""
    secret, rank, members = invitation.secret.encode(), invitation.rank, range(invitation.size)
    if invitation.backend == GLOO:
        sent, expected = membership_proofs(secret, 0, rank, members)
        got = torch.zeros_like(expected)
        group.alltoall_base(got, sent, [], []).wait()
    else:  # connections between all would take memory of every device
        expected = torch.stack([membership_proofs(secret, 0, one, [one])[0] for one in members])
        parts = [torch.zeros_like(proof, device=device) for proof in expected]
        group.allgather([parts], [expected[rank].to(device)]).wait()
        got = torch.stack(parts).cpu()
    if torch.equal(got, expected):
        return None
    return "a process that is no server of this run has joined the group of its weights"


def _abort(group: Any) -> None:
    with suppress(RuntimeError, AttributeError):  # gloo has nothing to abort
        group.abort()


def _meet(store: Any, invitation: GroupInvitation, given_up: threading.Event | None) -> None:
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
