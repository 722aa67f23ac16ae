"""Where processes meet to form a group of torch.distributed, and how they prove that they belong to it.

Every process listens on one address only: loopback, or that of its node. Others can connect to gloo's ports while a
group forms, so members prove to each other that they know a secret. Traffic is not encrypted. This file imports nothing
of Rally, because vLLM's workers read it too.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

LOOPBACK = "127.0.0.1"
GLOO = "gloo"
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
SIOCGIFADDR = 0x8915
ANY_PORT = 9  # of a UDP socket that sends nothing


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


def peer_group(backend: str, device: torch.device, store: Store, rank: int, size: int, seconds: float) -> Any:
    """A group beside those of the process. An operation that takes longer than `seconds` is an error in the thread that
    waits for it."""
    timeout = timedelta(seconds=seconds)
    if backend == GLOO:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    kind = getattr(dist, f"ProcessGroup{backend.upper()}", None)
    if kind is None or not hasattr(kind, "Options"):
        raise RuntimeError(f"torch has no groups of {backend!r} here")
    options = kind.Options()
    options._timeout = timeout
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # read by the constructor; otherwise a late operation ends the process
    try:
        with torch.get_device_module(device).device(device):
            return kind(store, rank, size, options)
    finally:
        os.environ.pop(BLOCKING_WAIT)
        if before is not None:
            os.environ[BLOCKING_WAIT] = before


def membership_proof(secret: bytes, group: int, rank: int) -> Tensor:
    """What a member sends to prove that it knows the secret. It differs for each, so that no other can repeat it."""
    digest = hmac.new(secret, f"{group}/{rank}".encode(), "sha256").digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
