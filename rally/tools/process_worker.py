"""The main function of a tool process: loads tools and runs their methods, many at a time, in one event loop.

Requests come from the run, which is trusted, as pickled tuples. Answers go back as JSON lines, because the run does not
trust what a tool's process writes. A request that is cancelled is answered too: `abandoned` says that a thread of it,
or the call itself, goes on. The process exits at the end of its input, also if a tool blocks the event loop.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import json
import os
import pickle
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import to_jsonable_python

from rally.images.loading import ImageError, read_image
from rally.tools.base import BaseTool
from rally.tools.invoke import CallEnd, ToolCaller, ToolTimeout, is_outage, on_abandoned, outcome_of
from rally.tools.results import ToolReturn, clean
from rally.tools.schema import BadArguments, ToolConfigError
from rally.tools.session import describe
from rally.types import RallyError
from rally.util.process_guard import end_with_parent

FRAME = struct.Struct("!Q")
CANCEL_SECONDS = 1.0  # for a call to end after its cancellation
_STDIN, _STDOUT, _STDERR = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class ToolSource:
    """Where tools are loaded from: one entry of a tool YAML, or a Python file with function tools."""

    where: str
    entry: Any = None
    folder: str = "."
    functions: str | None = None

    def load(self) -> Sequence[BaseTool[Any]]:
        from rally.tools.loader import load_entry, load_function_tools

        if self.functions is not None:
            return load_function_tools(self.functions)
        return load_entry(self.entry, Path(self.folder), self.where)


def main() -> None:
    end_with_parent()
    requests, answers = _take_channels()
    faulthandler.enable()
    _prefer_for_oom_kill()
    source = read_frame(requests)
    if source is None:
        return
    try:
        callers = {tool.name: ToolCaller(tool) for tool in source.load()}
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        problem = str(error) if isinstance(error, RallyError) else f"{source.where}: {describe(error)}"
        _write(answers, _line({"error": clean(problem)}))
        return
    _write(answers, _line({"tools": [_description(caller) for caller in callers.values()]}))
    asyncio.run(_serve(callers, requests, answers))


def read_frame(stream: BinaryIO) -> Any:
    """The next pickled object; None at the end of the stream. Only for streams whose writer is trusted."""
    header = stream.read(FRAME.size)
    return pickle.loads(stream.read(FRAME.unpack(header)[0])) if len(header) == FRAME.size else None


def frame(value: Any) -> bytes:
    body = pickle.dumps(value)
    return FRAME.pack(len(body)) + body


async def _serve(callers: Mapping[str, ToolCaller], requests: BinaryIO, answers: BinaryIO) -> None:
    worker = _Worker(callers, answers)
    loop = asyncio.get_running_loop()

    def read() -> None:
        while (request := read_frame(requests)) is not None:
            loop.call_soon_threadsafe(worker.take, request)
        os._exit(0)  # not through the event loop, which a tool may block

    threading.Thread(target=read, name="rally-requests", daemon=True).start()
    await asyncio.Event().wait()


class _Worker:
    """Runs the requests of one process."""

    def __init__(self, callers: Mapping[str, ToolCaller], answers: BinaryIO) -> None:
        self._callers = callers
        self._answers = answers
        self._running: dict[int, asyncio.Task[None]] = {}
        self._abandoned: set[int] = set()
        self._cancelling: set[asyncio.Task[None]] = set()

    def take(self, request: tuple[int, str, str, tuple[Any, ...]]) -> None:
        number, method, tool, arguments = request
        if method == "cancel":
            task = asyncio.ensure_future(self._cancel(number))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
        else:
            self._running[number] = asyncio.ensure_future(self._run(number, method, tool, arguments))

    async def _run(self, number: int, method: str, tool: str, arguments: tuple[Any, ...]) -> None:
        on_abandoned.set(lambda: self._abandoned.add(number))
        ended = await outcome_of(self._call(self._callers[tool], method, arguments))
        if number in self._running:  # else it was cancelled, and answered
            del self._running[number]
            _write(self._answers, _answer(number, ended))

    async def _call(self, caller: ToolCaller, method: str, arguments: tuple[Any, ...]) -> Any:
        if method in ("prepare", "close"):
            return getattr(caller.tool, method)()
        return await getattr(caller, method)(*arguments)

    async def _cancel(self, number: int) -> None:
        task = self._running.pop(number, None)
        if task is None:
            return  # it was answered meanwhile
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        abandoned = not done or number in self._abandoned
        self._abandoned.discard(number)
        _write(self._answers, _line({"id": number, "cancelled": True, "abandoned": abandoned}))


def _answer(number: int, ended: CallEnd) -> bytes:
    """The answer to a request as a line of JSON. A value that has no such form is an error of its call."""
    try:
        return _line({"id": number, **_encoded(ended)})
    except BaseException as problem:  # noqa: BLE001 - the methods of a user's object may raise anything
        reason = clean(f"it returned a value that cannot be sent to the run ({describe(problem)})")
        return _line({"id": number, "error": reason, "kind": "error"})


def _encoded(ended: CallEnd) -> dict[str, Any]:
    error = ended.error
    if error is not None:
        kinds = {"bad_arguments": BadArguments, "timeout": ToolTimeout, "config": ToolConfigError}
        kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), None)
        kind = kind or ("unavailable" if is_outage(error) else "error")
        return {"error": describe(error), "kind": kind}
    value = ended.value
    if not isinstance(value, ToolReturn):
        return {"value": value}
    try:
        images = None if value.response.image is None else [_image(source) for source in value.response.image]
    except ImageError as problem:
        return {"error": f"it returned an image that cannot be shown: {problem}", "kind": "error"}
    response = {"text": value.response.text, "image": images, "video": value.response.video}
    return {"value": {"response": response, "ok": value.ok, "reward": value.reward, "metrics": value.metrics}}


def _image(source: Any) -> str:
    return base64.b64encode(read_image(source).read()).decode()


def _description(caller: ToolCaller) -> dict[str, Any]:
    """What the run must know of a tool."""
    tool = caller.tool
    return {
        "schema": tool.tool_schema,
        "stateless": caller.stateless,
        "limits": tool.limits.model_dump(),
        "own_timeout": tool.own_timeout,
        "example": None if tool.example is None else dict(tool.example),
        "sees_images": tool.sees_images,
        "destructive": tool.destructive,
        "on_outage": tool.on_outage,
        "timeout_counts": tool.timeout_counts,
        "process": tool.process and tool.shared_limiter is None,  # other tools of the run share that object
    }


def _take_channels() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol off stdin and stdout, so that a tool that prints or reads cannot disturb it."""
    requests, answers = os.fdopen(os.dup(_STDIN), "rb"), os.fdopen(os.dup(_STDOUT), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.close(nothing)
    os.dup2(_STDERR, _STDOUT)
    return requests, answers


def _prefer_for_oom_kill() -> None:
    """If the machine runs out of memory, let the kernel kill this process and not the run."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError as error:
        sys.stderr.write(f"a tool process cannot set its oom_score_adj: {error}\n")


_writing = threading.Lock()


def _write(answers: BinaryIO, line: bytes) -> None:
    with _writing:
        left = memoryview(line)
        while left:  # a pipe may take only part of a long line
            left = left[os.write(answers.fileno(), left) :]


def _line(answer: Mapping[str, Any]) -> bytes:
    try:
        plain = to_jsonable_python(answer, fallback=str, bytes_mode="base64")
    except UnicodeEncodeError:
        plain = to_jsonable_python(_cleaned(answer), fallback=str, bytes_mode="base64")
    return json.dumps(plain).encode("ascii") + b"\n"


def _cleaned(value: Any) -> Any:
    """The value without lone surrogates in its texts."""
    if isinstance(value, Mapping):
        return {clean(key) if isinstance(key, str) else key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item) for item in value]
    return clean(value) if isinstance(value, str) else value
