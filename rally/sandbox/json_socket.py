"""Guarantees: one message is one JSON object, whole, or a WireClosed; both sides of the isolation speak only this.

A message is its length in 8 bytes and then UTF-8 JSON. A reader refuses more than it is prepared to hold.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")
MAX_MESSAGE = 256 << 20

Message = dict[str, Any]


class SocketClosed(ConnectionError):
    """The other side is gone, or sent what is no message."""


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """The size of the body that follows `header`."""
    size: int = LENGTH.unpack(header)[0]
    if size > MAX_MESSAGE:
        raise SocketClosed(f"a message of {size} bytes is no message")
    return size


def unpack(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError:
        raise SocketClosed("what arrived is no message") from None
    if not isinstance(message, dict):
        raise SocketClosed("what arrived is no message")
    return message


def send(connection: socket.socket, message: Message) -> None:
    connection.sendall(pack(message))


def receive(connection: socket.socket) -> Message:
    return unpack(_exactly(connection, length_of(_exactly(connection, LENGTH.size))))


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise SocketClosed("the other side is gone")
        parts += part
    return bytes(parts)
