"""Converts programs and outcomes to and from the JSON messages between the host and the sandbox."""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rally.sandbox import json_socket
from rally.sandbox.fork_server import readable_folders
from rally.sandbox.inside.confine import UNPRIVILEGED, LevelName
from rally.sandbox.languages import CommandPlan
from rally.sandbox.types import CommandResult, Limits, Outcome, Program

FOLDER = "/tmp/work"
_KERNEL_BYTES = 32 << 20  # for stacks, page tables and pipes of as many processes as are allowed


def all_memory(program: Program, limits: Limits) -> int:
    """Bytes that a cgroup allows an execution: its memory, and its disk, which is memory too."""
    return ((program.memory_mb or limits.memory_mb) + limits.disk_mb << 20) + _KERNEL_BYTES


def request_message(
    program: Program, steps: CommandPlan, limits: Limits, folder: str, session: bool
) -> json_socket.Message:
    """The message to a supervisor; inside/execution_request.py reads it."""
    caps = {
        "memory": (program.memory_mb or limits.memory_mb) << 20,
        "disk": limits.disk_mb << 20,
        "files": limits.files,
        "output": limits.output_bytes,
        "processes": limits.processes,
        "open_files": limits.open_files,
        "cpu_seconds": limits.cpu_seconds,
    }
    return {
        "folder": folder,
        "main": steps.main,
        "code": program.code,
        "steps": steps.steps,
        "caps": caps,
        "stdin": program.stdin,
        "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        "fetch": list(program.fetch_files),
        "echo": program.echo,
        "session": session,
        "readable": list(readable_folders()),
    }


def outcome_of(message: json_socket.Message, level: LevelName) -> Outcome:
    """The outcome from a supervisor's message."""
    results = {step.pop("name"): CommandResult(**step) for step in message["steps"]}
    return Outcome(
        isolation=level,
        run=results.get("run"),
        compile=results.get("compile"),
        files={name: base64.b64decode(content) for name, content in message.get("files", {}).items()},
        files_left_out=message.get("files_left_out", 0),
        echo=message["echo"],
        peak_memory=message["peak_memory"],
        state_lost=message.get("lost", False),
    )


@contextmanager
def scratch_folder(level: LevelName) -> Iterator[str]:
    """The folder that a program works in: in its own tmpfs, or else a temporary folder that is removed afterwards."""
    if level == "bubblewrap":
        yield FOLDER
        return
    folder = tempfile.mkdtemp(prefix="rally-sandbox-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
