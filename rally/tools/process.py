"""Guarantees: a program that a tool runs is gone when the call is, with everything it started, however it went.

    async def execute(self, instance_id, parameters, **kwargs):
        ran = await run_process(["my-solver", "--stdin"], parameters["problem"].encode())
        return ran.text if ran.code == 0 else {"error": f"the solver ended with {ran.code}: {ran.text}"}

This is the place for code that may crash, hang or exit: a tool function runs inside the training process, and ends it
when it ends its process. Output past `max_output` is read, so that the program is not blocked, and counted, not kept.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

MAX_OUTPUT = 1_000_000
_CHUNK = 65_536


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a program ended. `code` is negative when a signal ended it; `cut` bytes of output were not kept."""

    code: int
    output: bytes
    cut: int = 0

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")


async def run_process(command: Sequence[str], stdin: bytes = b"", *, max_output: int = MAX_OUTPUT) -> Ran:
    """Run a program to its end, output and errors together. Cancelling the call, as a deadline does, kills it."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # so that one kill reaches what the program has started, too
    )
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_feed(process, stdin))
            reading = group.create_task(_read(process, max_output))
        output, cut = reading.result()
        return Ran(code=await process.wait(), output=output, cut=cut)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read what it is given
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, most: int) -> tuple[bytes, int]:
    assert process.stdout is not None
    kept = bytearray()
    cut = 0
    while chunk := await process.stdout.read(_CHUNK):
        room = most - len(kept)
        kept += chunk[:room]
        cut += max(0, len(chunk) - room)
    return bytes(kept), cut
