"""A user's agent runs apart from the trainer: whatever it blocks, hangs in or raises, the trainer goes on.

Agents share one event loop in a thread of its own, so that clients and pools they share work; plain functions have a
thread each. The trainer's event loop and the gateway's are not theirs, so an `async` agent that asks with a blocking
client is answered, and slows down other agents alone.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rally.importing import ImportFailed, import_path
from rally.loops import LoopError
from rally.tools.invoke import CallEnd, call, on_abandoned, outcome_of

MODEL = "policy"
Agent = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class AgentClient:
    """What an agent is given to ask with: an address and a key that belong to one episode. Any name of a model will do.

    >>> completion = await client.openai().chat.completions.create(model=client.model, messages=row["prompt"])
    """

    base_url: str
    api_key: str
    episode_id: str
    model: str = MODEL
    _opened: list[Callable[[], Any]] = field(default_factory=list, repr=False)

    def openai(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` that is closed with the episode."""
        openai = _openai()
        return self._kept(openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient, options)

    def sync_openai(self, **options: Any) -> Any:
        """The same for code that blocks: an `openai.OpenAI`."""
        openai = _openai()
        return self._kept(openai.OpenAI, openai.DefaultHttpxClient, options)

    def _kept(self, kind: Callable[..., Any], http: Callable[..., Any], options: dict[str, Any]) -> Any:
        if not options.keys() & {"base_url", "http_client"}:
            # Ours needs no certificates, which take longer to load than an answer, and must not go through a proxy.
            options = {"http_client": http(verify=False, trust_env=False), **options}
        made = kind(**{"base_url": self.base_url, "api_key": self.api_key, **options})
        self._opened.append(made.close)
        return made

    @property
    def environment(self) -> dict[str, str]:
        """The variables that OpenAI's clients read, for an agent that is a process of its own."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    async def close(self) -> None:
        for close in self._opened:
            closing = close()
            if asyncio.iscoroutine(closing):
                with suppress(RuntimeError):  # what was used in an event loop of the agent's own is gone with it
                    await closing


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError:
        raise LoopError("client.openai() needs the package openai; run: pip install openai") from None
    return openai


def find_agent(named: str | None) -> Agent:
    """The function that `my_agent.py:run` or `my_package.agents:run` names."""
    path, colon, name = (named or "").rpartition(":")
    if not colon or not path or not name:
        given = f"not {named!r}" if named else "which is not set"
        raise LoopError(f"agent_loop_config.agent must name a function, such as my_agent.py:run, {given}")
    is_file = path.endswith(".py") or "/" in path
    try:
        function = getattr(_imported(str(Path(path).resolve()) if is_file else path), name, None)
    except ImportFailed as failed:
        raise LoopError(f"the agent {named} cannot be imported ({failed}); correct agent_loop_config.agent") from failed
    if not callable(function):
        raise LoopError(f"{path} has no function {name}; correct agent_loop_config.agent")
    try:
        inspect.signature(function).bind("row", "client")
    except TypeError as wrong:
        raise LoopError(f"the agent {named} must take a row and a client, as in run(row, client): {wrong}") from wrong
    return function  # type: ignore[no-any-return]


@lru_cache
def _imported(path: str) -> ModuleType:
    """Once for all episodes: what a module makes for its agents to share is made once."""
    return import_path(path, "agent")


class AgentThread:
    """The event loop that agents share, in its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rally-agents", daemon=True).start()


class RunningAgent:
    """One agent at work, seen from the event loop of its episode."""

    def __init__(self, thread: AgentThread, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._here, self._there = asyncio.get_running_loop(), thread.loop
        self.ended: asyncio.Future[CallEnd] = self._here.create_future()
        self.abandoned = False  # a thread that could not be ended runs on
        self._task: asyncio.Task[CallEnd] | None = None
        self._there.call_soon_threadsafe(self._begin, work)

    def cancel(self) -> None:
        self._there.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def _begin(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._task = self._there.create_task(self._watched(work))
        self._task.add_done_callback(self._done)

    async def _watched(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> CallEnd:
        on_abandoned.set(self._abandon)
        return await outcome_of(work())

    def _abandon(self) -> None:
        self.abandoned = True

    def _done(self, task: asyncio.Task[CallEnd]) -> None:
        never_begun = CallEnd(error=asyncio.CancelledError())
        with suppress(RuntimeError):  # an abandoned agent may outlive the event loop of its episode
            self._here.call_soon_threadsafe(self._tell, never_begun if task.cancelled() else task.result())

    def _tell(self, ended: CallEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)


async def held(function: Agent, row: dict[str, Any], client: AgentClient) -> Any:
    """What the agent returns; what it opened through its client is closed."""
    try:
        return await call(function, row, client)
    finally:
        await client.close()
