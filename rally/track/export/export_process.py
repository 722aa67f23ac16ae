"""The training process's side of the export: starts the export process and prints its messages.

It waits for the export process only at the start and the end. A tracker that cannot be opened stops the run before its
first step; one that fails later causes one warning.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import rally
from rally.track.console import RunConsole
from rally.track.export.settings import ExportSettings
from rally.types import RallyError

OPENING_SECONDS = 120.0
CLOSING_SECONDS = 120.0
LOG = "log.txt"


class Exporter:
    """Exports the run folder during a `with` block."""

    def __init__(self, settings: ExportSettings, console: RunConsole) -> None:
        self._settings = settings
        self._console = console
        self._log = settings.state / LOG
        self._partial_line = b""
        self._process_ended = False

    def __enter__(self) -> Exporter:
        """Start, and wait until every tracker is open."""
        self._start()
        messages = list(self._messages(OPENING_SECONDS, until="ready"))
        if refused := [text for kind, _, text in messages if kind == "refused"]:
            self._in.close()
            raise RallyError("; ".join(refused))
        if not any(kind == "ready" for kind, _, _ in messages):
            self._process.kill()  # it may hang; nothing has been sent yet
            self._process.wait()
            what = (
                "the export process ended"
                if self._process_ended
                else f"they did not answer within {OPENING_SECONDS:.0f} s"
            )
            raise RallyError(f"the trackers cannot be opened: {what}; see {self._log}, fix the problem and try again")
        for message in messages:
            self._report(*message)
        return self

    def _start(self) -> None:
        self._settings.state.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                # -P: do not import a folder `wandb` or a file `mlflow.py` of the working directory
                [sys.executable, "-P", "-m", "rally.track.export", self._settings.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C must not end it: it still has records to send
                env=_environment(),
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Announce new records. A full pipe has announced them already."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._in.fileno(), b"n")
        for message in self._messages(0.0):
            self._report(*message)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait until the rest is sent. If that takes too long, the export process continues on its own."""
        with suppress(BlockingIOError, BrokenPipeError):
            if kind is None:
                os.write(self._in.fileno(), b"e")
        self._in.close()
        for message in self._messages(CLOSING_SECONDS):
            self._report(*message)
        if self._process.poll() is None and not self._process_ended:
            self._console.note(f"process {self._process.pid} is still sending to trackers and ends by itself")

    def _report(self, kind: str, name: str, text: str) -> None:
        match kind:
            case "closed":
                self._console.note(f"{name}: {text}")
            case "missing":
                warning = f"{name} lacks the last {text} records of this run; all are in {self._settings.folder}"
                self._console.warn_once(f"missing {name}", warning)
            case "unended":
                self._console.warn_once(f"unended {name}", f"{name} has all records, but could not be closed ({text})")
            case "failed":
                warning = (
                    f"{name} failed ({text}) and is retried; training continues, and the run folder has all records"
                )
                self._console.warn_once(f"failed {name}", warning)
            case "gone":
                warning = f"nothing more is sent to trackers, because the export process ended; see {self._log}"
                self._console.warn_once("trackers", warning)

    def _messages(self, seconds: float, until: str | None = None) -> Iterator[tuple[str, str, str]]:
        """The messages of the export process within `seconds`, until one of kind `until`, or until it ends."""
        ends = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while not self._process_ended and selector.select(max(0.0, ends - time.monotonic())):
                part = os.read(self._out.fileno(), 65536)
                if not part:
                    yield from self._ended()
                    return
                *lines, self._partial_line = (self._partial_line + part).split(b"\n")
                received = [json.loads(line) for line in lines]
                yield from ((kind, name, text) for kind, name, text in received)
                if any(kind == until for kind, _, _ in received):
                    return

    def _ended(self) -> Iterator[tuple[str, str, str]]:
        self._process_ended = True
        if self._process.wait():
            yield "gone", "", ""


def _environment() -> dict[str, str]:
    """The same as ours, with this very Rally first among the modules, and a dead server noticed in seconds."""
    here = str(Path(rally.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    patience = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
    return patience | os.environ | {"PYTHONPATH": path}
