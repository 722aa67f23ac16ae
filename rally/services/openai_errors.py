"""Converts exceptions to responses in OpenAI's error format, or in Anthropic's for its endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from rally.engines.base import ContextExceeded
from rally.services.admission import ClientGone, Refused
from rally.types import RallyError

ANTHROPIC = "/v1/messages"
OPENAI_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
"""litellm reports every invalid_request_error as a bad request, so a wrong key must not be one."""
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def status_of(error: RallyError) -> int:
    return error.status if isinstance(error, Refused) else 400


def anthropic_error(error: RallyError, status: int) -> dict[str, Any]:
    """The JSON of an error in Anthropic's format."""
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def error_body(error: RallyError) -> dict[str, Any]:
    """The JSON of an error."""
    status = status_of(error)
    kind = OPENAI_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    too_long = isinstance(error, ContextExceeded)  # clients shorten their messages when they read this code
    details: dict[str, Any] = {"param": None, "code": "context_length_exceeded" if too_long else None}
    if isinstance(error, Refused):
        details = {"param": error.param, "code": error.code}
    return {"error": {"message": str(error), "type": kind, **details}}


def refuse(request: Request, error: Exception) -> Response:
    """The response for a RallyError."""
    assert isinstance(error, RallyError)
    status = status_of(error)
    pause = error.retry_after if isinstance(error, Refused) else 0
    anthropic = request.url.path.startswith(ANTHROPIC)
    body = anthropic_error(error, status) if anthropic else error_body(error)
    return JSONResponse(body, status, {"Retry-After": str(pause)} if pause else None)


def _refuse_malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or None
    sentence = f"{where}: {first['msg']}" if where else str(first["msg"])
    return refuse(request, Refused(400, sentence, param=where))


def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = refuse(request, Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    answer.headers.update(error.headers or {})
    return answer


def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _fail(request: Request, error: Exception) -> Response:
    return refuse(request, Refused(500, f"the server failed: {error}"))


HANDLERS: Mapping[Any, Callable[[Request, Exception], Response]] = {
    RallyError: refuse,
    ValidationError: _refuse_malformed,
    HTTPException: _refuse_http,
    ClientGone: _client_gone,
    ClientDisconnect: _client_gone,  # while its body was read
    Exception: _fail,
}
