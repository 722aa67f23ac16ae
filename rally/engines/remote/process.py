"""A server as a child: it has a log that is quoted when it fails, and never outlives this program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.1
POLITE_SECONDS = 5.0
QUOTED_LINES = 12


class ServerProcess:
    """One run of a server. Start it from the program's main thread: the kernel ties the child to the thread that made
    it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-I", str(Path(__file__).with_name("launcher.py")), str(POLITE_SECONDS)]
        with log.open("ab") as out:
            out.write(f"$ {' '.join(command)}\n".encode())
            out.flush()
            self._begins = out.tell()
            self._child = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    async def ended(self) -> None:
        """Returns when it has ended, for whatever reason."""
        while self.alive:
            await asyncio.sleep(POLL_SECONDS)

    def last_words(self) -> str:
        """Where the log is, and its last lines, indented."""
        with self.log.open("rb") as file:
            file.seek(self._begins)
            lines = file.read().decode(errors="replace").splitlines()
        quoted = "\n".join(f"  {line}" for line in lines[-QUOTED_LINES:])
        return f"its log is {self.log} and ends with\n{quoted}" if quoted else f"its log, {self.log}, is empty"

    async def stop(self) -> None:
        """End it and everything it started."""
        if self.alive:
            self._child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + POLITE_SECONDS + 2
            while self.alive and time.monotonic() < deadline:
                await asyncio.sleep(POLL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        await asyncio.to_thread(self._child.wait)
