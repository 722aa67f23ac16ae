"""Runs a user's tools in a process of their own, which may crash, hang or leak without ending the run.

`load_in_process` starts the process, which loads the tools, and returns a stand-in for each of them. All calls of all
episodes run in that one process, as concurrently as they would in the run. create, execute, calc_reward and release of
an episode run in the same process. A process that dies, or blocks its event loop beyond the deadline of a call, or uses
too much memory, is killed with all that it started; the next call starts another. State of an episode that was lost
that way is reported once, and created anew.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from rally.images.loading import read_image
from rally.tools.base import BaseTool
from rally.tools.invoke import ToolTimeout, ToolUnavailable
from rally.tools.limits import CallLimits
from rally.tools.process_worker import CANCEL_SECONDS, ToolSource, frame
from rally.tools.results import ToolReturn, read_reward
from rally.tools.schema import BadArguments, ToolConfigError
from rally.types import RallyError, ToolResponse
from rally.util.subprocesses import kill_group, start_tied

LOAD_SECONDS = 120.0  # a user's module may import something large
ACKNOWLEDGE_SECONDS = CANCEL_SECONDS + 2.0  # for an event loop that is not blocked to answer a cancellation
RETIRED_SECONDS = 60.0  # for other calls and episodes of a process in which a call goes on after its deadline
WATCH_SECONDS = 0.5
EXIT_SECONDS = 2.0  # for a process that has closed its pipe to exit by itself, so that its exit code is known
CLOSED = "was closed with its run"
FAILED_START_SECONDS = 5.0  # without another attempt

# The worker gets this process's sys.path. A PYTHONPATH would also be inherited by the tool's own subprocesses.
BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rally.tools.process_worker import main; main()"
_ERRORS: dict[str, type[RallyError]] = {
    "bad_arguments": BadArguments,
    "timeout": ToolTimeout,
    "config": ToolConfigError,
    "unavailable": ToolUnavailable,
    "error": RallyError,
}


class ToolProcessEnded(RallyError):
    """The process of a tool ended during a call. The text goes to the model."""


class ToolNotStarted(ToolProcessEnded):
    """The process of a tool cannot be started, whatever the call is."""

    outage = True


def default_memory_mb() -> int:
    """Half of the machine's memory."""
    return (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20) // 2


class _Process:
    """One process with its tools. Threads write requests, read answers and watch it."""

    def __init__(self, source: ToolSource, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._process = start_tied(
            [sys.executable, "-c", BOOT, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C does not reach it, and one kill also ends what a tool started
        )
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._reason = ""
        self._retired_at: float | None = None
        self.instances = 0
        self.ended = False
        self._requests.put(frame(source))
        hello: Future[dict[str, Any]] = Future()
        for target in (self._write, lambda: self._read(hello), self._watch):
            threading.Thread(target=target, name="rally-tool-process", daemon=True).start()
        try:
            loaded = hello.result(LOAD_SECONDS)
        except FutureTimeout:
            self.kill(f"did not load within {LOAD_SECONDS:g} seconds")
            raise ToolConfigError(f"{source.where}: the process of the tools {self._how_it_ended()}") from None
        except ToolProcessEnded as ended:
            raise ToolConfigError(f"{source.where}: {ended}, while the tools were loaded") from None
        if "error" in loaded:
            self.kill("could not load its tools")
            raise ToolConfigError(loaded["error"])
        self.tools: list[dict[str, Any]] = loaded["tools"]

    def send(self, method: str, tool: str, arguments: tuple[Any, ...]) -> tuple[int, Future[dict[str, Any]]]:
        """Send a request. The answer of a process that ends is ToolProcessEnded."""
        number, future = next(self._numbers), Future[dict[str, Any]]()
        body = frame((number, method, tool, arguments))  # raises for arguments that cannot be sent
        with self._lock:
            if self.ended:
                raise ToolProcessEnded(f"the process of the tool {self._how_it_ended()}")
            self._pending[number] = future
        self._requests.put(body)
        return number, future

    def cancel(self, number: int, future: Future[dict[str, Any]]) -> None:
        """Cancel a request whose deadline has passed. If it does not end, this process must."""
        self._requests.put(frame((number, "cancel", "", ())))
        threading.Thread(target=self._settle, args=(future,), name="rally-tool-cancel", daemon=True).start()

    def _settle(self, future: Future[dict[str, Any]]) -> None:
        try:
            if future.result(ACKNOWLEDGE_SECONDS).get("abandoned"):
                self.retire()
        except FutureTimeout:
            self.kill("was killed because a call blocked it beyond its deadline")
        except ToolProcessEnded:
            pass

    def retire(self) -> None:
        """Take no new calls; end when the running calls and episodes have ended, or after RETIRED_SECONDS."""
        self._retired_at = self._retired_at or time.monotonic()

    @property
    def retired(self) -> bool:
        return self.ended or self._retired_at is not None

    def kill(self, reason: str = "") -> None:
        self._reason = self._reason or reason
        if self._process.returncode is None:
            kill_group(self._process.pid)

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if self._reason:
            return self._reason
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _write(self) -> None:
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            while (body := self._requests.get()) is not None:
                try:
                    left = memoryview(body)
                    while left:
                        left = left[os.write(stdin.fileno(), left) :]
                except BrokenPipeError:
                    return

    def _read(self, hello: Future[dict[str, Any]]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout, os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as lines:
            for line in lines:
                try:
                    answer = json.loads(line)
                    future = hello if "id" not in answer else self._pending.pop(answer["id"], None)
                    if not isinstance(answer, dict) or (future is hello and hello.done()):
                        raise ValueError
                except (ValueError, TypeError, RecursionError):
                    self.kill("wrote an answer that cannot be read")
                    break
                if future is not None:
                    future.set_result(answer)
        deadline = time.monotonic() + EXIT_SECONDS  # its end of the pipe closes before it has exited
        while not self._has_exited() and not self._reason and time.monotonic() < deadline:
            time.sleep(0.002)
        kill_group(self._process.pid)
        self._process.wait()
        with self._lock:
            self.ended = True
            pending, self._pending = self._pending, {}
        self._requests.put(None)
        error = ToolProcessEnded(f"the process of the tool {self._how_it_ended()}")
        for future in (hello, *pending.values()):
            if not future.done():
                future.set_exception(error)

    def _watch(self) -> None:
        while not self.ended:
            time.sleep(WATCH_SECONDS)
            if self._has_exited():
                kill_group(self._process.pid)  # what it started may hold its pipe open
                return
            if self._resident_mb() > self._memory_mb:
                self.kill(f"was killed because it used more than {self._memory_mb} MB of memory")
            if self._retired_at is not None:
                idle = not self._pending and not self.instances
                if idle or time.monotonic() - self._retired_at > RETIRED_SECONDS:
                    self.kill("was ended because an earlier call in it went on beyond its deadline")

    def _has_exited(self) -> bool:
        """Whether it is a zombie: `_read` has not waited for it yet."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False

    def _resident_mb(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
        except (OSError, IndexError):
            return 0


class ToolHost:
    """The current process of some tools; a new one replaces one that has ended."""

    def __init__(self, source: ToolSource, memory_mb: int | None = None) -> None:
        self._source = source
        self._memory_mb = memory_mb or default_memory_mb()
        self._starting = threading.Lock()
        self._retired: list[_Process] = []
        self._closed = False
        self._next_start = 0.0
        self._failed_start = ""
        self._current = _Process(source, self._memory_mb)
        self.tools = self._current.tools

    async def process(self) -> _Process:
        """A process that takes calls."""
        current = self._current
        return current if not current.retired else await asyncio.to_thread(self._living)

    async def ask(self, process: _Process, method: str, tool: str, *arguments: Any) -> Any:
        """Call a method of a tool in a process. Cancelling this cancels the call there."""
        number, future = process.send(method, tool, arguments)
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return _value(await asyncio.shield(waiting))
        except asyncio.CancelledError:
            process.cancel(number, future)
            raise

    def ask_now(self, method: str, tool: str) -> Any:
        """The same, blocking, for callers outside of an event loop."""
        process = self._current if not self._current.retired else self._living()
        return _value(process.send(method, tool, ())[1].result())

    def close(self) -> None:
        self._closed = True
        for process in (self._current, *self._retired):
            process.kill(CLOSED)

    def _living(self) -> _Process:
        with self._starting:
            if not self._current.retired:
                return self._current
            if self._closed:
                raise ToolProcessEnded(f"the process of the tool {CLOSED}")
            if time.monotonic() < self._next_start:
                raise ToolNotStarted(self._failed_start)
            self._retired = [p for p in (*self._retired, self._current) if not p.ended]
            try:
                self._current = _Process(self._source, self._memory_mb)
            except ToolConfigError as error:
                self._next_start = time.monotonic() + FAILED_START_SECONDS
                self._failed_start = f"the process of the tool cannot be started again: {error}"
                raise ToolNotStarted(self._failed_start) from None
            if self._closed:  # meanwhile
                self._current.kill(CLOSED)
            return self._current


def _value(answer: Mapping[str, Any]) -> Any:
    if "error" in answer:
        raise _ERRORS.get(str(answer.get("kind")), RallyError)(str(answer["error"]))
    return answer.get("value")


class ProcessTool(BaseTool[Any]):
    """A tool without state per episode, in a process."""

    def __init__(self, host: ToolHost, described: Mapping[str, Any]) -> None:
        super().__init__(tool_schema=described["schema"])
        self._host = host
        self.limits = CallLimits.model_validate(described["limits"])
        self.own_timeout = described["own_timeout"]
        self.example = described["example"]  # type: ignore[misc]
        self.sees_images = described["sees_images"]
        self.destructive = described["destructive"]
        self.on_outage = described["on_outage"]
        self.timeout_counts = described["timeout_counts"]

    def prepare(self) -> None:
        self._host.ask_now("prepare", self.name)

    def close(self) -> None:
        self._host.close()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolReturn:
        process = await self._host.process()
        return _answer(await self._host.ask(process, "execute", self.name, instance_id, parameters, kwargs))


@dataclass
class _Instance:
    """The state of one episode: the process that holds it, its id there, and what it was created from."""

    process: _Process
    worker_id: str
    create_kwargs: Mapping[str, Any]


class StatefulProcessTool(ProcessTool):
    """A tool with state per episode. The four methods of an episode run in one process."""

    def __init__(self, host: ToolHost, described: Mapping[str, Any]) -> None:
        super().__init__(host, described)
        self._instances: dict[str, _Instance] = {}

    async def create(
        self, instance_id: str | None = None, create_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        assert instance_id is not None, "the session names every instance"
        process = await self._host.process()
        process.instances += 1
        try:
            chosen = await self._host.ask(process, "create", self.name, instance_id, create_kwargs or {})
        except BaseException:
            process.instances -= 1
            raise
        self._instances[instance_id] = _Instance(process, str(chosen), create_kwargs or {})
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolReturn:
        instance = self._instances[instance_id]
        if instance.process.ended:
            await self.create(instance_id, instance.create_kwargs)
            raise ToolProcessEnded(
                f"the process of {self.name} has ended, and with it the state of earlier calls; it was created anew"
            )
        process, worker_id = instance.process, instance.worker_id
        return _answer(await self._host.ask(process, "execute", self.name, worker_id, parameters, kwargs))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        instance = self._instances[instance_id]
        reward = await self._host.ask(instance.process, "calc_reward", self.name, instance.worker_id, kwargs)
        return None if reward is None else read_reward(reward)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        instance = self._instances.pop(instance_id)
        try:
            if not instance.process.ended:  # else there is nothing left
                await self._host.ask(instance.process, "release", self.name, instance.worker_id, kwargs)
        finally:
            instance.process.instances -= 1


def _answer(value: Any) -> ToolReturn:
    response = value["response"]
    images = None if response["image"] is None else [read_image(base64.b64decode(data)) for data in response["image"]]
    return ToolReturn(
        response=ToolResponse(text=response["text"], image=images, video=response["video"]),
        ok=value["ok"],
        reward=value["reward"],
        metrics=value["metrics"],
    )


def load_in_process(source: ToolSource, memory_mb: int | None = None) -> list[BaseTool[Any]]:
    """The tools of a source, each in the same new process, but those that are marked `process = False`."""
    host = ToolHost(source, memory_mb)
    kept = [described for described in host.tools if described["process"]]
    tools: list[BaseTool[Any]] = [
        (ProcessTool if described["stateless"] else StatefulProcessTool)(host, described) for described in kept
    ]
    if len(kept) < len(host.tools):
        if not kept:
            host.close()
        names = {tool.name: tool for tool in tools}
        return [names.get(tool.name, tool) for tool in source.load()]
    return tools
