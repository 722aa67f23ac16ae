"""The training process starts the second one, waits for it only at the beginning and the end, and passes on its words.

A tracker that cannot be opened stops the run before its first step. One that fails later is warned of once.
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
    """Hands the run folder on while the `with` block lasts."""

    def __init__(self, settings: ExportSettings, console: RunConsole) -> None:
        self._settings = settings
        self._console = console
        self._log = settings.state / LOG
        self._said = b""
        self._gone = False

    def __enter__(self) -> Exporter:
        """Start, and wait until every tracker is open."""
        self._start()
        words = list(self._words(OPENING_SECONDS, until="ready"))
        if refused := [text for kind, _, text in words if kind == "refused"]:
            self._in.close()
            raise RallyError("; ".join(refused))
        if not any(kind == "ready" for kind, _, _ in words):
            self._process.kill()  # it may hang, and nothing was sent yet
            self._process.wait()
            what = "their process ended" if self._gone else f"they did not answer within {OPENING_SECONDS:.0f} s"
            raise RallyError(
                f"the trackers cannot be opened: {what}, and {self._log} says more; mend that and try again"
            )
        for word in words:
            self._pass_on(*word)
        return self

    def _start(self) -> None:
        self._settings.state.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                # -P: a folder `wandb` or a file `mlflow.py` where the command is run is not the library
                [sys.executable, "-P", "-m", "rally.track.export", self._settings.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the run; this one still has things to send
                env=_environment(),
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say that there is news. A full pipe says so already."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._in.fileno(), b"n")
        for word in self._words(0.0):
            self._pass_on(*word)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Let the rest be sent. What cannot be sent in time goes on being sent when the run has ended."""
        with suppress(BlockingIOError, BrokenPipeError):
            if kind is None:
                os.write(self._in.fileno(), b"e")
        self._in.close()
        for word in self._words(CLOSING_SECONDS):
            self._pass_on(*word)
        if self._process.poll() is None and not self._gone:
            self._console.note(f"trackers are still being sent to (process {self._process.pid}), which ends by itself")

    def _pass_on(self, kind: str, name: str, text: str) -> None:
        match kind:
            case "closed":
                self._console.note(f"{name}: {text}")
            case "missing":
                told = f"{name} lacks the last {text} of this run; all of it is in {self._settings.folder}"
                self._console.warn_once(f"missing {name}", told)
            case "unended":
                self._console.warn_once(f"unended {name}", f"{name} has all it was sent, but failed to end ({text})")
            case "failed":
                told = f"{name} failed ({text}); training goes on, {name} is tried again, and the run folder has all"
                self._console.warn_once(f"failed {name}", told)
            case "gone":
                told = f"nothing is sent to trackers any more, because their process ended; {self._log} says why"
                self._console.warn_once("trackers", told)

    def _words(self, seconds: float, until: str | None = None) -> Iterator[tuple[str, str, str]]:
        """What the process says within so many seconds, or until it has said `until`, or ends."""
        ends = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while not self._gone and selector.select(max(0.0, ends - time.monotonic())):
                part = os.read(self._out.fileno(), 65536)
                if not part:
                    yield from self._ended()
                    return
                *lines, self._said = (self._said + part).split(b"\n")
                said = [json.loads(line) for line in lines]
                yield from ((kind, name, text) for kind, name, text in said)
                if any(kind == until for kind, _, _ in said):
                    return

    def _ended(self) -> Iterator[tuple[str, str, str]]:
        self._gone = True
        if self._process.wait():
            yield "gone", "", ""


def _environment() -> dict[str, str]:
    """The same as ours, with this very Rally first among the modules, and a dead server noticed in seconds."""
    here = str(Path(rally.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    patience = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
    return patience | os.environ | {"PYTHONPATH": path}
