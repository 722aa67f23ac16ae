"""Guarantees: code runs on a server that speaks SandboxFusion's protocol, and its answer is the same Outcome as ours.

A server that is starting, busy or gone for a moment is asked again, with growing pauses, as long as the call may take.
The token of a server that wants one is read from RALLY_SANDBOX_TOKEN.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import os
from typing import TYPE_CHECKING, Any

from rally.sandbox import CommandResult, Outcome, Program, SandboxError
from rally.types import RallyError

if TYPE_CHECKING:
    import httpx

INSTALL = "pip install 'rally-rl[services]'"
TRIES = 4
_PAUSE_SECONDS = 0.5
_BUSY = {429, 502, 503, 504}
_SLACK_SECONDS = 10.0


class CodeServer:
    def __init__(self, url: str) -> None:
        self.url = url if url.rstrip("/").endswith("/run_code") else f"{url.rstrip('/')}/run_code"

    async def run(self, program: Program) -> Outcome:
        try:
            import httpx
        except ImportError:
            raise RallyError(f"a sandbox server needs httpx; install it with: {INSTALL}") from None
        seconds = program.timeout + program.compile_timeout + _SLACK_SECONDS
        token = os.environ.get("RALLY_SANDBOX_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(timeout=seconds, headers=headers) as client:
            return _outcome(await self._post(client, _request(program)))

    async def _post(self, client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
        import httpx

        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                response = await client.post(self.url, json=request)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                answer: dict[str, Any] = response.json()
                return answer
            problem = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code not in _BUSY:
                break
        raise SandboxError(f"the sandbox server {self.url} did not run the code ({problem})")


def with_echo(code: str) -> str:
    """The code with its last line printed, if that is an expression and nothing else prints: servers know no echo."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError):
        return code
    prints = any(isinstance(node, ast.Name) and node.id == "print" for part in body for node in ast.walk(part))
    if prints or not body or not isinstance(body[-1], ast.Expr):
        return code
    last = body[-1]
    lines = code.split("\n")
    head = "\n".join(lines[: last.lineno - 1])
    value = f"(lambda value: None if value is None else print(repr(value)))({ast.unparse(last.value)})"
    before = lines[last.lineno - 1].encode()[: last.col_offset].decode()
    return f"{head}\n{before}{value}" if head else f"{before}{value}"


def _request(program: Program) -> dict[str, Any]:
    echo = program.echo and program.language == "python"
    return {
        "code": with_echo(program.code) if echo else program.code,
        "language": program.language,
        "compile_timeout": program.compile_timeout,
        "run_timeout": program.timeout,
        "memory_limit_MB": program.memory_mb or -1,
        "stdin": program.stdin,
        "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        "fetch_files": list(program.fetch_files),
    }


def _outcome(answer: dict[str, Any]) -> Outcome:
    if answer.get("status") == "SandboxError":
        raise SandboxError(f"the sandbox server failed: {answer.get('message') or 'it does not say why'}")
    compiled, ran = _result(answer.get("compile_result")), _result(answer.get("run_result"))
    if compiled is None and ran is None:
        raise SandboxError("the sandbox server answered without a result")
    files = {name: base64.b64decode(text) for name, text in (answer.get("files") or {}).items()}
    isolation = (answer.get("metrics") or {}).get("isolation", "unknown (remote)")
    return Outcome(isolation=isolation, run=ran, compile=compiled, files=files)


def _result(given: dict[str, Any] | None) -> CommandResult | None:
    if given is None:
        return None
    late = given.get("status") == "TimeLimitExceeded"
    return CommandResult(
        status="TimeLimitExceeded" if late else "Finished",
        return_code=given.get("return_code"),
        seconds=given.get("execution_time") or 0.0,
        stdout=given.get("stdout") or "",
        stderr=given.get("stderr") or "",
        reason="timeout" if late else "",
    )
