"""A server that other machines can reach asks them for a token; what serving needs and lacks is named with its cure."""

from __future__ import annotations

import errno
import hmac
import os
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from rally.types import RallyError

ABSENT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


class ServeError(RallyError):
    """A server that cannot be started as asked."""


def check_exposure(host: str, variable: str) -> str | None:
    """The token that clients must send, from the environment; without one, only this machine may ask."""
    token = os.environ.get(variable) or None
    if token is None and not _is_loopback(host):
        raise ServeError(
            f"{host} can be reached from other machines; set {variable} to a secret that clients must send, or serve "
            "on 127.0.0.1"
        )
    return token


def check_free(host: str, port: int) -> None:
    """Say that an address cannot be served on before anything is loaded for it. A name may stand for several; all are
    served on but those of a family that this machine does not have."""
    try:
        refusals = [_refusal(*place) for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except socket.gaierror as unknown:
        refusals = [unknown]
    for refusal in refusals:
        if refusal is not None and (refusal.errno not in ABSENT or None not in refusals):
            told = f"nothing can be served at {host}, port {port} ({refusal.strerror})"
            raise ServeError(f"{told}; choose another --port or --host")


def _refusal(family: int, kind: int, protocol: int, _: str, address: Any) -> OSError | None:
    """Why the system would not let a server have an address."""
    try:
        with socket.socket(family, kind, protocol) as probe:  # set as the server sets its own
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as refusal:
        return refusal
    return None


def carries(token: str | None, header: str) -> bool:
    """Whether an Authorization header carries the token, if there is one. Servers read headers as Latin-1; a token is
    UTF-8."""
    return token is None or hmac.compare_digest(header.encode("latin-1"), f"Bearer {token}".encode())


def serve(create: Callable[[], Any], host: str, port: int, log_level: str = "warning") -> None:
    """Run an ASGI application until it is stopped."""
    try:
        import uvicorn

        app = create()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rally"):
            raise
        raise ServeError(f"serving needs the package {error.name}; run: pip install 'rally-rl[services]'") from None
    uvicorn.run(app, host=host, port=port, log_level=log_level, access_log=False)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
