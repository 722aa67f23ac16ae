"""Calls the four methods of a tool, with the arguments that each method's signature takes.

`ToolCaller` adapts one tool; `outcome_of` and `outcome_within` turn whatever the tool raises into a `CallEnd`;
`AnswerCache` remembers the answers of a tool that allows it. Accepted signatures:

- `create`: the row's create_kwargs are passed as the keyword `create_kwargs` and one by one, as far as the signature
  takes them: `create(instance_id, **kwargs)` gets both, `create(instance_id, ground_truth)` only the entry and
  `create(instance_id, create_kwargs)` only the dict. An entry that can be passed neither way is an error.
- `execute(instance_id, parameters, **kwargs)`, or with one positional parameter `execute(args, **kwargs)`, where args
  is an `args_schema` object (a dict when the class has none).
- execute_kwargs, calc_reward_kwargs and release_kwargs of the row are passed as keywords.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import inspect
import json
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from rally.tools.base import BaseTool
from rally.tools.results import ToolReturn, read_answer, read_reward
from rally.tools.schema import ToolConfigError, from_pydantic
from rally.types import OnOutage, RallyError

MAX_CACHED_CHARS = 1_000_000  # longer answers are not cached, to bound the memory of a run


class AnswerCache:
    """The last `size` answers of one tool."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[str, ToolReturn] = OrderedDict()

    def get(self, key: str) -> ToolReturn | None:
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key]

    def put(self, key: str, answer: ToolReturn) -> None:
        if len(answer.response.text or "") > MAX_CACHED_CHARS:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)


def call_key(arguments: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """The cache key of a call: its arguments, in any order, and the row's execute_kwargs.

    None when the arguments are nested too deeply to serialize: such a call is not cached.
    """
    try:
        return json.dumps([arguments, row], sort_keys=True, default=repr)
    except RecursionError:
        return None


class ToolTimeout(RallyError):
    """Raised by a tool whose own deadline has passed. The text goes to the model."""


class ToolUnavailable(RallyError):
    """Raised by a tool whose server, sandbox or session does not work, whatever the arguments of the call are. The text
    goes to the model. The episode is not held against the policy (`on_outage`)."""

    outage = True


# Names of exceptions for a connection that does not work, in the libraries that tools use most.
_CONNECTION_ERRORS = frozenset(
    {
        *("ConnectError", "ConnectionError", "ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"),
        *("NetworkError", "TransportError", "ReadError", "WriteError", "RemoteProtocolError", "ProxyError"),
        *("ClientConnectionError", "ServerDisconnectedError", "ServerTimeoutError", "APIConnectionError"),
        *("APITimeoutError", "Timeout", "URLError", "IncompleteRead", "RemoteDisconnected", "ConnectionClosed"),
    }
)
_FAILED_STATUS = frozenset({401, 403, 407, 408, 425, 429})  # and all from 500 on; the others are about the request
_FAILED_ERRNO = frozenset(
    getattr(errno, name)
    for name in (
        *("ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH"),
        *("ENETDOWN", "ETIMEDOUT", "ENOSPC", "EMFILE", "ENFILE", "ENOMEM", "EIO"),
    )
)


def is_outage(error: BaseException | None) -> bool:
    """Whether an exception says that something outside of the call does not work: a connection that fails or is too
    slow, an HTTP status that is not about the request, a full disk. An exception class may say it itself with the
    attribute `outage`. An exception that was raised because of such a one counts too."""
    for _ in range(8):  # chains may be cyclic
        if error is None:
            return False
        said = getattr(error, "outage", None)
        if isinstance(said, bool):
            return said
        status = _http_status(error)
        if status is not None:
            return status >= 500 or status in _FAILED_STATUS
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno in _FAILED_ERRNO:
            return True
        if any(kind.__name__ in _CONNECTION_ERRORS for kind in type(error).__mro__):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _http_status(error: BaseException) -> int | None:
    """The HTTP status in an exception of httpx, requests, urllib, aiohttp or OpenAI's client."""
    named = "HTTP" in type(error).__name__ or "Status" in type(error).__name__ or "Response" in type(error).__name__
    for holder in (getattr(error, "response", None), error if named else None):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


on_abandoned: contextvars.ContextVar[Callable[[], None]] = contextvars.ContextVar("on_abandoned", default=lambda: None)
"""Called when a call in a thread is cancelled. The thread runs on, because Python cannot end one."""


@dataclass(frozen=True, kw_only=True)
class CallEnd:
    """How a call ended: with a value, with an error, or not within its deadline (`late`)."""

    value: Any = None
    error: BaseException | None = None
    late: bool = False


async def outcome_within(work: Coroutine[Any, Any, Any], seconds: float) -> CallEnd:
    """Await `work` for at most `seconds`, even if it ignores its cancellation. Raises only CancelledError."""
    task = asyncio.create_task(outcome_of(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if done:
        return task.result()
    await _cancel(task)
    return CallEnd(late=True)


async def _cancel(task: asyncio.Task[CallEnd]) -> None:
    """Cancel the task and let it run once, so that `on_abandoned` is called before the counters are read."""
    task.cancel()
    await asyncio.sleep(0)


async def outcome_of(work: Coroutine[Any, Any, Any]) -> CallEnd:
    """Await `work`. Whatever it raises, SystemExit and CancelledError included, becomes the outcome. Only an interrupt
    from the keyboard is raised."""
    try:
        return CallEnd(value=await work)
    except BaseException as error:
        if is_keyboard(error):
            raise
        return CallEnd(error=error)


def is_keyboard(error: BaseException) -> bool:
    """Whether an exception is the user's Ctrl-C, and not a KeyboardInterrupt that a tool raised itself."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True  # raised anywhere, so nothing tells it apart
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name == "_on_sigint"  # of asyncio.Runner


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`: awaited when it is async, otherwise in a new thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await _in_thread(lambda: function(*args, **kwargs))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[CallEnd] = loop.create_future()
    context = contextvars.copy_context()

    def settle(ended: CallEnd) -> None:
        if not finished.done():
            finished.set_result(ended)

    def run() -> None:
        try:
            ended = CallEnd(value=context.run(work))
        except BaseException as error:  # noqa: BLE001 - any error of the thread is raised in the caller
            ended = CallEnd(error=error)
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
    """The keywords a function takes, read from its signature once."""

    names: frozenset[str]
    takes_any: bool
    positional: int

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Keywords:
        kind = inspect.Parameter
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # some built-in callables have no signature; they get all keywords
            parameters = [kind("kwargs", kind.VAR_KEYWORD)]
        return cls(
            names=frozenset(p.name for p in parameters if p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)),
            takes_any=any(p.kind is kind.VAR_KEYWORD for p in parameters),
            positional=sum(p.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for p in parameters),
        )

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def check(self, keywords: Mapping[str, Any], owner: str) -> dict[str, Any]:
        """All of `keywords`, or a ToolConfigError that names those the function of `owner` does not take."""
        refused = [name for name in keywords if not self.takes(name)]
        if refused:
            names = ", ".join(map(repr, refused))
            raise ToolConfigError(f"{owner} takes no {names}; remove it from the row or the config")
        return dict(keywords)


class ToolCaller:
    """One tool, with its signatures, limiters and cache."""

    def __init__(self, tool: BaseTool[Any]) -> None:
        self.tool = tool
        if tool.on_outage not in (None, *get_args(OnOutage)):
            known = ", ".join(get_args(OnOutage))
            raise ToolConfigError(f"on_outage of tool {tool.name!r} must be one of {known}, not {tool.on_outage!r}")
        self._create = Keywords.of(tool.create)
        self._execute = Keywords.of(tool.execute)
        self._calc_reward = Keywords.of(tool.calc_reward)
        self._release = Keywords.of(tool.release)
        self.stateless = all(_inherited(tool, method) for method in ("create", "calc_reward", "release"))
        """Whether the tool keeps nothing per episode, so that nothing has to be created, scored or released."""
        self.instant = self.stateless and hasattr(tool.execute, "instant")
        self.limiters = tuple(
            limiter for limiter in (tool.limits.limiter(), tool.shared_limiter) if limiter is not None
        )
        if tool.limits.cache and not self.stateless:
            raise ToolConfigError(
                f"tool {tool.name!r} has state per episode (it defines create, calc_reward or release), so its answers "
                "cannot be cached; remove limits.cache"
            )
        self.cache = AnswerCache(tool.limits.cache_size) if tool.limits.cache else None

    async def create(self, instance_id: str, create_kwargs: Mapping[str, Any]) -> str:
        """Create an instance. Returns the id that the tool chose, or `instance_id`."""
        as_dict = self._create.takes("create_kwargs")
        one_by_one = {key: value for key, value in create_kwargs.items() if not as_dict or self._create.takes(key)}
        keywords = self._create.check(one_by_one, self._method("create"))
        if as_dict:
            keywords["create_kwargs"] = dict(create_kwargs)
        if self._create.takes("instance_id"):
            keywords["instance_id"] = instance_id
        created = await call(self.tool.create, **keywords)
        chosen = created[0] if isinstance(created, tuple) and created else created
        return chosen if isinstance(chosen, str) else instance_id

    async def execute(
        self, instance_id: str, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any]
    ) -> ToolReturn:
        keywords = self._execute.check(execute_kwargs, self._method("execute"))
        if self._execute.positional != 1:
            return read_answer(await call(self.tool.execute, instance_id, arguments, **keywords))
        if self.tool.args_schema is None:
            return read_answer(await call(self.tool.execute, arguments, **keywords))
        try:
            validated = self.tool.args_schema.model_validate(arguments)
        except ValidationError as error:
            raise from_pydantic(error) from None
        return read_answer(await call(self.tool.execute, validated, **keywords))

    async def calc_reward(self, instance_id: str, calc_reward_kwargs: Mapping[str, Any]) -> float | None:
        keywords = self._calc_reward.check(calc_reward_kwargs, self._method("calc_reward"))
        reward = await call(self.tool.calc_reward, instance_id, **keywords)
        return None if reward is None else read_reward(reward)

    async def release(self, instance_id: str, release_kwargs: Mapping[str, Any]) -> None:
        await call(self.tool.release, instance_id, **self._release.check(release_kwargs, self._method("release")))

    def _method(self, name: str) -> str:
        return f"{name} of tool {self.tool.name!r}"


def _inherited(tool: BaseTool[Any], method: str) -> bool:
    return getattr(getattr(tool, method), "__func__", None) is getattr(BaseTool, method)
