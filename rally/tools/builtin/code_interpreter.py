"""The built-in `code_interpreter`: runs the model's code in the local sandbox or on a sandbox server.

The response is what the code printed, or the value of its last expression if it printed nothing. An error is returned
with its traceback, a timeout or exceeded limit as one sentence. Code that fails or loops is not a failure of the tool:
the status is `ok`, and the metric `code_failed` counts it. A sandbox that does not work is an outage. With
`stateful: true`, variables live until the episode ends.

    - name: code_interpreter
      config: {num_workers: 16, default_timeout: 10, memory_limit_mb: 1024, stateful: false}
"""

from __future__ import annotations

import ast
import asyncio
import base64
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field, ValidationError

from rally.sandbox import (
    CommandResult,
    Isolation,
    Outcome,
    Program,
    Sandbox,
    SandboxError,
    SandboxSession,
    SandboxSettings,
    UnsupportedProgram,
    shared_sandbox,
)
from rally.tools.base import BaseTool
from rally.tools.limits import CallLimits, WorkerSettings
from rally.tools.schema import BadArguments, ToolConfigError
from rally.types import RallyError, ToolResponse

if TYPE_CHECKING:
    import httpx

INSTALL = "pip install 'rally-rl[services]'"
TRIES = 4
_PAUSE_SECONDS = 0.5
_BUSY = {429, 502, 503, 504}
_SLACK_SECONDS = 10.0


class CodeServer:
    """A client for a sandbox server with SandboxFusion's `/run_code`."""

    def __init__(self, url: str) -> None:
        self.url = url if url.rstrip("/").endswith("/run_code") else f"{url.rstrip('/')}/run_code"

    async def run(self, program: Program) -> Outcome:
        try:
            import httpx
        except ImportError:
            raise RallyError(f"a sandbox server needs the package httpx; run: {INSTALL}") from None
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
    """The code, changed to print its last expression if nothing else prints: servers do not echo."""
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
        raise SandboxError(f"the sandbox server failed: {answer.get('message') or 'no reason given'}")
    compiled, ran = _result(answer.get("compile_result")), _result(answer.get("run_result"))
    if compiled is None and ran is None:
        raise SandboxError("the sandbox server answered without a result")
    files = {name: base64.b64decode(text) for name, text in (answer.get("files") or {}).items()}
    isolation = (answer.get("metrics") or {}).get("isolation", "unknown (remote)")
    return Outcome(isolation=isolation, run=ran, compile=compiled, files=files)


def _result(answer: dict[str, Any] | None) -> CommandResult | None:
    if answer is None:
        return None
    late = answer.get("status") == "TimeLimitExceeded"
    return CommandResult(
        status="TimeLimitExceeded" if late else "Finished",
        return_code=answer.get("return_code"),
        seconds=answer.get("execution_time") or 0.0,
        stdout=answer.get("stdout") or "",
        stderr=answer.get("stderr") or "",
        reason="timeout" if late else "",
    )


_FENCED = re.compile(r"\s*```[\w+-]*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


class CodeInterpreterConfig(WorkerSettings):
    """The keys of verl's SandboxFusionTool, and Rally's own."""

    type: Literal["native"] = "native"
    sandbox_fusion_url: str | None = None  # a server to use instead of a sandbox in this process
    sandbox_url: str | None = None  # the same
    default_timeout: float = Field(10.0, gt=0)
    default_language: str = "python"
    memory_limit_mb: int = Field(1024, ge=1)
    stateful: bool = False
    isolation: Isolation = "auto"

    @property
    def url(self) -> str | None:
        return self.sandbox_fusion_url or self.sandbox_url


class CodeInterpreter(BaseTool[Any]):
    """The tool. Its schema may add the arguments `timeout` and `language`."""

    example: ClassVar[Mapping[str, Any] | None] = {"code": "print(6 * 7)"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = _checked(self.name, self.config)
        self._sessions: dict[str, SandboxSession] = {}
        self._runner: CodeServer | Sandbox
        max_concurrency = self.settings.max_concurrency
        if self.settings.url:
            self._runner = CodeServer(self.settings.url)
        else:
            self._runner = shared_sandbox(SandboxSettings(isolation=self.settings.isolation))
            # Calls wait for this limit before their deadline starts; they would wait in the sandbox during it.
            max_concurrency = min(max_concurrency, self._runner.at_once)
        self.own_timeout = self.settings.default_timeout if "default_timeout" in self.config else None
        self.limits = CallLimits(max_concurrency=max_concurrency)

    def get_openai_tool_schema(self) -> dict[str, Any]:
        code = {"type": "string", "description": "The code. Print what you want to see."}
        return {
            "name": "code_interpreter",
            "description": "Runs Python code and returns what it prints.",
            "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
        }

    def prepare(self) -> None:
        if isinstance(self._runner, Sandbox):
            self._runner.start_now()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        program = self._program(parameters)
        try:
            outcome = await self._run(instance_id, program)
        except SandboxError as error:
            if program.language != self.settings.default_language:  # the model chose it
                raise UnsupportedProgram(str(error)) from None
            raise
        text = _response_text(outcome, program.timeout, self.settings)
        return ToolResponse(text=text), None, {**outcome.metrics(), "code_failed": not outcome.ok}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await session.close()

    async def _run(self, instance_id: str, program: Program) -> Outcome:
        if self.settings.stateful and program.language == "python":
            assert isinstance(self._runner, Sandbox)
            session = self._sessions.get(instance_id)
            if session is None:
                session = self._sessions[instance_id] = self._runner.session(program)
            return await session.run(program.code, program.timeout)
        return await self._runner.run(program)

    def _program(self, parameters: dict[str, Any]) -> Program:
        """The program of a call. If the schema allows it, the model may choose a shorter timeout or the language."""
        code = str(parameters.get("code", ""))
        if not code.strip():
            raise BadArguments("'code' is empty")
        if fenced := _FENCED.fullmatch(code):
            code = fenced[1]
        settings = self.settings
        timeout = parameters.get("timeout")
        return Program(
            code=code,
            language=str(parameters.get("language") or settings.default_language),
            timeout=min(float(timeout), settings.default_timeout) if timeout else settings.default_timeout,
            compile_timeout=settings.default_timeout,
            memory_mb=settings.memory_limit_mb,
            echo=True,
        )


def _checked(name: str, config: dict[str, Any]) -> CodeInterpreterConfig:
    try:
        settings = CodeInterpreterConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(CodeInterpreterConfig.model_fields)
            raise ToolConfigError(f"{name}: config has no key {key!r}; its keys are {known}") from None
        raise ToolConfigError(f"{name}: config key {key!r}: {first['msg']}") from None
    if settings.stateful and settings.url:
        raise ToolConfigError(f"{name}: stateful needs the local sandbox; remove the server {settings.url}")
    return settings


def _response_text(outcome: Outcome, timeout: float, settings: CodeInterpreterConfig) -> str:
    result = outcome.last
    shown = result.stdout or outcome.echo or ""
    parts = [shown.rstrip("\n")]
    if result.stdout_cut:
        parts.append(f"[{result.stdout_cut} more bytes of output cut]")
    if not result.ok or not shown:
        parts.append(result.stderr.strip())
    parts.append(_ending(outcome, timeout, settings))
    return "\n".join(part for part in parts if part) or "The code ran and printed nothing. Print what you want to see."


def _ending(outcome: Outcome, timeout: float, settings: CodeInterpreterConfig) -> str:
    """One sentence for an end that the program's output does not explain."""
    result = outcome.last
    sentences = {
        "timeout": f"Error: the code ran longer than {timeout:g} seconds and was stopped.",
        "cpu": f"Error: the code used more than {timeout:g} seconds of processor time and was stopped.",
        "memory": f"Error: the code used more than {settings.memory_limit_mb} MB of memory and was stopped.",
        "processes": "Error: the code started too many processes and was stopped.",
        "disk": "Error: the code wrote too much to disk and was stopped.",
    }
    text = sentences.get(result.reason, "")
    if not text and not result.ok and not result.stderr:
        text = f"Error: the code ended with exit code {result.return_code}."
    return f"{text} All variables are lost.".strip() if outcome.state_lost else text
