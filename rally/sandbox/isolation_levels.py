"""Guarantees: the strongest level of isolation that really runs here is taken, and a weaker one never goes unsaid."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Literal

from rally.sandbox import json_socket
from rally.sandbox.fork_server import INSTALL_BUBBLEWRAP, ForkServer, ForkServerFailed
from rally.sandbox.inside import landlock
from rally.sandbox.inside.confine import LevelName
from rally.sandbox.languages import plan
from rally.sandbox.messages import order, outcome, scratch_folder
from rally.sandbox.program import Limits, Program, SandboxError

Isolation = Literal["auto", "bubblewrap", "landlock", "unprotected"]

WARM_MODULES = ("numpy", "sympy")
_LEVELS: dict[Isolation, tuple[LevelName, ...]] = {
    "auto": ("bubblewrap", "landlock"),
    "bubblewrap": ("bubblewrap",),
    "landlock": ("landlock",),
    "unprotected": ("unprotected",),
}
_WEAKER: dict[LevelName, str] = {
    "landlock": "programs share this machine's process table, and disk and process limits are watched, not walled",
    "unprotected": "programs can read and change whatever the user of the sandbox can, and use the network",
}
_PROBE = "import os\nassert os.access(os.__file__, os.R_OK), 'this Python is not readable for other users'\nprint(1)"
_PROBE_SECONDS = 30.0
_log = logging.getLogger(__name__)


def strongest(isolation: Isolation) -> ForkServer:
    """A warm jail at the strongest level allowed; SandboxError says what kept each from running."""
    if isolation not in _LEVELS:
        raise SandboxError(f"isolation must be one of {', '.join(_LEVELS)}, not {isolation!r}")
    reasons = []
    for level in _LEVELS[isolation]:
        try:
            jail = _proven(level)
        except ForkServerFailed as failed:
            reasons.append(f"{level}: {failed}")
            continue
        because = f" because {'; '.join(reasons)}" if reasons else ""
        if level in _WEAKER:
            _log.warning("the sandbox runs at the weaker level %s%s: %s", level, because, _WEAKER[level])
        else:
            _log.info("the sandbox runs at the level %s", level)
        return jail
    raise SandboxError(
        f"code cannot be isolated here ({'; '.join(reasons)}); {INSTALL_BUBBLEWRAP}; "
        "or, for code you trust with this machine, write isolation: unprotected"
    )


def _proven(level: LevelName) -> ForkServer:
    """A jail in which a program ran."""
    if level == "landlock" and landlock.abi() < landlock.NEEDED_ABI:
        raise ForkServerFailed(f"this kernel has Landlock version {landlock.abi()}, {landlock.NEEDED_ABI} is needed")
    jail = ForkServer.start(level, WARM_MODULES)
    try:
        _run_probe(jail)
    except (OSError, ForkServerFailed) as failed:
        jail.stop()
        raise ForkServerFailed(str(failed)) from None
    return jail


def _run_probe(jail: ForkServer) -> None:
    program = Program(code=_PROBE, timeout=_PROBE_SECONDS)
    with scratch_folder(jail.level) as folder, closing(jail.connect()) as stream:
        stream.settimeout(2 * _PROBE_SECONDS)
        word = stream.recv(1024)  # the handle that comes with it is not taken: the probe ends by itself
        if word[:1] != b"+":
            raise ForkServerFailed(word[1:].decode("utf-8", "replace") or "its fork server ended")
        json_socket.send(stream, order(program, plan(program), Limits(), folder, session=False))
        message = json_socket.receive(stream)
    if "failed" in message:
        raise ForkServerFailed(message["failed"])
    result = outcome(message, jail.level).last
    if result.stdout.strip() != "1":
        raise ForkServerFailed(f"a probe failed: {(result.stderr.strip().splitlines() or [result.reason])[-1]}")
