"""The HTTP client of one rollout server, as a `Replica`. Every call has a deadline, and every failure is one of these:

| failure | exception |
| --- | --- |
| no connection, connection lost, no response in time, a 5xx, an incomplete response | ReplicaGone |
| 429, or 503 | ReplicaBusy, with the server's Retry-After |
| 400 from Rally's own server about a grammar | GrammarError with the server's message |
| 400, 401, 403, 404, 413, 422 otherwise | EngineError with the server's message |

Cancelling a call also aborts its request on the server. A server that does not have the current weights, or whose
process is being restarted, accepts no requests.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from rally.engines.base import NO_GRAMMAR, NO_IMAGES, EngineError, ReplicaBusy, ReplicaGone, first_stop
from rally.engines.remote.server_api import (
    TOKEN_VARIABLE,
    GenerationRequest,
    HttpCall,
    InFlight,
    ServerApi,
    Source,
    WeightBroadcast,
)
from rally.engines.remote.token_protocol import GRAMMAR_CODE
from rally.models.token_masks import GrammarError
from rally.types import Generation, ImageSpan, RallyError, SamplingParams, WeightSpan


class Address(NamedTuple):
    """The URL of a server, and the credentials for it."""

    url: str
    headers: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Address:
        """`http://user:password@host:8000/` as http://host:8000 and basic authentication."""
        parts = urlsplit(text)
        userinfo, at, host = parts.netloc.rpartition("@")
        url = urlunsplit(parts._replace(netloc=host)).rstrip("/")
        user, _, password = userinfo.partition(":")
        credentials = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        return cls(url, {"Authorization": f"Basic {credentials}"} if at else {})


if TYPE_CHECKING:
    import aiohttp

CONTROL_SECONDS = 600.0  # loading weights of a large model takes minutes
HEALTH_SECONDS = 5.0
POLL_SECONDS = 0.2
IDLE_SECONDS = 3.0  # that a connection is kept for reuse; less than the 5 s after which servers close it
BUSY_TRIES = 5
STRING_TOKENS = 256  # of one request if stop strings are searched: the most that are sampled in vain
BUSY_SECONDS = 60.0  # the maximum wait for one Retry-After
QUESTIONS = ("/prompt_logprobs", "/tokenizer", "/get_model_info", "/get_server_info", "/v1/models", "/v1/completions")
CLIENT_ERRORS = (400, 401, 403, 404, 413, 422)

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Timeouts and limits of a client."""

    timeout: float = 600.0
    """Seconds from the request to the last byte of the response, including the server's queue."""
    max_connections: int = 1000
    """Concurrent generations; other calls do not count."""
    start_seconds: float = 300.0
    vocabulary: int | None = None
    max_model_len: int | None = None
    route_experts: int | None = None
    """The experts of a token, if generations must include the choices of the routers."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids as text, to find stop strings."""


class ServerReplica:
    """A `Replica` over HTTP."""

    def __init__(
        self, url: str, api: ServerApi, settings: ClientSettings | None = None, token: str | None = None
    ) -> None:
        """`token`: of a server that this run launched; otherwise it is the user's (`api.headers`)."""
        self.url, credentials = Address.of(url)
        self.api = api
        self.settings = settings or ClientSettings()
        _require_aiohttp()  # now, because a failing first call would be retried as if the server were starting
        bearer = {"Authorization": f"Bearer {token}"} if token else api.headers()
        self.headers = _headers(self.url, credentials, bearer)
        self.version: int | None = None  # of its weights, if known
        self.serving = False  # whether it accepts requests
        self.asleep = False  # it has released its memory
        self._mixed = False  # a broadcast to it failed, and it has had no whole version since
        self._woken: set[str] = set()  # parts of its memory that were restored, if waking failed half way
        self.salt = ""
        self._links: dict[asyncio.AbstractEventLoop, _Link] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self.url

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, images: Sequence[ImageSpan] = ()
    ) -> Generation:
        self._check(prompt_ids, params, images)
        if params.stop and not self.api.stops_at_strings:
            return await self._until_string(tuple(prompt_ids), params)
        return await self._generate(prompt_ids, params, images)

    async def _until_string(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> Generation:
        """Sample until the decoded text has a stop string, which servers that only see token ids cannot find. The
        request is split, so that few tokens are sampled in vain. The tokens after the one that completes the string
        are dropped, as if they had not been sampled."""
        decode, start = self.settings.decode, time.perf_counter()
        assert decode is not None
        whole: Generation | None = None
        while whole is None or (whole.finish == "length" and len(whole.ids) < params.max_tokens):
            known = whole.ids if whole else ()
            size = min(STRING_TOKENS, params.max_tokens - len(known))
            # Another seed for each part, or all parts would get the same random numbers.
            seed = None if params.seed is None else (params.seed + len(known)) % 2**63
            part = replace(params, stop=(), max_tokens=size, seed=seed)
            new = await self._generate(prompt_ids + known, part)
            joined = new if whole is None else _joined(whole, new)
            end = first_stop(decode, joined.ids, len(known), params.stop)
            whole = joined if end is None else _cut(joined, end)
        return replace(whole, seconds=time.perf_counter() - start)

    async def _generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Generation:
        before = self.version
        if before is None or not self.serving:
            raise ReplicaGone(f"{self.name} does not have the current weights")
        start = time.perf_counter()
        ids, salt = tuple(prompt_ids), self.salt
        request = GenerationRequest(
            id=uuid.uuid4().hex,
            prompt_ids=ids,
            params=params,
            before=before,
            after=before,
            salt=salt,
            images=tuple(images),
            route_experts=self.settings.route_experts,
        )
        try:
            response = await self.call(self.api.generate(request), self.settings.timeout, limited=True)
        except (asyncio.CancelledError, ReplicaGone):
            self._abort(request.id)
            raise
        try:
            generation = self.api.generation(response, replace(request, after=await self._version_now()))
        except ReplicaGone as problem:
            raise ReplicaGone(f"{self.name}: {problem}") from None
        vocabulary, largest = self.settings.vocabulary, max(generation.ids, default=0)
        if vocabulary is not None and largest >= vocabulary:  # training would read beyond its logits
            raise ReplicaGone(
                f"{self.name} sampled token {largest}, which is outside the model's vocabulary of {vocabulary}; serve "
                "the model of the run"
            )
        if (oldest := min((span.version for span in generation.spans), default=before)) < before:
            raise self._started_again(oldest, before)
        return replace(generation, seconds=time.perf_counter() - start)

    def _started_again(self, has: int, given: int) -> ReplicaGone:
        """It reports weights that are older than those that it had before the request: its process is another one. It
        gets no requests until it has been given weights again."""
        if self.version == given:
            self.version, self.serving = None, False
        problem = f"{self.name} has weights of version {has}, although it was given version {given}"
        _log.warning("%s; was it started again? It gets no requests until it has the weights of the run", problem)
        return ReplicaGone(problem)

    async def _version_now(self) -> int | None:
        """The version of its weights, as known to whoever updates them."""
        return self.version

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan]) -> None:
        """Reject invalid requests here: a token outside the vocabulary crashes vLLM's engine."""
        if params.grammar and not self.api.applies_grammars:
            raise EngineError(NO_GRAMMAR)
        if images and not self.api.takes_images:
            raise EngineError(NO_IMAGES)
        vocabulary, window = self.settings.vocabulary, self.settings.max_model_len
        if params.stop and self.settings.decode is None and not self.api.stops_at_strings:
            raise EngineError(
                "stop strings need a tokenizer; give the client one (ClientSettings.decode) or use stop_ids"
            )
        if not prompt_ids:
            raise EngineError("an empty prompt cannot be continued; give at least one token")
        if min(prompt_ids) < 0 or (vocabulary is not None and max(prompt_ids) >= vocabulary):
            raise EngineError(f"the prompt contains a token id outside the model's vocabulary of {vocabulary}")
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
        """Wait until it answers. A launched server is started first, from the model in `folder`."""
        await self._wait_until_healthy(lambda: None)

    async def _wait_until_healthy(self, check: Callable[[], None]) -> None:
        """Poll until it answers; `check` raises if it never will."""
        deadline = time.monotonic() + self.settings.start_seconds
        while True:
            check()
            try:
                await self.call(HttpCall("/health"), HEALTH_SECONDS)
                return
            except EngineError as problem:
                if time.monotonic() > deadline:
                    waited = f"gave up after {self.settings.start_seconds:g} s (rollout.server.max_start_wait_time)"
                    raise ReplicaGone(f"{problem}; {waited}") from None
            await asyncio.sleep(POLL_SECONDS)

    async def sleep(self) -> None:
        """Make it release the GPU memory of weights and KV. The next `load` wakes it; until then it accepts no
        requests."""
        self.serving = False
        self.version = None
        if self.asleep:  # also if it woke in part: releasing memory twice kills a server
            return
        await self._control(self.api.sleep())
        self.asleep = True

    async def load(self, source: Source, version: int, in_flight: InFlight) -> None:
        """Load the weights of `source`; after a failure it accepts no requests."""
        self.serving = False
        try:
            if self.asleep:
                await self._control(self.api.wake(source, version))
            else:
                await self._control(self.api.load(source, version, in_flight))
            self.asleep = self._mixed = False
            self._woken.clear()
            self.salt = f"rally-{uuid.uuid4().hex}"
            self.version = version  # before it resumes: from then on it samples from these weights
        except EngineError as problem:
            self.version = None
            self._mixed |= isinstance(source, WeightBroadcast)
            if self._mixed:  # parts of two versions: what it still samples must be of neither
                raise ReplicaGone(f"{self.name} has no complete weights: {problem}") from problem
            if not self.asleep:  # a sleeping server has no callers and too little memory to resume
                with suppress(EngineError):  # if left paused it would block its callers; if it is gone, it has none
                    await self.call(self.api.resume(), HEALTH_SECONDS)
            raise
        await self._control((self.api.resume(),))
        self.serving = True

    async def _control(self, calls: Sequence[HttpCall]) -> None:
        for call in calls:
            if call.wakes in self._woken:
                continue
            response = await retry_while_busy(functools.partial(self.call, call, CONTROL_SECONDS))
            if isinstance(response, dict) and response.get("success") is False:
                raise ReplicaGone(f"{self.name} rejected {call.path}: {response.get('message', 'no reason given')}")
            if call.wakes:
                self._woken.add(call.wakes)

    async def call(self, call: HttpCall, seconds: float, *, limited: bool = False) -> Any:
        """The JSON of the response, or one of the errors above; None for an empty body. At most `max_connections`
        `limited` calls run at once."""
        import aiohttp

        link = await self._link()
        try:
            async with asyncio.timeout(seconds), link.slots if limited else nullcontext():
                status, retry_after, content = await _send(link.session, self.url, call)
        except TimeoutError:
            raise ReplicaGone(f"{self.name} did not answer {call.path} within {seconds:g} s") from None
        except aiohttp.ClientError as problem:
            raise ReplicaGone(f"{self.name} cannot be reached ({type(problem).__name__}: {problem})") from problem
        if status == 404 and call.optional:
            return None
        if not 200 <= status < 300:
            raise _http_error(self.name, call, status, retry_after, content)
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise ReplicaGone(f"{self.name} answered {call.path} with a body that is not JSON") from None

    async def close(self) -> None:
        self.serving = False
        here = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._aborting if task.get_loop() is here))
        await self._close_links(lambda loop: loop is here or loop.is_closed())

    async def _close_links(self, done: Callable[[asyncio.AbstractEventLoop], bool]) -> None:
        """Close the connections of the event loops for which `done` is true."""
        for loop in list(self._links):
            if done(loop) and (link := self._links.pop(loop, None)) is not None:
                await link.session.close()

    async def _link(self) -> _Link:
        """The connections of the running event loop. Those of closed loops are closed here."""
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            await self._close_links(lambda other: other.is_closed())
        if loop not in self._links:
            session = _new_session(self.headers)
            self._links[loop] = _Link(session, asyncio.Semaphore(self.settings.max_connections))
        return self._links[loop]

    def _abort(self, request_id: str) -> None:
        call = self.api.abort(request_id)
        if call is not None:
            task = asyncio.get_running_loop().create_task(self._send_abort(call))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _send_abort(self, call: HttpCall) -> None:
        with suppress(EngineError):  # a server that is gone has no request to abort
            await self.call(call, HEALTH_SECONDS)


def _joined(first: Generation, second: Generation) -> Generation:
    """Two parts of one turn as one generation."""
    offset = len(first.ids)
    spans = list(first.spans)
    for span in second.spans:
        if spans and spans[-1].version == span.version and spans[-1].end == offset + span.start:
            spans[-1] = replace(spans[-1], end=offset + span.end)
        else:
            spans.append(WeightSpan(span.version, offset + span.start, offset + span.end))
    both = bool(first.sampling_logprobs) and bool(second.sampling_logprobs)
    return replace(
        first,
        ids=first.ids + second.ids,
        logprobs=first.logprobs + second.logprobs,
        sampling_logprobs=first.sampling_logprobs + second.sampling_logprobs if both else (),
        finish=second.finish,
        spans=tuple(spans),
        routes=second.routes if second.ids else first.routes,  # of the whole history each time
    )


def _cut(generation: Generation, end: int) -> Generation:
    """The generation, stopped after its first `end` tokens."""
    spans = (replace(span, end=min(span.end, end)) for span in generation.spans if span.start < end)
    routes = generation.routes
    return replace(
        generation,
        ids=generation.ids[:end],
        logprobs=generation.logprobs[:end],
        sampling_logprobs=generation.sampling_logprobs[:end],
        spans=tuple(spans),
        routes=None if routes is None else routes.first(len(routes) - len(generation.ids) + end),
        finish="stop",
    )


class _Link(NamedTuple):
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore  # for generations; health checks, aborts and updates do not wait for them


async def retry_while_busy(call: Callable[[], Awaitable[Result]]) -> Result:
    """Make a call, and repeat it a few times, each after the server's Retry-After, while the server is busy."""
    for _ in range(BUSY_TRIES - 1):
        try:
            return await call()
        except ReplicaBusy as busy:
            await asyncio.sleep(min(max(busy.retry_after, POLL_SECONDS), BUSY_SECONDS))
    return await call()


def _headers(url: str, credentials: dict[str, str], token: dict[str, str]) -> dict[str, str]:
    """The authorization header: from the address or from the token, but not both."""
    if credentials and token:
        raise EngineError(
            f"{url} has a user and password in its address, and {TOKEN_VARIABLE} is set too; a request can carry only "
            "one of them, so remove one"
        )
    return credentials or token


def _require_aiohttp() -> None:
    if find_spec("aiohttp") is None:
        raise EngineError("rollout servers need aiohttp; run: pip install 'rally-rl[servers]'")


def _new_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    import aiohttp

    # `call` enforces the deadline, and `slots` the number of concurrent generations.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(),
        headers=headers | {"Content-Type": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _send(session: aiohttp.ClientSession, url: str, call: HttpCall) -> tuple[int, str, bytes]:
    """Status, Retry-After and body of the response."""
    method, body = ("GET", None) if call.body is None else ("POST", json.dumps(call.body).encode())
    async with session.request(method, url + call.path, data=body, allow_redirects=False) as response:
        return response.status, response.headers.get("Retry-After", ""), await response.read()


def _http_error(name: str, call: HttpCall, status: int, retry_after: str, content: bytes) -> RallyError:
    if status == 400 and (reason := _grammar_problem(content)):
        return GrammarError(reason)
    text = " ".join(content.decode(errors="replace").split())[:300]
    if status in (429, 503):
        return ReplicaBusy(f"{name} is overloaded ({status}: {text})", _seconds(retry_after))
    if status in CLIENT_ERRORS:
        return EngineError(f"{name} rejected {call.path} ({status}): {text}{_hint(call.path, status)}")
    return ReplicaGone(f"{name} failed at {call.path} ({status}): {text}")


def _grammar_problem(content: bytes) -> str:
    """What Rally's own server says of a grammar that it cannot apply; empty for any other error."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"]) if error["code"] == GRAMMAR_CODE else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _seconds(retry_after: str) -> float:
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 1.0


def _hint(path: str, status: int) -> str:
    if path.startswith("/inference/") and status in (403, 404):
        return "; start vLLM with --enable-scale-out, which enables the route for token ids"
    if status == 401:
        return f"; set {TOKEN_VARIABLE} to its token, or put the user and password of its proxy into its address"
    if status == 404 and path in QUESTIONS:
        return "; it is another kind of server than configured, or an older one"
    if status == 404:
        return "; start the server with its routes for weight updates (vLLM: VLLM_SERVER_DEV_MODE=1)"
    return ""
