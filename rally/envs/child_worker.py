"""The process of `rally.envs.child`: holds environment objects and answers requests, one JSON object per line.

It runs in another Python environment, so it imports nothing but the standard library, the environment and the few
modules of Rally that an environment needs. Each object has a thread of its own. What a package prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rally.envs.base import EnvError, Environment, EnvTurn
from rally.envs.registry import find_environment
from rally.types import ToolCall
from rally.util.process_guard import end_with_parent

MANY_FILES = 65_536


class EnvObject:
    """One environment and the thread that calls it."""

    def __init__(self, answer: Callable[[dict[str, Any]], None]) -> None:
        self._answer = answer
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._environment: Environment | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def put(self, request: dict[str, Any]) -> None:
        self._requests.put(request)

    def _serve(self) -> None:
        request: dict[str, Any] = {}
        while request.get("method") != "close":
            request = self._requests.get()
            try:
                value = self._call(request["method"], request, self._loop or self._new_loop())
                self._answer({"call": request["call"], "value": value, **self._tools()})
            except BaseException as error:  # noqa: BLE001 - answered; a user's method may raise anything
                kind = "env" if isinstance(error, EnvError) else "other"
                text = str(error) if kind == "env" else f"{type(error).__name__}: {error}"
                self._answer({"call": request["call"], "error": text, "kind": kind})
        if self._loop is not None:
            self._loop.close()

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        return self._loop

    def _call(self, method: str, request: dict[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
        if method == "make":
            self._environment = find_environment(request["name"])(**request["args"])
            return None
        if self._environment is None:
            return None if method == "close" else _missing()
        arguments = [_turn(request["turn"])] if method == "step" else request.get("arguments", [])
        returned = getattr(self._environment, method)(*arguments)
        return loop.run_until_complete(returned) if inspect.isawaitable(returned) else returned

    def _tools(self) -> dict[str, Any]:
        made = self._environment
        return {} if made is None else {"added_tools": list(made.added_tools), "as_written": made.arguments_as_written}


def _missing() -> None:
    raise EnvError("the environment was not made")


def _turn(fields: Mapping[str, Any]) -> EnvTurn:
    return EnvTurn(text=fields["text"], calls=tuple(ToolCall(**call) for call in fields["calls"]))


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch, and anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _allow_files() -> None:
    """The event loop of every object holds three files open, and a usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    """Serve until stdin closes, which it does when the parent ends. A process that is stopped then does not notice, so
    the kernel kills it, and what it has started ends with it."""
    end_with_parent()
    _allow_files()
    channel: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock, objects = threading.Lock(), dict[int, EnvObject]()

    def answer(message: dict[str, Any]) -> None:
        line = json.dumps(message, default=_plain)
        with lock:
            channel.write(line + "\n")
            channel.flush()

    for line in sys.stdin:
        request = json.loads(line)
        if request["method"] == "make":
            objects[request["object"]] = EnvObject(answer)
        objects[request["object"]].put(request)
        if request["method"] == "close":
            del objects[request["object"]]
    os._exit(0)  # without waiting for threads that hang
