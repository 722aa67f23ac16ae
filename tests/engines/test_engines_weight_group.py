"""How a group in which weights are sent forms: nobody waits without end, and nobody else reads, writes or joins."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from rally.engines.remote.inside import rally_weight_group as group_module
from rally.engines.remote.inside.rally_weight_group import GroupError, GroupInvitation, WeightGroup
from rally.util.rendezvous import SealedStore, host_store, peer_group

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the members of these groups are threads, which share variables


def test_nobody_waits_for_a_trainer_that_accepts_and_never_answers() -> None:
    """As one that is stopped, or whose machine is gone."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        invitation = GroupInvitation(place=place, backend="gloo", name="g", rank=1, size=2, secret="s", seconds=0.2)
        with pytest.raises(GroupError, match=r"did not form within 0.4 s; a process of it hangs"):
            WeightGroup(invitation, CPU)


def test_a_group_that_forms_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        closed = threading.Event()

        def abort(self) -> None:
            self.closed.set()

    late, forms = Late(), threading.Event()

    def slowly(*_: object) -> object:
        forms.wait()
        return late, None

    monkeypatch.setattr(group_module, "_form", slowly)
    invitation = GroupInvitation(place="h:1", backend="gloo", name="g", rank=1, size=2, secret="s", seconds=0.01)
    with pytest.raises(GroupError, match="did not form"):
        WeightGroup(invitation, CPU)
    assert not late.closed.is_set()
    forms.set()
    assert late.closed.wait(60)


def test_who_does_not_come_is_named() -> None:
    store, place = host_store("127.0.0.1")
    alone = GroupInvitation(place=place, backend="gloo", name="g", rank=0, size=3, secret="s", seconds=0.1)
    with pytest.raises(GroupError, match=r"process 1, 2 of the group of weights did not come to 127.0.0.1:\d+ within"):
        WeightGroup(alone, CPU, store)


def formed(
    size: int, stores: Sequence[Store | None], secrets: Sequence[str], seconds: float = 20
) -> list[WeightGroup | BaseException]:
    """What each process of a group gets: one for each store, with its secret."""
    store, place = host_store("127.0.0.1")
    one = GroupInvitation(place=place, backend="gloo", name="g", rank=0, size=size, secret="", seconds=seconds)
    with ThreadPoolExecutor(len(stores)) as threads:
        joins = [
            threads.submit(WeightGroup, replace(one, rank=rank, secret=secret), CPU, own or (None if rank else store))
            for rank, (own, secret) in enumerate(zip(stores, secrets, strict=True))
        ]
        return [join.exception() or join.result() for join in joins]


@pytest.mark.drill("security", "A process joins the group in which weights are sent", "It cannot; no weight is sent")
def test_a_process_without_the_secret_joins_no_group() -> None:
    for outcome in formed(2, [None, None], ["ours", "guessed"], seconds=0.5):
        assert isinstance(outcome, GroupError) and "of the group of weights did not come" in str(outcome)


class Relay(Store):
    """The store as somebody sees it who puts himself between the members: `change` is what he makes of a value."""

    def __init__(self, store: Store, change: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self.inner, self._change = store, change

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.inner.set(key, self._change(value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=20)) -> None:  # type: ignore[override]
        self.inner.wait(keys, timeout)


@pytest.mark.drill(
    "security",
    "Somebody replaces an address in the store at which the group of a broadcast meets",
    "The group does not form; no weight is sent",
)
def test_what_members_tell_each_other_can_be_neither_read_nor_replaced() -> None:
    def other_port(value: bytes) -> bytes:
        return value if len(value) < 100 else value[:60] + bytes([value[60] ^ 1]) + value[61:]

    inner = HashStore()
    stores = [Relay(inner, other_port) for _ in range(2)]
    outcomes = formed(2, stores, ["s", "s"], seconds=2)
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
    assert any("does not belong to this run has written" in str(outcome) for outcome in outcomes)
    inner = HashStore()
    outcomes = formed(2, [Relay(inner, bytes) for _ in range(2)], ["s", "s"])
    assert all(isinstance(outcome, WeightGroup) for outcome in outcomes)
    assert len(inner.list_keys()) == 4, "that each is there, and the addresses of each"
    for key in inner.list_keys():
        assert "here" not in key and socket.inet_aton("127.0.0.1") not in inner.get(key)


def test_every_connection_carries_a_proof_in_both_directions() -> None:
    """Also those that no weight passes yet: with four members a ring leaves two of six connections unproved."""
    before = set(connections())
    groups = formed(4, [None] * 4, ["s"] * 4)
    assert all(isinstance(group, WeightGroup) for group in groups)
    new = {ends: moved for ends, moved in connections().items() if ends not in before}
    assert len(new) == 4 * 3, "both ends of every connection, and none of the store"
    assert all(sent >= 32 and got >= 32 for sent, got in new.values())


def connections() -> dict[tuple[int, int], tuple[int, int]]:
    """The ports of this process' TCP connections, with the bytes that the other end has confirmed and sent."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as one:
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                found[one.getsockname()[1], one.getpeername()[1]] = struct.unpack_from("QQ", info, 120)
    return found


def test_the_store_of_a_group_is_closed_when_it_has_formed() -> None:
    store, place = host_store("127.0.0.1")
    one = GroupInvitation(place=place, backend="gloo", name="g", rank=0, size=1, secret="s", seconds=20)
    group = WeightGroup(one, CPU, store)
    del store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])))
    group.close()


def test_a_member_whose_proof_is_wrong_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    right = group_module.membership_proofs

    def wrong(secret: bytes, group: int, rank: int, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        sent, expected = right(secret, group, rank, members)
        return (sent if rank != 2 else torch.cat([sent[32:], sent[:32]])), expected

    monkeypatch.setattr(group_module, "membership_proofs", wrong)
    before = set(connections())
    outcomes = formed(3, [None] * 3, ["s"] * 3)
    left = [set(ends) for ends in connections() if ends not in before]
    assert not left or set.intersection(*left), "those of the store at most, although the errors are kept"
    assert ["no server of this run has joined" in str(outcome) for outcome in outcomes] == [True, True, True]


class AsNccl:
    """A group that exchanges what NCCL does, when NCCL does: at its first operation, through the store that it got."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.token = store, rank, b"\0address:port and a random number\xff"

    def allgather(self, outputs: object, inputs: object) -> bytes:
        if self.rank == 0:
            self.store.set("0", self.token)  # type: ignore[arg-type]
        return self.store.get("0")


def test_what_nccl_exchanges_is_sealed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself gets a store of its process: its threads ask it until the process ends."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupSTANDIN", AsNccl, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=nullcontext))
    inner = HashStore()

    def form(rank: int) -> tuple[AsNccl, bytes]:
        sealed = SealedStore(inner, b"secret")
        return peer_group("standin", CPU, sealed, rank, 3, 20, lambda group: group.allgather([], []))

    with ThreadPoolExecutor(3) as threads:
        for group, got in threads.map(form, range(3)):
            assert got == group.token and isinstance(group.store, HashStore)
    assert inner.list_keys() and all(b"random number" not in inner.get(key) for key in inner.list_keys())
