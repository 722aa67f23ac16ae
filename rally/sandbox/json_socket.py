"""JSON messages over a socket, between the host and the sandbox.

A message is its length in 8 bytes, then a UTF-8 JSON object of at most MAX_MESSAGE bytes. A reader gets a whole message
or SocketClosed.
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
    """The other side has closed the connection, or sent an invalid message."""


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """The size of the body that follows `header`."""
    size: int = LENGTH.unpack(header)[0]
    if size > MAX_MESSAGE:
        raise SocketClosed(f"a message of {size} bytes is too long")
    return size


def unpack(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError:
        raise SocketClosed("an invalid message was received") from None
    if not isinstance(message, dict):
        raise SocketClosed("an invalid message was received")
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
            raise SocketClosed("the other side closed the connection")
        parts += part
    return bytes(parts)
