"""Guarantees: a user's function, plain or async, is called with the keywords it takes and never blocks the event loop.

A plain function runs in a daemon thread of its own: a thread that hangs holds up neither other calls, as it would in a
pool, nor the end of the program. An `async` function that blocks inside (time.sleep) cannot be helped: it stops
everything, so blocking tools should be plain functions.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rally.tools.schema import ToolConfigError
from rally.types import RallyError


class ToolTimeout(RallyError):
    """A tool raises it when a deadline of its own has passed. The text is told to the model."""


on_abandoned: contextvars.ContextVar[Callable[[], None]] = contextvars.ContextVar("on_abandoned", default=lambda: None)
"""Called when a thread is left to itself because nobody waits for it any longer: Python cannot end one."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How some work ended: with a value, with an error, or too late to say."""

    value: Any = None
    error: BaseException | None = None
    late: bool = False


async def within(work: Coroutine[Any, Any, Any], seconds: float) -> Ended:
    """What came of `work` after `seconds` at most, even when it ignores being cancelled; raises only CancelledError."""
    task = asyncio.create_task(settled(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if done:
        return task.result()
    await _cancel(task)
    return Ended(late=True)


async def _cancel(task: asyncio.Task[Ended]) -> None:
    """Tell the work that it is over, and let it hear of that before anybody counts what it left behind."""
    task.cancel()
    await asyncio.sleep(0)


async def settled(work: Coroutine[Any, Any, Any]) -> Ended:
    """Foreign code may fail in any way, exit() and a stray cancellation included: each is an outcome, not a crash."""
    try:
        return Ended(value=await work)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
        return Ended(error=error)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`: awaited when async, in a thread when not."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await _in_thread(lambda: function(*args, **kwargs))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[Ended] = loop.create_future()
    context = contextvars.copy_context()

    def settle(ended: Ended) -> None:
        if not finished.done():
            finished.set_result(ended)

    def run() -> None:
        try:
            ended = Ended(value=context.run(work))
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread belongs to the caller
            ended = Ended(error=error)
        with suppress(RuntimeError):  # an abandoned call may outlive the loop
            loop.call_soon_threadsafe(settle, ended)

    threading.Thread(target=run, name="rally-tool", daemon=True).start()
    try:
        ended = await finished
    except asyncio.CancelledError:
        on_abandoned.get()()
        raise
    if ended.error is not None:
        raise ended.error
    return ended.value


@dataclass(frozen=True)
class Keywords:
    """The keywords a function takes; read from its signature once."""

    names: frozenset[str]
    takes_any: bool
    positional: int

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Keywords:
        kind = inspect.Parameter
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # some built-in callables show none; they get what there is
            parameters = [kind("kwargs", kind.VAR_KEYWORD)]
        return cls(
            names=frozenset(p.name for p in parameters if p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)),
            takes_any=any(p.kind is kind.VAR_KEYWORD for p in parameters),
            positional=sum(p.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for p in parameters),
        )

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def deliver(self, given: Mapping[str, Any], what: str) -> dict[str, Any]:
        """All of `given`: a keyword is delivered or refused, never lost."""
        refused = [name for name in given if not self.takes(name)]
        if refused:
            raise ToolConfigError(f"{what} takes no {', '.join(map(repr, refused))}, which this row or config gives it")
        return dict(given)
