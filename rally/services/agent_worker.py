"""An agent worker: fetches episodes from the gateway of a run and plays each with a program (`rally agent`).

A program gets its episode by environment variables and reports over HTTP, as one that the run starts itself. It is
killed when its episode has ended or the run stops answering, and it does not outlive its worker. A worker that is
stopped gives its episodes back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from rally.redact import redact
from rally.types import RallyError
from rally.util.subprocesses import ProcessResult, run_process

CLAIM_SECONDS = 20.0  # how long one request for an episode waits at the gateway
BEAT_SECONDS = 2.0
RETRY_SECONDS = 1.0  # before the next attempt to reach a gateway
QUOTED_LINES, MAX_LINES = 8, 4000  # what the gateway is told of a program's output
# The kernel kills the program if its worker dies: exec keeps the signal that prctl asks for.
TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


class WorkerError(RallyError):
    """A worker cannot go on."""


@dataclass(frozen=True, kw_only=True)
class AgentWorkerSettings:
    """`gateway` is the address of a run's gateway, `patience` the seconds without one after which the worker ends."""

    gateway: str
    token: str
    command: Sequence[str]
    jobs: int = 1
    patience: float = 600.0
    name: str = f"{socket.gethostname()}-{os.getpid()}"


class AgentWorker:
    """Plays episodes until the gateway is gone for `patience` seconds, or until it is cancelled."""

    def __init__(self, settings: AgentWorkerSettings, note: Callable[[str], None]) -> None:
        self._settings, self._note = settings, note
        self._reached = time.monotonic()
        self._told = False
        self.played = 0

    async def run(self) -> None:
        headers = {"Authorization": f"Bearer {self._settings.token}"}
        limits = httpx.Limits(max_connections=None)
        url = f"{self._settings.gateway.rstrip('/').removesuffix('/v1')}/v1/workers/"
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._settings.jobs):
                group.create_task(self._play_all(http))

    async def _play_all(self, http: httpx.AsyncClient) -> None:
        while True:
            claim = await self._post(http, "claim", {"worker": self._settings.name, "wait": CLAIM_SECONDS})
            if claim is None:
                if time.monotonic() - self._reached > self._settings.patience:
                    problem = f"no gateway has answered at {self._settings.gateway} for {self._settings.patience:g} s"
                    raise WorkerError(f"{problem}; start the run, or correct --gateway")
                await asyncio.sleep(RETRY_SECONDS)
            elif claim:
                await self._play(http, claim)

    async def _play(self, http: httpx.AsyncClient, claim: dict[str, Any]) -> None:
        lease, lost_after = {"lease": claim["lease"]}, float(claim["lost_after"])
        program = asyncio.create_task(self._program(claim["environment"]))
        try:
            if await self._watched(http, program, lease, lost_after):
                ended = program.result()
                lines = "\n".join([line for line in ended.text.splitlines() if line.strip()][-QUOTED_LINES:])
                report = {**lease, "code": ended.code, "lines": redact(lines)[-MAX_LINES:]}
                await self._report(http, report, lost_after)
            else:
                self._note("an episode has ended or its run is gone; its program was killed")
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):
                await self._post(http, "report", {**lease, "left": True})
            raise
        finally:
            program.cancel()
            await asyncio.wait({program})

    async def _report(self, http: httpx.AsyncClient, report: dict[str, Any], lost_after: float) -> None:
        """Report how a program ended: again while the gateway cannot be reached, as when it closes a connection at this
        moment. It counts an end once."""
        until = time.monotonic() + lost_after
        while (answer := await self._post(http, "report", report)) is None and time.monotonic() < until:
            await asyncio.sleep(RETRY_SECONDS)
        if answer is None:
            self._note(f"the end of an episode could not be reported within {lost_after:g} s; the run has given it up")
        else:
            self.played += 1

    async def _watched(
        self, http: httpx.AsyncClient, program: asyncio.Task[ProcessResult], lease: dict[str, Any], lost_after: float
    ) -> bool:
        """Whether the program ended by itself, rather than because its episode did."""
        answered = time.monotonic()
        while not program.done():
            await asyncio.wait({program}, timeout=BEAT_SECONDS)
            beat = None if program.done() else await self._post(http, "beat", lease)
            if beat is not None:
                answered = time.monotonic()
            if not program.done() and ((beat and not beat["go_on"]) or time.monotonic() - answered > lost_after):
                return False
        return True

    async def _program(self, environment: dict[str, str]) -> ProcessResult:
        own = {name: value for name, value in os.environ.items() if name != "RALLY_AGENT_TOKEN"}
        command = [sys.executable, "-I", "-c", TIED, *self._settings.command]
        return await run_process(command, environment={**own, **environment})

    async def _post(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; empty for 204, None if the gateway cannot be reached, or only what stands before it."""
        try:
            answer = await http.post(path, json=body)
        except httpx.TransportError as error:
            self._note_unreached(str(error) or type(error).__name__)
            return None
        if answer.status_code >= 500:  # a proxy without the gateway, or a gateway that is ending
            self._note_unreached(f"HTTP {answer.status_code}")
            return None
        self._reached, self._told = time.monotonic(), False
        if answer.status_code == 204:
            return {}
        if answer.status_code != 200:
            raise WorkerError(_refusal(answer, self._settings.gateway))
        found: dict[str, Any] = answer.json()
        return found

    def _note_unreached(self, reason: str) -> None:
        if not self._told:
            self._told = True
            self._note(f"no gateway answers at {self._settings.gateway} ({reason}); waiting")


def _refusal(answer: httpx.Response, gateway: str) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {answer.status_code}"
    return f"the gateway at {gateway} refused this worker: {message}"


async def work(settings: AgentWorkerSettings, note: Callable[[str], None]) -> int:
    """Play episodes until SIGTERM or SIGINT. Returns how many were played."""
    worker = AgentWorker(settings, note)
    running = asyncio.create_task(worker.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        pass
    except BaseExceptionGroup as group:  # the first worker task that failed has ended the others
        raise group.exceptions[0] from None
    return worker.played
