"""How a server joins a run that is already training: a file in the run folder that names its address and token.

    RUN/servers/join/10.0.0.7-8000.json     {"url": "http://10.0.0.7:8000", "token": "..."}

The server joins when the file appears, and leaves when it is removed. Who can write to the run folder decides which
servers a run uses; by default that is its user alone. The files have the mode 0600, because they hold tokens.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rally.engines.base import EngineError
from rally.engines.remote.client import Address, ServerReplica
from rally.util.private_files import private_folder

MAX_BYTES = 64 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerAnnouncement:
    """A server that wants to join. Without a token the run uses its own (`RALLY_ENGINE_TOKEN`)."""

    url: str = field(repr=False)  # may hold a user and password
    token: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Its address, for messages."""
        return Address.of(self.url).url


def join_folder(run_dir: Path) -> Path:
    return run_dir / "servers" / "join"


def announce(run_dir: Path, server: ServerAnnouncement) -> Path:
    """Write the file that lets a server join the run; removing it lets the server leave."""
    if not run_dir.is_dir():
        raise EngineError(f"{run_dir} is no run folder; name the folder of the run that the server shall join")
    private_folder(run_dir / "servers")
    folder = private_folder(join_folder(run_dir))
    file = folder / f"{re.sub('[^A-Za-z0-9.]+', '-', server.name.split('//', 1)[-1])}.json"
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        json.dump({"url": server.url, **({"token": server.token} if server.token else {})}, opened)
    part.rename(file)
    return file


class JoinFolder:
    """The announcements of a run. `make` creates the client of a server."""

    def __init__(self, folder: Path, make: Callable[[ServerAnnouncement], ServerReplica]) -> None:
        self.folder = private_folder(folder)
        self.make = make
        self._reported: set[str] = set()
        self._last: set[ServerAnnouncement] = set()

    def read(self) -> set[ServerAnnouncement]:
        """All servers that are announced now. A file that cannot be read is reported once and left out; while the
        folder cannot be read, nobody joins or leaves."""
        try:
            files = sorted(self.folder.glob("*.json"))
        except OSError as problem:
            self._report(f"{self.folder} cannot be read, so no server joins or leaves: {problem}")
            return self._last
        found = set()
        for file in files:
            try:
                found.add(_parse(file))
            except FileNotFoundError:
                continue  # the server has just left
            except (OSError, ValueError, RecursionError) as problem:
                self._report(f"{file} does not announce a server: {problem}")
        self._last = found
        return found

    def _report(self, problem: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            _log.warning("%s", problem)


def _parse(file: Path) -> ServerAnnouncement:
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    match json.loads(file.read_text(encoding="utf-8")):
        case {"url": str(url), **more} if more.keys() <= {"token"}:
            token = more.get("token")
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError("its url is no address such as http://10.0.0.7:8000")
            if token is not None and not isinstance(token, str):
                raise ValueError("its token is no text")
            return ServerAnnouncement(url, token)
    raise ValueError('write {"url": "http://10.0.0.7:8000", "token": "..."}')
