"""One running server as a `Replica`: every way it can fail becomes one of three errors, and nobody waits for ever.

| what happens | what is raised |
| --- | --- |
| no connection, connection lost, no answer in time, a 5xx, an answer that is not whole | ReplicaGone |
| 429, or 503 | ReplicaBusy, with the server's Retry-After |
| 400, 401, 403, 404, 413, 422 | EngineError with the server's own words |

A caller that is cancelled frees its request on the server too. While a server has other weights than the run, or its
process is being started again, it takes no requests.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from rally.engines.base import EngineError, ReplicaBusy, ReplicaGone
from rally.engines.remote.server_api import TOKEN_VARIABLE, Asked, HttpCall, InFlight, ServerApi, Source
from rally.types import Generation, SamplingParams


class Address(NamedTuple):
    """Where a server is, and who asks it."""

    url: str
    headers: dict[str, str]

    @classmethod
    def of(cls, written: str) -> Address:
        """`http://user:password@host:8000/` as http://host:8000 and basic authentication."""
        parts = urlsplit(written)
        who, at, where = parts.netloc.rpartition("@")
        url = urlunsplit(parts._replace(netloc=where)).rstrip("/")
        user, _, password = who.partition(":")
        credentials = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        return cls(url, {"Authorization": f"Basic {credentials}"} if at else {})


if TYPE_CHECKING:
    import aiohttp

CONTROL_SECONDS = 600.0  # loading weights of a large model takes minutes
HEALTH_SECONDS = 5.0
KNOCK_SECONDS = 0.2
IDLE_SECONDS = 3.0  # that a connection is kept for the next request; servers hang up after 5, and none must meet that
BUSY_TRIES = 5
BUSY_SECONDS = 60.0  # the most that one Retry-After is waited for
MISTAKES = (400, 401, 403, 404, 413, 422)

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How long is waited, and how much is asked at once."""

    timeout: float = 600.0
    """Seconds from the request to the last byte of its answer, the server's own queue included."""
    max_connections: int = 1000
    """Generations at once; nothing else waits for them."""
    start_seconds: float = 300.0
    vocabulary: int | None = None
    max_model_len: int | None = None


class ServerReplica:
    """A `Replica` over HTTP."""

    def __init__(self, url: str, dialect: ServerApi, settings: ClientSettings | None = None) -> None:
        self.url, credentials = Address.of(url)
        self.dialect = dialect
        self.settings = settings or ClientSettings()
        _require_aiohttp()  # not at the first call: a server that does not answer is waited for
        self._headers = _headers(self.url, credentials, dialect.headers())
        self.version: int | None = None  # of the weights it holds, if anybody knows
        self.serving = False  # whether it takes requests
        self.asleep = False  # its memory is somebody else's
        self._woken: set[str] = set()  # parts of it that are its own again, if it did not wake whole
        self._salt = ""
        self._links: dict[asyncio.AbstractEventLoop, _Link] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self.url

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self._check(prompt_ids, params)
        before = self.version
        if before is None or not self.serving:
            raise ReplicaGone(f"{self.name} does not have the current weights")
        began = time.perf_counter()
        ids, salt = tuple(prompt_ids), self._salt
        request = Asked(id=uuid.uuid4().hex, prompt_ids=ids, params=params, before=before, after=before, salt=salt)
        try:
            answer = await self.call(self.dialect.generate(request), self.settings.timeout, in_turn=True)
        except (asyncio.CancelledError, ReplicaGone):
            self._abort(request.id)
            raise
        try:
            generation = self.dialect.generation(answer, replace(request, after=self.version))
        except ReplicaGone as problem:
            raise ReplicaGone(f"{self.name}: {problem}") from None
        return replace(generation, seconds=time.perf_counter() - began)

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what no server could do. It is not left to them: a token outside the vocabulary ends vLLM's engine."""
        most, window = self.settings.vocabulary, self.settings.max_model_len
        if params.stop:
            raise EngineError("a server that only knows token ids cannot stop at strings; use stop ids")
        if not prompt_ids:
            raise EngineError("an empty prompt cannot be continued; give at least one token")
        if min(prompt_ids) < 0 or (most is not None and max(prompt_ids) >= most):
            raise EngineError(f"a prompt holds a token outside the model's vocabulary of {most}")
        if window is not None and len(prompt_ids) + params.max_tokens > window:
            raise EngineError(
                f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} exceed rollout.max_model_len="
                f"{window}; ask for fewer"
            )

    async def healthy(self) -> bool:
        if not self.serving:
            return False
        try:
            await self.call(HttpCall("/health"), HEALTH_SECONDS)
        except EngineError:
            return False
        return True

    async def up(self, folder: str) -> None:
        """Wait until it answers; a server of our own is started first, from the model in `folder`."""
        await self._answers(lambda: None)

    async def _answers(self, check: Callable[[], None]) -> None:
        """Wait until it answers; `check` raises where there is no hope."""
        deadline = time.monotonic() + self.settings.start_seconds
        while True:
            check()
            try:
                await self.call(HttpCall("/health"), HEALTH_SECONDS)
                return
            except EngineError as problem:
                if time.monotonic() > deadline:
                    waited = f"it was waited for {self.settings.start_seconds:g} s"
                    raise ReplicaGone(f"{problem}; {waited} (rollout.server.max_start_wait_time)") from None
            await asyncio.sleep(KNOCK_SECONDS)

    async def sleep(self) -> None:
        """Its weights and KV leave the GPU until the next `load`, which wakes it; it takes no requests before."""
        self.serving = False
        self.version = None
        if self.asleep:  # also where it woke in part: no server survives giving back what it does not have
            return
        await self._order(self.dialect.sleep())
        self.asleep = True

    async def load(self, source: Source, version: int, in_flight: InFlight) -> None:
        """Let it sample from the weights of `source`; on failure it takes no requests any more."""
        self.serving = False
        try:
            if self.asleep:
                await self._order(self.dialect.wake(source, version))
            else:
                await self._order(self.dialect.load(source, version, in_flight))
            self.asleep = False
            self._woken.clear()
            self._salt = f"rally-{uuid.uuid4().hex}"
            self.version = version  # before it goes on: what it samples from here on is of these weights
        except EngineError:
            self.version = None
            if not self.asleep:  # that has no callers, and not all of the memory that going on would need
                with suppress(EngineError):  # left paused, it would keep callers waiting; if it is gone, it has none
                    await self.call(self.dialect.resume(), HEALTH_SECONDS)
            raise
        await self._order((self.dialect.resume(),))
        self.serving = True

    async def _order(self, calls: Sequence[HttpCall]) -> None:
        for call in calls:
            if call.wakes in self._woken:
                continue
            answer = await patiently(functools.partial(self.call, call, CONTROL_SECONDS))
            if isinstance(answer, dict) and answer.get("success") is False:
                raise ReplicaGone(f"{self.name} refused {call.path}: {answer.get('message', 'it does not say why')}")
            if call.wakes:
                self._woken.add(call.wakes)

    async def call(self, call: HttpCall, seconds: float, *, in_turn: bool = False) -> Any:
        """The JSON that the server answers, or one of the three errors. None where it answers without a body. `in_turn`
        are those of which there may be `max_connections` at once."""
        import aiohttp

        link = await self._link()
        try:
            async with asyncio.timeout(seconds), link.room if in_turn else nullcontext():
                status, retry_after, content = await _asked(link.session, self.url, call)
        except TimeoutError:
            raise ReplicaGone(f"{self.name} did not answer {call.path} within {seconds:g} s") from None
        except aiohttp.ClientError as problem:
            raise ReplicaGone(f"{self.name} cannot be reached ({type(problem).__name__}: {problem})") from problem
        if status == 404 and call.optional:
            return None
        if not 200 <= status < 300:
            raise _refusal(self.name, call, status, retry_after, content)
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise ReplicaGone(f"{self.name} answered {call.path} with something that is not JSON") from None

    async def close(self) -> None:
        self.serving = False
        here = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._aborting if task.get_loop() is here))
        await self._leave(lambda loop: loop is here or loop.is_closed())

    async def _leave(self, done: Callable[[asyncio.AbstractEventLoop], bool]) -> None:
        """Close the connections of loops that are done with; another loop's are its own."""
        for loop in list(self._links):
            if done(loop) and (link := self._links.pop(loop, None)) is not None:
                await link.session.close()

    async def _link(self) -> _Link:
        """Connections belong to the event loop that opened them, and a closed one will never close them itself."""
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            await self._leave(lambda other: other.is_closed())
        if loop not in self._links:
            session = _new_session(self._headers)
            self._links[loop] = _Link(session, asyncio.Semaphore(self.settings.max_connections))
        return self._links[loop]

    def _abort(self, request_id: str) -> None:
        call = self.dialect.abort(request_id)
        if call is not None:
            task = asyncio.get_running_loop().create_task(self._send_abort(call))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _send_abort(self, call: HttpCall) -> None:
        with suppress(EngineError):  # a server that is gone has freed it in its own way
            await self.call(call, HEALTH_SECONDS)


class _Link(NamedTuple):
    session: aiohttp.ClientSession
    room: asyncio.Semaphore  # for generations; a health check, an abort or an update never waits behind them


async def patiently(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """What is asked of a server that may be busy for a moment: again after its Retry-After, a few times."""
    for _ in range(BUSY_TRIES - 1):
        try:
            return await ask()
        except ReplicaBusy as busy:
            await asyncio.sleep(min(max(busy.retry_after, KNOCK_SECONDS), BUSY_SECONDS))
    return await ask()


def _headers(url: str, credentials: dict[str, str], token: dict[str, str]) -> dict[str, str]:
    """One request has one way to say who asks, and which of two a server or the proxy before it wants, nobody knows."""
    if credentials and token:
        told = f"{url} is given a user and password by its address and a token by {TOKEN_VARIABLE}"
        raise EngineError(f"{told}, and a request can carry only one of them; take one out")
    return credentials or token


def _require_aiohttp() -> None:
    if find_spec("aiohttp") is None:
        raise EngineError("talking to a rollout server needs aiohttp; run: pip install 'rally-rl[servers]'")


def _new_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    import aiohttp

    # The deadline of a whole call is kept in `call`, and how many there are at once by `room`.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(),
        headers=headers | {"Content-Type": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _asked(session: aiohttp.ClientSession, url: str, call: HttpCall) -> tuple[int, str, bytes]:
    """Status, Retry-After and the whole body of what the server answers."""
    method, body = ("GET", None) if call.body is None else ("POST", json.dumps(call.body).encode())
    async with session.request(method, url + call.path, data=body, allow_redirects=False) as response:
        return response.status, response.headers.get("Retry-After", ""), await response.read()


def _refusal(name: str, call: HttpCall, status: int, retry_after: str, content: bytes) -> EngineError:
    said = " ".join(content.decode(errors="replace").split())[:300]
    if status in (429, 503):
        return ReplicaBusy(f"{name} has too much to do ({status}: {said})", _seconds(retry_after))
    if status in MISTAKES:
        return EngineError(f"{name} refuses {call.path} ({status}): {said}{_cure(call.path, status)}")
    return ReplicaGone(f"{name} failed at {call.path} ({status}): {said}")


def _seconds(retry_after: str) -> float:
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 1.0


def _cure(path: str, status: int) -> str:
    if path.startswith("/inference/") and status in (403, 404):
        return "; start vLLM with --enable-scale-out, which opens the route for token ids"
    if status == 401:
        return f"; set {TOKEN_VARIABLE} to its token, or, for a proxy before it, a user and password in its address"
    if status == 404:
        return "; start the server with its routes for weight updates (vLLM: VLLM_SERVER_DEV_MODE=1)"
    return ""
