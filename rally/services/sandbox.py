"""The sandbox server: SandboxFusion's `/run_code`, field for field, for clients with the token.

A failure of the program itself (a failing command, a limit exceeded) gives HTTP 200 and `Failed`. `SandboxError` means
that the sandbox failed; clients then try again. The field `metrics` is Rally's own: the isolation, truncated output,
and which limit ended the program. A request that asks for more than the server allows gets HTTP 400, an invalid one
422, with a sentence each. The program of a client that disconnects is killed.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rally.sandbox import CommandResult, Limits, Outcome, Program, Sandbox, SandboxError
from rally.services.http_guard import http_error
from rally.services.http_server import carries
from rally.types import RallyError

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the code that nginx logs


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The most that one request may ask for. Its disk, files, processes and output are always the sandbox's Limits."""

    memory_mb: int = 4096
    timeout: float = 600.0  # seconds for running, and as many for compiling

    def check(self, request: RunCodeRequest, limits: Limits) -> None:
        """RequestTooLarge if the request asks for more."""
        size = sum(len(text) for text in request.files.values() if text is not None) // 4 * 3
        asked: list[tuple[str, float, float]] = [
            ("run_timeout", request.run_timeout, self.timeout),
            ("compile_timeout", request.compile_timeout, self.timeout),
            ("memory_limit_MB", request.memory_limit_MB, max(self.memory_mb, limits.memory_mb)),
            ("the number of files", len(request.files), limits.files),
            ("the number of fetch_files", len(request.fetch_files), limits.files),
            ("the size of files in bytes", size, limits.disk_mb << 20),
            ("the size of stdin", len(request.stdin or ""), limits.disk_mb << 20),
        ]
        for name, value, most in asked:
            if value > most:
                raise RequestTooLarge(f"{name} is {value}, and this server allows at most {most:,}; ask for less")


class RequestTooLarge(RallyError):
    """A request asks for more than the server allows."""


class RunCodeRequest(BaseModel):
    code: str
    language: str
    compile_timeout: float = Field(10, gt=0, allow_inf_nan=False)
    run_timeout: float = Field(10, gt=0, allow_inf_nan=False)
    memory_limit_MB: int = Field(-1, ge=-1)  # -1: the server's default
    stdin: str | None = None
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []
    args: list[str] = []

    def program(self) -> Program:
        return Program(
            code=self.code,
            language=self.language,
            timeout=self.run_timeout,
            compile_timeout=self.compile_timeout,
            stdin=self.stdin or None,
            args=tuple(self.args),
            files={name: _decoded(name, text) for name, text in self.files.items() if text is not None},
            fetch_files=tuple(self.fetch_files),
            memory_mb=self.memory_limit_MB if self.memory_limit_MB > 0 else None,
        )


class CommandRunResult(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None

    @classmethod
    def of(cls, result: CommandResult | None) -> CommandRunResult | None:
        if result is None:
            return None
        return cls(
            status=result.status,
            execution_time=result.seconds,
            return_code=result.return_code,
            stdout=result.stdout,
            stderr=result.stderr,
        )


class RunCodeResponse(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
    metrics: dict[str, Any] = {}

    @classmethod
    def of(cls, outcome: Outcome) -> RunCodeResponse:
        return cls(
            status="Success" if outcome.ok else "Failed",
            compile_result=CommandRunResult.of(outcome.compile),
            run_result=CommandRunResult.of(outcome.run),
            executor_pod_name=os.environ.get("MY_POD_NAME"),
            files={name: base64.b64encode(content).decode() for name, content in outcome.files.items()},
            metrics=outcome.metrics(),
        )


def create_app(sandbox: Sandbox | None = None, token: str | None = None, ceilings: Ceilings | None = None) -> Starlette:
    """The server as an ASGI application; with a token, every request must carry it as `Authorization: Bearer`."""
    sandbox = sandbox or Sandbox()
    allowed = ceilings or Ceilings()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with sandbox:
            yield

    def check_token(request: Request) -> None:
        if not carries(token, request.headers.get("authorization", "")):
            raise HTTPException(401, "send the server's token in the header Authorization: Bearer TOKEN")

    async def ping(request: Request) -> Response:
        check_token(request)
        return JSONResponse("pong")

    async def run_code(request: Request) -> Response:
        check_token(request)
        asked = RunCodeRequest.model_validate_json(await request.body())
        allowed.check(asked, sandbox.settings.limits)
        try:
            answer = RunCodeResponse.of(await _unless_disconnected(request, sandbox.run(asked.program())))
        except SandboxError as error:
            answer = RunCodeResponse(status="SandboxError", message=str(error))
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer.model_dump())

    return Starlette(
        routes=[Route("/v1/ping", ping), Route("/run_code", run_code, methods=["POST"])],
        lifespan=lifespan,
        exception_handlers={HTTPException: http_error, ValidationError: _malformed, RallyError: _refused},
    )


def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    return JSONResponse({"detail": _sentence(error)}, 422)


def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 400 if isinstance(error, RequestTooLarge) else 422)


class ClientDisconnected(Exception):
    """The client of a request has gone."""


async def _unless_disconnected(request: Request, running: Awaitable[Outcome]) -> Outcome:
    """The outcome; if the client disconnects first, the program is killed and its slot is free."""
    program = asyncio.ensure_future(running)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((program, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not program.done():
            raise ClientDisconnected
        return program.result()
    finally:
        leaving.cancel()
        program.cancel()
        with suppress(asyncio.CancelledError, SandboxError):
            await program  # its program is killed before the slot is free


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sentence(error: ValidationError) -> str:
    """What is wrong in a request, without its values, which need not be valid JSON (NaN)."""
    problems = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"]) or "the body"
        problems.append(f"{place}: {problem['msg']}".encode("utf-8", "replace").decode())
    return f"the request is invalid: {'; '.join(problems)}"


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one
        raise RallyError(f"the content of the file {name!r} must be base64") from None
