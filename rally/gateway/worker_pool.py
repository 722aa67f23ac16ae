"""Gives the episodes of a run to agent workers, programs on other machines that fetch them over HTTP (`rally agent`).

    POST /v1/workers/claim      {"worker", "wait"}: an episode and the environment of its program, or 204
    POST /v1/workers/beat       {"lease"}: {"go_on"}; false if the episode has ended, so that the program must too
    POST /v1/workers/report     {"lease", "code", "lines"} or {"lease", "left": true}: how the program ended

An episode is claimed by one worker and ends in one way: by its report, by its deadline, or because its worker stopped
answering, which is no fault of the policy. While an episode waits for a worker, only the deadline of the step counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rally.gateway.agent_process import AgentProgramFailed, AgentWorkerLost, environment_of, program_failure
from rally.gateway.agent_runner import AgentClient
from rally.loops import LoopError
from rally.services.admission import Refused, unless_gone
from rally.services.http_server import carries

TOKEN = "RALLY_AGENT_TOKEN"
LONGEST_WAIT = 30.0  # seconds of one request for an episode
CLAIM_SECONDS = 0.1  # between two looks at the waiting episodes
CHECK_SECONDS = 0.5  # between two looks at the worker of an episode
LONGEST_CHECK = 4 * CHECK_SECONDS  # of a look that was late: this process was busy or stopped for the rest
NOTE_SECONDS = 10.0  # episodes wait this long before the user is told
MAX_LINES = 4000  # characters of a program's last lines

_log = logging.getLogger(__name__)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ClaimRequest(_Message):
    worker: str = Field(min_length=1, max_length=200)
    wait: float = Field(0.0, ge=0, le=LONGEST_WAIT)


class BeatRequest(_Message):
    lease: str = Field(max_length=64)


class ReportRequest(_Message):
    lease: str = Field(max_length=64)
    code: int = 0
    lines: str = Field("", max_length=MAX_LINES)
    left: bool = False


class ProgramEnd(NamedTuple):
    """How a program ended at its worker."""

    code: int
    lines: str


@dataclass(eq=False)
class Lease:
    """An episode that waits for a worker, or that one plays."""

    environment: Mapping[str, str]
    lost_after: float  # seconds without an answer of the worker
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    worker: str = ""  # empty: it waits
    seen: float = 0.0  # when the worker last answered, by time.monotonic
    ended: Future[ProgramEnd] = field(default_factory=Future)


class WorkerPool:
    """The waiting and the claimed episodes of a gateway. Its methods may be called from any thread."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url.removesuffix("/v1")
        self._lock = threading.Lock()
        self._waiting: dict[str, Lease] = {}
        self._claimed: dict[str, Lease] = {}
        self._asked = 0.0  # when a worker last asked for an episode
        self._noted = False
        self._closed = False

    def close(self) -> None:
        """Answer the requests that wait for an episode: there will be none."""
        self._closed = True

    @property
    def routes(self) -> list[Route]:
        handlers = {"claim": self._claim, "beat": self._beat, "report": self._report}
        return [Route(f"/v1/workers/{name}", one, methods=["POST"]) for name, one in handlers.items()]

    async def play(
        self,
        reported: Callable[[], Any],
        started: Callable[[], None],
        lost_after: float,
        row: Mapping[str, Any],
        client: AgentClient,
    ) -> Any:
        """Let a worker play an episode. Returns what its program reported, as `run_command` does. `started` is called
        when a worker has claimed it."""
        lease = Lease(environment_of(row, client), lost_after)
        with self._lock:
            self._waiting[lease.id] = lease
        try:
            end = await self._end_of(lease, started)
        finally:  # at a deadline the worker hears of it with its next beat
            with self._lock:
                self._waiting.pop(lease.id, None)
                self._claimed.pop(lease.id, None)
        if end.code:
            raise AgentProgramFailed(program_failure(end.code, end.lines))
        return reported()

    async def _end_of(self, lease: Lease, started: Callable[[], None]) -> ProgramEnd:
        ended, began, running = asyncio.wrap_future(lease.ended), time.monotonic(), False
        now = began
        while not ended.done():
            before = now
            await asyncio.wait({ended}, timeout=CHECK_SECONDS)
            now = time.monotonic()
            if (stopped := now - before - LONGEST_CHECK) > 0:  # this process, which is no silence of the worker
                with self._lock:
                    lease.seen += stopped
            if lease.worker and not running:
                running = True
                started()
            elif not lease.worker and now - began > NOTE_SECONDS:
                self._note_missing_workers(now)
            if running and not ended.done() and now - lease.seen > lease.lost_after:
                ended.cancel()
                problem = f"the agent worker {lease.worker} has not answered for {lease.lost_after:g} seconds"
                _log.warning("%s; its episode is lost", problem)
                raise AgentWorkerLost(problem)
        return ended.result()

    def _note_missing_workers(self, now: float) -> None:
        """Tell the user once that episodes wait and no worker is there."""
        with self._lock:
            if self._noted or now - self._asked < LONGEST_WAIT:
                return
            self._noted, count = True, len(self._waiting)
        what = "1 episode waits" if count == 1 else f"{count} episodes wait"
        _log.warning(
            "%s for an agent worker; start one with: %s=... rally agent --gateway %s -- COMMAND", what, TOKEN, self._url
        )

    def _next(self, worker: str) -> Lease | None:
        with self._lock:
            self._asked, self._noted = time.monotonic(), False
            if not self._waiting:
                return None
            lease = self._waiting.pop(next(iter(self._waiting)))
            lease.worker, lease.seen = worker, time.monotonic()
            self._claimed[lease.id] = lease
            return lease

    async def _claim(self, request: Request) -> Response:
        body = ClaimRequest.model_validate_json(await _body(request))
        lease = await unless_gone(request, self._awaited(body))
        if lease is None:
            return Response(status_code=204)
        return JSONResponse({"lease": lease.id, "environment": lease.environment, "lost_after": lease.lost_after})

    async def _awaited(self, body: ClaimRequest) -> Lease | None:
        until = time.monotonic() + body.wait
        while (lease := self._next(body.worker)) is None and time.monotonic() < until and not self._closed:
            await asyncio.sleep(CLAIM_SECONDS)
        return lease

    async def _beat(self, request: Request) -> Response:
        lease = self._known(BeatRequest.model_validate_json(await _body(request)).lease)
        return JSONResponse({"go_on": lease is not None})

    async def _report(self, request: Request) -> Response:
        body = ReportRequest.model_validate_json(await _body(request))
        lease = self._known(body.lease)
        if lease is not None and lease.ended.set_running_or_notify_cancel():
            with self._lock:
                self._claimed.pop(lease.id, None)
            if body.left:
                lease.ended.set_exception(AgentWorkerLost(f"the agent worker {lease.worker} was stopped"))
            else:
                lease.ended.set_result(ProgramEnd(body.code, body.lines))
        return JSONResponse({"known": lease is not None})

    def _known(self, lease_id: str) -> Lease | None:
        """A claimed lease, whose worker has just answered."""
        with self._lock:
            lease = self._claimed.get(lease_id)
            if lease is not None:
                lease.seen = time.monotonic()
            return lease


def worker_token() -> str:
    token = os.environ.get(TOKEN)
    if not token:
        raise LoopError(
            f"agent_loop_config.workers needs a secret that the workers send; set {TOKEN} here and where they run"
        )
    return token


async def _body(request: Request) -> bytes:
    if not os.environ.get(TOKEN):
        raise Refused(404, f"this run takes no workers; start it with {TOKEN} and agent_loop_config.workers=true")
    if not carries(worker_token(), request.headers.get("authorization", "")):
        raise Refused(401, f"agent workers must send the run's token; set {TOKEN}", code="invalid_api_key")
    return await request.body()
