"""Chooses the strongest level of isolation that works on this machine, by running a probe program at it.

A level weaker than bubblewrap is always logged as a warning.
"""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Literal

from rally.sandbox import json_socket
from rally.sandbox.fork_server import INSTALL_BUBBLEWRAP, ForkServer, ForkServerFailed
from rally.sandbox.inside import landlock
from rally.sandbox.inside.confine import LevelName
from rally.sandbox.languages import plan
from rally.sandbox.program_messages import all_memory, outcome_of, request_message, scratch_folder
from rally.sandbox.types import Limits, Program, SandboxError

Isolation = Literal["auto", "bubblewrap", "landlock", "unprotected"]

WARM_MODULES = ("numpy", "sympy")
_LEVELS: dict[Isolation, tuple[LevelName, ...]] = {
    "auto": ("bubblewrap", "landlock"),
    "bubblewrap": ("bubblewrap",),
    "landlock": ("landlock",),
    "unprotected": ("unprotected",),
}
_WEAKER: dict[LevelName, str] = {
    "landlock": "programs share this machine's process table, and disk and process limits are only polled",
    "unprotected": "programs can read and change whatever the user of the sandbox can, and use the network",
}
_PROBE = "import os\nassert os.access(os.__file__, os.R_OK), 'this Python is not readable for other users'\nprint(1)"
_PROBE_SECONDS = 30.0
_log = logging.getLogger(__name__)


def strongest(isolation: Isolation) -> ForkServer:
    """A fork server at the strongest level allowed; SandboxError says why each of them failed."""
    if isolation not in _LEVELS:
        raise SandboxError(f"isolation must be one of {', '.join(_LEVELS)}, not {isolation!r}")
    reasons = []
    for level in _LEVELS[isolation]:
        try:
            fork_server = _probed(level)
        except ForkServerFailed as failed:
            reasons.append(f"{level}: {failed}")
            continue
        because = f" because {'; '.join(reasons)}" if reasons else ""
        if level in _WEAKER:
            _log.warning("the sandbox runs at the weaker level %s%s: %s", level, because, _WEAKER[level])
        else:
            _log.info("the sandbox runs at the level %s", level)
        return fork_server
    raise SandboxError(
        f"code cannot be isolated here ({'; '.join(reasons)}); {INSTALL_BUBBLEWRAP}; "
        "or, for code that you trust with this machine, set isolation: unprotected"
    )


def _probed(level: LevelName) -> ForkServer:
    """A fork server that has run the probe program."""
    if level == "landlock" and landlock.abi() < landlock.NEEDED_ABI:
        raise ForkServerFailed(f"this kernel has Landlock version {landlock.abi()}, {landlock.NEEDED_ABI} is needed")
    fork_server = ForkServer.start(level, WARM_MODULES)
    try:
        _run_probe(fork_server)
    except (OSError, ForkServerFailed) as failed:
        fork_server.stop()
        raise ForkServerFailed(str(failed)) from None
    return fork_server


def _run_probe(fork_server: ForkServer) -> None:
    program = Program(code=_PROBE, timeout=_PROBE_SECONDS)
    with scratch_folder(fork_server.level) as folder, closing(fork_server.connect()) as stream:
        stream.settimeout(2 * _PROBE_SECONDS)
        greeting = stream.recv(1024)  # its pidfd is not received: the probe ends by itself
        if greeting[:1] != b"+":
            raise ForkServerFailed(greeting[1:].decode("utf-8", "replace") or "its fork server ended")
        cgroup = fork_server.send_cgroup(stream, all_memory(program, Limits()))
        try:
            json_socket.send(stream, request_message(program, plan(program), Limits(), folder, session=False))
            message = json_socket.receive(stream)
        finally:
            if cgroup is not None and fork_server.cgroups is not None:
                fork_server.cgroups.release(cgroup)
    if "failed" in message:
        raise ForkServerFailed(message["failed"])
    result = outcome_of(message, fork_server.level).last
    if result.stdout.strip() != "1":
        raise ForkServerFailed(f"a probe program failed: {(result.stderr.strip().splitlines() or [result.reason])[-1]}")
