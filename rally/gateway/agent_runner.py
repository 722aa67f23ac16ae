"""Runs a user's agent function outside the event loops of the trainer and the gateway.

`async` agents share one event loop in its own thread, so that they can share clients and pools; each plain function
gets its own thread. An agent that blocks, hangs or raises does not stop the trainer. An `async` agent with a blocking
client still gets its answers and slows down only other agents.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
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
    """The address and API key of one episode, passed to the agent. Any model name is accepted.

    >>> completion = await client.openai().chat.completions.create(model=client.model, messages=row["prompt"])
    """

    base_url: str
    api_key: str
    episode_id: str
    model: str = MODEL
    _opened: list[Callable[[], Any]] = field(default_factory=list, repr=False)
    _credits: Any = field(default=None, repr=False)

    def credit(self, completion: Any, reward: float = 0.0, *, branch: bool = False) -> None:
        """Add a reward to a call, given as its completion or the id of it, or to the branch that the call is in. The
        agent must also return a reward, to which these are added."""
        self._add({"call": _id(completion), "reward": reward, "scope": "branch" if branch else "call"})

    def exclude(self, completion: Any) -> None:
        """Do not train on a call, such as one of a summariser or a judge."""
        self._add({"call": _id(completion), "train": False})

    def _add(self, fields: dict[str, Any]) -> None:
        from rally.gateway.credit import Credit

        self._credits.add(Credit.of(fields))

    def openai(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` that is closed with the episode."""
        openai = _openai()
        return self._closed_with_episode(openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient, options)

    def sync_openai(self, **options: Any) -> Any:
        """The same for blocking code: an `openai.OpenAI`."""
        openai = _openai()
        return self._closed_with_episode(openai.OpenAI, openai.DefaultHttpxClient, options)

    def _closed_with_episode(self, kind: Callable[..., Any], http: Callable[..., Any], options: dict[str, Any]) -> Any:
        if not options.keys() & {"base_url", "http_client"}:
            # The gateway is plain HTTP: certificates take longer to load than an answer. No proxy must be used.
            options = {"http_client": http(verify=False, trust_env=False), **options}
        client = kind(**{"base_url": self.base_url, "api_key": self.api_key, **options})
        self._opened.append(client.close)
        return client

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that OpenAI's and Anthropic's clients read, for an agent in a separate process."""
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}
        anthropic = {"ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": self.api_key}
        return openai | anthropic

    async def close(self) -> None:
        for close in self._opened:
            closing = close()
            if asyncio.iscoroutine(closing):
                with suppress(RuntimeError):  # the client was used in an event loop that the agent has closed
                    await closing


def _id(completion: Any) -> str:
    return str(getattr(completion, "id", completion))


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError:
        raise LoopError("client.openai() needs the package openai; run: pip install openai") from None
    return openai


def find_agent(spec: str | None) -> Agent:
    """Import the function `my_agent.py:run` or `my_package.agents:run`."""
    function: Agent = find_function(spec, "agent", ("row", "client"))
    return function


def find_function(spec: str | None, option: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Import the function that an option of agent_loop_config names, and that takes these arguments."""
    path, colon, name = (spec or "").rpartition(":")
    if not colon or not path or not name:
        value = f"not {spec!r}" if spec else "but is not set"
        raise LoopError(f"agent_loop_config.{option} must name a function, such as my_agent.py:run, {value}")
    is_file, kind = path.endswith(".py") or "/" in path, "agent" if option == "agent" else "function"
    try:
        function: Any = getattr(_imported(str(Path(path).resolve()) if is_file else path), name, None)
    except ImportFailed as failed:
        wrong_name = f"correct agent_loop_config.{option}"
        raise LoopError(f"the {kind} {spec} cannot be imported ({failed}); {wrong_name}") from failed
    if not callable(function):
        raise LoopError(f"{path} has no function {name}; correct agent_loop_config.{option}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as wrong:
        taken = " and ".join(f"a {argument}" for argument in arguments)
        example = f"{'run' if option == 'agent' else name}({', '.join(arguments)})"
        raise LoopError(f"the {kind} {spec} must take {taken}, as in {example}: {wrong}") from wrong
    found: Callable[..., Any] = function
    return found


@lru_cache
def _imported(path: str) -> ModuleType:
    """Import the module once for all episodes, so that its agents share what it creates."""
    return import_path(path, "agent")


class AgentThread:
    """The thread with the event loop that agents share."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rally-agents", daemon=True).start()


class RunningAgent:
    """One running agent, as a handle for the event loop of its episode."""

    def __init__(self, thread: AgentThread, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._here, self._there = asyncio.get_running_loop(), thread.loop
        self.ended: asyncio.Future[CallEnd] = self._here.create_future()
        self.abandoned = False  # whether a thread of the agent could not be stopped
        self._task: asyncio.Task[CallEnd] | None = None
        self._there.call_soon_threadsafe(self._begin, work)

    def cancel(self) -> None:
        self._there.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def _begin(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._task = self._there.create_task(self._captured(work))
        self._task.add_done_callback(self._done)

    async def _captured(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> CallEnd:
        on_abandoned.set(self._abandon)
        return await outcome_of(work())

    def _abandon(self) -> None:
        self.abandoned = True

    def _done(self, task: asyncio.Task[CallEnd]) -> None:
        never_begun = CallEnd(error=asyncio.CancelledError())
        with suppress(RuntimeError):  # an abandoned agent may outlive the event loop of its episode
            self._here.call_soon_threadsafe(self._set_ended, never_begun if task.cancelled() else task.result())

    def _set_ended(self, ended: CallEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)


async def run_agent(function: Agent, row: dict[str, Any], client: AgentClient) -> Any:
    """Run the agent and close the clients that it opened. Returns what the agent returns."""
    try:
        return await call(function, row, client)
    finally:
        await client.close()
