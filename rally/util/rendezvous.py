"""Where processes meet to form a group of torch.distributed, and how they prove that they belong to it.

Every process listens on one address only: loopback, or that of its node. Others can connect to a TCP store and to
gloo's ports while a group forms. So what members tell each other through the store is sealed with a secret
(`SealedStore`): others can neither read nor replace the addresses at which members connect to each other. And over
every connection both ends prove that they know the secret (`membership_proofs`). What is sent afterwards is not
encrypted. This file imports nothing of Rally, because vLLM's workers read it too.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

LOOPBACK = "127.0.0.1"
GLOO = "gloo"
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
SIOCGIFADDR = 0x8915
ANY_PORT = 9  # of a UDP socket that sends nothing
NONCE_BYTES, TAG_BYTES, BLOCK_BYTES = 16, 32, 32
COPY_SECONDS = 0.02
SEPARATOR = b"\0"
T = TypeVar("T")


class SealedStore(Store):
    """A store whose keys and values only those can read and write who know a secret. The other store holds digests of
    the keys, and values that are encrypted and signed with their keys: HMAC-SHA256 in counter mode, with a new nonce
    for each value. A value that others wrote, or moved from another key, is a RuntimeError.

    Whoever gives it to a process group must keep a reference to it: torch keeps none to what Python adds to a store."""

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store: Store = store
        self._names, self._cipher, self._signature = (
            hmac.digest(secret, purpose, "sha256") for purpose in (b"store names", b"store cipher", b"store signature")
        )

    def set(self, key: str, value: str | bytes) -> None:
        name, nonce = self._name(key), secrets.token_bytes(NONCE_BYTES)
        content = self._encrypted(nonce, value.encode() if isinstance(value, str) else bytes(value))
        self._store.set(name, nonce + content + self._tag(name, nonce, content))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        name = self._name(key)
        sealed = self._store.get(name)
        nonce, content, tag = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(name, nonce, content)):
            raise RuntimeError(f"a process that does not belong to this run has written {key!r} to its store")
        return self._encrypted(nonce, content)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        names = [self._name(key) for key in keys]
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._name(key) for key in keys]))

    def close(self) -> None:
        """Leave the other store to itself: one that this process hosts ends if nothing else refers to it."""
        self._store = HashStore()

    def _name(self, key: str) -> str:
        return hmac.digest(self._names, key.encode(), "sha256").hex()

    def _tag(self, name: str, nonce: bytes, content: bytes) -> bytes:
        return hmac.digest(self._signature, name.encode() + nonce + content, "sha256")

    def _encrypted(self, nonce: bytes, content: bytes) -> bytes:
        """Encrypt, or decrypt what is encrypted."""
        blocks = range(-(-len(content) // BLOCK_BYTES))
        stream = b"".join(hmac.digest(self._cipher, nonce + block.to_bytes(8, "big"), "sha256") for block in blocks)
        return bytes(a ^ b for a, b in zip(content, stream, strict=False))


def host_store(address: str) -> tuple[TCPStore, str]:
    """A TCP store that this process hosts, on one address only, and its place."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store, f"{address}:{port}"


def address_towards(host: str) -> str:
    """The address of this machine from which it reaches `host`."""
    [(family, *_, place), *_] = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface with this IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


@contextmanager
def gloo_on(interface: str | None) -> Iterator[None]:
    """Gloo listens on this interface. By default it listens on the address that the host name resolves to."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before
        elif interface is not None:
            del os.environ["GLOO_SOCKET_IFNAME"]


def peer_group(
    backend: str, device: torch.device, store: Store, rank: int, size: int, seconds: float, check: Callable[[Any], T]
) -> tuple[Any, T]:
    """A group beside those of the process, and what `check` returns, which does its first operation. An operation that
    takes longer than `seconds` is an error in the thread that waits for it."""
    timeout = timedelta(seconds=seconds)
    if backend == GLOO:
        group = dist.ProcessGroupGloo(store, rank, size, timeout)
        return group, check(group)
    kind = getattr(dist, f"ProcessGroup{backend.upper()}", None)
    if kind is None or not hasattr(kind, "Options"):
        raise RuntimeError(f"torch has no groups of {backend!r} here")
    options = kind.Options()
    options._timeout = timeout
    with _own_store(store, rank) as own:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"  # read by the constructor; otherwise a late operation ends the process
        try:
            with torch.get_device_module(device).device(device):
                group = kind(own, rank, size, options)
        finally:
            os.environ.pop(BLOCKING_WAIT)
            if before is not None:
                os.environ[BLOCKING_WAIT] = before
        return group, check(group)


@contextmanager
def _own_store(store: Store, rank: int) -> Iterator[Store]:
    """A store of this process for NCCL, in which process 0 leaves what the others need to connect to it. Inside, that
    is copied through `store`. Threads of NCCL ask their store until the process ends, so it must be none of Python's:
    it would need the lock of the interpreter while the interpreter waits for these threads."""
    own, over = HashStore(), threading.Event()

    def send() -> None:
        known: list[str] = []
        last = False
        while not last:
            last = over.wait(COPY_SECONDS)
            for name in own.list_keys():
                if name not in known:
                    store.set(str(len(known)), name.encode() + SEPARATOR + own.get(name))  # type: ignore[arg-type]
                    known.append(name)

    def receive() -> None:
        number = 0
        while not over.wait(COPY_SECONDS):
            while store.check([str(number)]):
                name, _, value = store.get(str(number)).partition(SEPARATOR)
                own.set(name.decode(), value)  # type: ignore[arg-type]
                number += 1

    def copy() -> None:
        with suppress(RuntimeError):  # the store is gone or was written to by others: the group does not form in time
            (receive if rank else send)()

    copier = threading.Thread(target=copy, name="rally-group-store", daemon=True)
    copier.start()
    try:
        yield own
    finally:
        over.set()


def membership_proofs(secret: bytes, group: int, rank: int, members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What `rank` sends to each member to prove that it knows the secret, and what it gets from each that does. Proofs
    name the group and both ends, so that none can be used elsewhere."""

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(secret, f"{group}/{sender}/{receiver}".encode(), "sha256")

    sent = b"".join(proof(rank, member) for member in members)
    expected = b"".join(proof(member, rank) for member in members)
    return tuple(torch.frombuffer(bytearray(proofs), dtype=torch.uint8) for proofs in (sent, expected))  # type: ignore[return-value]
