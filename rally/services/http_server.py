"""What all HTTP servers share: the token check, the check of host and port, and the uvicorn runner with its guard.

A server that other machines can reach must have a token. Every server runs behind `http_guard.Guard`.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from rally.types import RallyError

if TYPE_CHECKING:
    from rally.services.http_guard import HttpLimits

MANY_FILES = 8192
GRACE_SECONDS = 2  # for requests that still run when a server thread ends
ABSENT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


class ServeError(RallyError):
    """A server cannot be started with these options."""


def check_exposure(host: str, variable: str) -> str | None:
    """The token that clients must send, from the environment variable. Without one, only a loopback host is allowed."""
    token = os.environ.get(variable) or None
    if token is None and not _is_loopback(host):
        raise ServeError(
            f"{host} can be reached from other machines; set {variable} to a secret that clients must send, or serve "
            "on 127.0.0.1"
        )
    return token


def check_free(host: str, port: int) -> None:
    """Raise ServeError if the address cannot be served on, before anything is loaded. A name may have several
    addresses; those of a family that this machine lacks are ignored."""
    try:
        errors = [_bind_error(*address) for address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except socket.gaierror as unknown:
        errors = [unknown]
    for error in errors:
        if error is not None and (error.errno not in ABSENT or None not in errors):
            raise ServeError(
                f"the server cannot use {host}, port {port} ({error.strerror}); choose another --port or --host"
            )


def _bind_error(family: int, kind: int, protocol: int, _: str, address: Any) -> OSError | None:
    """The error of binding to an address; None if it is free."""
    try:
        with socket.socket(family, kind, protocol) as probe:  # with the options that the server sets
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def carries(token: str | None, header: str) -> bool:
    """Whether an Authorization header carries the token, or none is required. Servers decode headers as Latin-1; a
    token is UTF-8."""
    return token is None or hmac.compare_digest(header.encode("latin-1"), f"Bearer {token}".encode())


def serve(
    create: Callable[[], Any],
    host: str,
    port: int,
    log_level: str = "warning",
    allow_hosts: Collection[str] | None = (),
    *,
    max_body_mb: float | None = None,
    limits: HttpLimits | None = None,
) -> None:
    """Run an ASGI application until it is stopped, behind a guard. `allow_hosts`: names beside `host` and the loopback
    names by which clients may call it; None if any may be used."""
    app, options = _guarded(create, host, allow_hosts, limits, max_body_mb)
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level=log_level, **options)


class ServerThread:
    """An ASGI application that a thread of this process serves, on a free port of `host`, behind a guard."""

    def __init__(self, create: Callable[[], Any], host: str, *, max_body_mb: float | None = None) -> None:
        app, options = _guarded(create, host, (), max_body_mb=max_body_mb)
        import uvicorn

        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.bind((host, 0))
        self._socket.listen()  # clients that connect before the thread has started wait for it
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="rally-engine-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def _guarded(
    create: Callable[[], Any],
    host: str,
    allow_hosts: Collection[str] | None,
    limits: HttpLimits | None = None,
    max_body_mb: float | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The application behind its guard, and the options of uvicorn."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < MANY_FILES:  # each connection is a file
        most = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        import uvicorn  # noqa: F401 - to report that it is missing

        from rally.services.http_guard import MEBIBYTE, Guard, HostNames, HttpLimits, uvicorn_options

        limits = limits or HttpLimits()
        if max_body_mb is not None:
            limits = replace(limits, max_body=int(max_body_mb * MEBIBYTE))
        app = Guard(create(), None if allow_hosts is None else HostNames.of(host, allow_hosts), limits)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rally"):
            raise
        raise ServeError(f"serving needs the package {error.name}; run: pip install 'rally-rl[services]'") from None
    return app, uvicorn_options(limits)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
