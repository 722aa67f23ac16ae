"""Guarantees: one execution is spoken to without blocking the event loop, and is ended whenever nobody waits for it.

An execution is held by a handle on its first process: when that ends, the kernel ends all others of its namespace.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from typing import Any

from rally.sandbox import wire
from rally.sandbox.jail import Jail
from rally.sandbox.program import SandboxError

END_SECONDS = 5.0  # for a supervisor without a namespace to take its tree down by itself


class Connection:
    """The host's end of one execution. Use `end` in a finally."""

    def __init__(self, stream: socket.socket, handle: int, own_namespace: bool) -> None:
        self._stream = stream
        self._handle = handle
        self._own_namespace = own_namespace

    @classmethod
    async def open(cls, jail: Jail) -> Connection:
        try:
            stream = jail.connect()
        except OSError as error:
            raise SandboxError(f"the sandbox's fork server cannot be reached ({error}); try again") from None
        stream.setblocking(False)
        try:
            await _readable(stream.fileno())
            word, handles, _, _ = socket.recv_fds(stream, 1024, 1)
            if not handles:
                said = word[1:].decode("utf-8", "replace") or "its fork server is gone"
                raise SandboxError(f"the sandbox could not start an execution: {said}")
        except BaseException:
            stream.close()
            raise
        return cls(stream, handles[0], jail.level == "bubblewrap")

    async def send(self, message: wire.Message) -> None:
        await asyncio.get_running_loop().sock_sendall(self._stream, wire.pack(message))

    async def receive(self, seconds: float) -> wire.Message:
        """The answer; SandboxError when there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                header = await self._exactly(wire.LENGTH.size)
                message = wire.unpack(await self._exactly(wire.length_of(header)))
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer within {seconds:g} seconds; run fewer at once") from None
        except ConnectionError as error:
            raise SandboxError(f"the sandbox ended without an answer ({error}); was it out of memory?") from None
        if "failed" in message:
            raise SandboxError(f"the sandbox could not be set up: {message['failed']}")
        return message

    async def end(self) -> None:
        """End whatever still runs. Safe at any time, also while being cancelled."""
        self._stream.close()
        try:
            if not self._own_namespace:
                async with asyncio.timeout(END_SECONDS):
                    await _readable(self._handle)
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._stream, min(size - len(parts), 1 << 20))
            if not part:
                raise wire.WireClosed("the other side is gone")
            parts += part
        return bytes(parts)


async def _readable(end: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Any] = loop.create_future()

    def settle() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(end, settle)
    try:
        await ready
    finally:
        loop.remove_reader(end)
