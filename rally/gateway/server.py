"""The HTTP server with OpenAI's and Anthropic's endpoints for the agents of this process.

    POST /v1/chat/completions, /v1/responses, GET /v1/models     as in OpenAI's API
    POST /v1/messages, /v1/messages/count_tokens                 as in Anthropic's API
    GET, POST /v1/episode                         the row; the result of an agent in a process of its own
    POST /v1/episode/credit                       the reward of a call, or that it is not trained on
    POST /v1/workers/claim, beat, report          for agent workers, with the run's token (worker_pool.py)

The API key of an episode gives access to that episode only. An unknown key is answered with 401, the key of an ended
episode with 410. One server, in its own thread, serves all episodes of the process.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rally.gateway.agent_runner import MODEL, AgentClient, AgentThread
from rally.gateway.credit import Credit
from rally.gateway.session import GatewaySession, ended
from rally.gateway.worker_pool import WorkerPool
from rally.loops import LoopError
from rally.rewards.score import plain
from rally.services.admission import Refused, unless_gone
from rally.services.anthropic_api import Messages
from rally.services.api_translation import NO_CACHE, StreamPart, begun, is_whole
from rally.services.http_guard import MEBIBYTE, Guard, HttpLimits, uvicorn_options
from rally.services.http_server import GRACE_SECONDS
from rally.services.openai_api import event
from rally.services.openai_errors import HANDLERS, error_body
from rally.services.openai_requests import ChatRequest
from rally.services.openai_responses import Json, StreamBegin
from rally.services.responses_api import Responses
from rally.types import Message, RallyError

PREFIX = "rally-"
MAX_BODY = 32 * MEBIBYTE
KEEP_ALIVE = 600  # seconds; a connection closed during a slow tool call would fail the agent's next request


class EpisodeKeys:
    """Signed API keys. The key of an ended episode is still recognized without being stored."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def make(self) -> str:
        name = secrets.token_hex(8)
        return f"{PREFIX}{name}-{self._sign(name)}"

    def is_valid(self, key: str) -> bool:
        name, _, signature = key.removeprefix(PREFIX).partition("-")
        return key.isascii() and hmac.compare_digest(self._sign(name), signature)

    def _sign(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()


class Gateway:
    """The sessions by API key, the server in front of them, and the thread that their agents share."""

    def __init__(self, host: str, port: int) -> None:
        self._keys, self._sessions = EpisodeKeys(), dict[str, GatewaySession]()
        self._agents: AgentThread | None = None
        self._socket = _listen(host, port)
        self.base_url = f"http://{_in_url(host)}:{self._socket.getsockname()[1]}/v1"
        self.workers = WorkerPool(self.base_url)
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            *Responses(self).routes,
            *Messages(self).routes,
            Route("/v1/episode", self._episode, methods=["GET", "POST"]),
            Route("/v1/episode/credit", self._credit, methods=["POST"]),
            *self.workers.routes,
        ]
        limits = HttpLimits(max_body=MAX_BODY, keep_alive_seconds=KEEP_ALIVE)
        # Any host name: every request carries the key of its episode, which no web page knows.
        app = Guard(Starlette(routes=routes, exception_handlers=HANDLERS), None, limits)
        options = {"lifespan": "off", "timeout_graceful_shutdown": GRACE_SECONDS, **uvicorn_options(limits)}
        config = uvicorn.Config(app, log_level="warning", **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="rally-gateway", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def agents(self) -> AgentThread:
        if self._agents is None:
            self._agents = AgentThread()
        return self._agents

    def leave(self, agents: AgentThread) -> None:
        """Stop using a thread that an agent blocks. Agents started from now on get a new one."""
        if self._agents is agents:
            self._agents = None

    def open(self, session: GatewaySession, episode_id: str) -> AgentClient:
        """A client with an address and key for the session."""
        key = self._keys.make()
        self._sessions[key] = session
        return AgentClient(base_url=self.base_url, api_key=key, episode_id=episode_id, _credits=session.credits)

    def close_session(self, client: AgentClient) -> None:
        self._sessions.pop(client.api_key).close()

    def close(self) -> None:
        """Answer the workers that wait for an episode, and end the server."""
        self._server.should_exit = True
        self.workers.close()
        self._thread.join(timeout=5)

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        chat = ChatRequest.model_validate_json(await request.body())
        if not chat.stream:
            return JSONResponse(await unless_gone(request, session.ask(chat)))
        usage = chat.stream_options is not None and chat.stream_options.include_usage
        events = _events(await begun(request, session.stream(chat)), usage)
        return StreamingResponse(events, media_type="text/event-stream", headers=NO_CACHE)

    async def _models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse({"object": "list", "data": [_model(MODEL)]})

    async def _model(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse(_model(request.path_params["name"]))  # any name is accepted

    def admit(self, request: Request) -> None:
        self._session(request)

    async def complete(self, request: Request, chat: ChatRequest) -> Json:
        return await self._session(request).ask(chat)

    def stream(self, request: Request, chat: ChatRequest) -> AsyncGenerator[StreamPart, None]:
        return self._session(request).stream(chat)

    async def count_tokens(self, request: Request, chat: ChatRequest) -> int:
        return self._session(request).count_tokens(chat)

    def stored_responses(self, request: Request) -> dict[str, list[Message]]:
        return self._session(request).responses

    async def _episode(self, request: Request) -> Response:
        session = self._session(request)
        if request.method == "POST":
            session.reported = await _json(request)
            return JSONResponse({"reported": True})
        return JSONResponse({"task": plain(session.row)})

    async def _credit(self, request: Request) -> Response:
        session = self._session(request)
        session.credits.add(Credit.of(await _json(request)))
        return JSONResponse({"credited": True})

    def _session(self, request: Request) -> GatewaySession:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = key or request.headers.get("x-api-key", "")  # as Anthropic's clients send it
        session = self._sessions.get(key)
        if session is not None:
            return session
        if self._keys.is_valid(key):
            raise ended()
        problem = "this API key belongs to no episode; use the api_key of the client that the agent was called with"
        raise Refused(401, problem, code="invalid_api_key")


async def _json(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError):
        raise Refused(400, "the body must be JSON, and not nested too deeply") from None


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rally"}


@lru_cache
def gateway_at(host: str, port: int) -> Gateway:
    """The gateway of this process at an address, started on first use."""
    gateway = Gateway(host, port)
    _addresses.add((host, port))
    return gateway


_addresses: set[tuple[str, int]] = set()
"""Those that gateways of this process listen at."""


def check_address(host: str, port: int) -> None:
    """LoopError, before a run loads weights, if no gateway could listen there."""
    if (host, port) not in _addresses:
        _listen(host, port).close()


async def _events(parts: AsyncGenerator[StreamPart, None], usage: bool) -> AsyncIterator[bytes]:
    """The chunks of a stream as events, and its usage at the end if it is asked for."""
    try:
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, StreamBegin):
                    continue
                if not is_whole(part):
                    yield event(part)
                elif usage:
                    head = {**{key: part[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}
                    yield event({**head, "choices": [], "usage": part["usage"]})
        yield b"data: [DONE]\n\n"
    except RallyError as error:  # the status has been sent already, so the error goes into the stream
        yield event(error_body(error))


def _listen(host: str, port: int) -> socket.socket:
    try:
        address = ip_address(host)
    except ValueError:
        raise LoopError(f"agent_loop_config.host={host} is not an IP address; give one of this machine's") from None
    if address.is_unspecified:
        problem = f"agents cannot connect to {host}; set agent_loop_config.host to an address of this machine"
        raise LoopError(problem)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise LoopError(
            f"the gateway cannot listen at {host}:{port} ({error}); choose another address or port"
        ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
