"""The sandbox server: SandboxFusion's `/run_code`, field for field, for clients with the token.

A failure of the program itself (a failing command, a limit exceeded) gives HTTP 200 and `Failed`. `SandboxError` means
that the sandbox failed; clients then try again. The field `metrics` is Rally's own: the isolation, truncated output,
and which limit ended the program.
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rally.sandbox import CommandResult, Outcome, Program, Sandbox, SandboxError
from rally.services.http_guard import http_error
from rally.services.http_server import carries
from rally.types import RallyError

MAX_TIMEOUT = 3600.0
MAX_MEMORY_MB = 1 << 24


class RunCodeRequest(BaseModel):
    code: str
    language: str
    compile_timeout: float = Field(10, gt=0, le=MAX_TIMEOUT)
    run_timeout: float = Field(10, gt=0, le=MAX_TIMEOUT)
    memory_limit_MB: int = Field(-1, ge=-1, le=MAX_MEMORY_MB)
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


def create_app(sandbox: Sandbox | None = None, token: str | None = None) -> Starlette:
    """The server as an ASGI application; with a token, every request must carry it as `Authorization: Bearer`."""
    sandbox = sandbox or Sandbox()

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
        try:
            answer = RunCodeResponse.of(await sandbox.run(asked.program()))
        except SandboxError as error:
            answer = RunCodeResponse(status="SandboxError", message=str(error))
        return JSONResponse(answer.model_dump())

    return Starlette(
        routes=[Route("/v1/ping", ping), Route("/run_code", run_code, methods=["POST"])],
        lifespan=lifespan,
        exception_handlers={HTTPException: http_error, ValidationError: _malformed, RallyError: _refused},
    )


def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    return JSONResponse({"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422)


def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 422)


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one
        raise RallyError(f"the content of the file {name!r} must be base64") from None
