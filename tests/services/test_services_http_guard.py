"""Attacks on the HTTP servers over real sockets: foreign hosts and origins, large and slow bodies, half-open
connections, garbage. Ordinary clients must keep working."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from small_models import make_model

from rally.chat import tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.sandbox import Outcome, Program, Sandbox
from rally.services import sandbox as sandbox_service
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.services.http_guard import Guard, HostNames, HttpLimits, uvicorn_options

LIMITS = HttpLimits(max_body=100_000, max_head=8192, head_seconds=0.5, body_seconds=0.8, max_connections=60)
BODY = json.dumps({"prompt_ids": [1, 2, 3], "sampling": {"max_tokens": 2, "seed": 1}}).encode()
JSON = "Content-Type: application/json"


class NoSandbox(Sandbox):
    """Answers without running anything."""

    async def __aenter__(self) -> "NoSandbox":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, program: Program) -> Outcome:
        raise AssertionError("a request got through")


@contextlib.contextmanager
def serving(app: Any, limits: HttpLimits = LIMITS, names: tuple[str, ...] = ()) -> Iterator[int]:
    """The application behind the guard on a free port, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    guard = Guard(app, HostNames.of("127.0.0.1", names), limits)
    server = uvicorn.Server(uvicorn.Config(guard, log_level="critical", **uvicorn_options(limits)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(20)
    listener.close()


def engine_app() -> Any:
    engine = EmbeddedEngine(make_model(), EngineSettings(max_model_len=64, max_num_seqs=4), num_pages=40)
    return create_app(Served(engine=engine, tokenizer=tiny_tokenizer(), name="tiny"))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(engine_app(), names=("engine.internal",)) as port:
        yield port


def raw(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send bytes, and read until the server closes the connection or has answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                link.sendall(piece)
            time.sleep(pause)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := link.recv(65536):
                answer += chunk
        return answer


def request(body: bytes = BODY, *headers: str, host: str = "127.0.0.1", path: str = "/generate") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Connection: close", *(headers or (JSON,))]
    if not any("Transfer-Encoding" in line for line in lines):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1."), answer[:80]
    return int(answer.split()[1])


def alive(port: int) -> None:
    assert httpx.post(
        f"http://127.0.0.1:{port}/generate", content=BODY, headers={"Content-Type": "application/json"}
    ).json()["ids"]


@pytest.mark.drill("security", "A web page that points its name at a server", "403: the server does not answer as it")
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", 200),
        ("localhost:8100", 200),
        ("LOCALHOST", 200),
        ("[::1]:99", 200),
        ("127.1.2.3", 200),
        ("engine.internal:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.7", 403),
        ("evil.example:127.0.0.1", 403),
        ("", 403),
    ],
)
def test_only_known_host_names_are_served(port: int, host: str, expected: int) -> None:
    assert status(raw(port, request(host=host))) == expected


def test_a_request_has_one_host(port: int) -> None:
    assert status(raw(port, request(BODY, JSON, "Host: localhost"))) == 400
    assert status(raw(port, b"GET /health HTTP/1.0\r\n\r\n")) == 400


def test_names_and_addresses_of_a_server_that_others_reach() -> None:
    wild = HostNames.of("0.0.0.0", ["sandbox", "Box.Example."])
    assert all(map(wild.include, ("10.1.2.3", "sandbox", "box.example", "localhost", "::1", "fe80::1")))
    assert not wild.include("evil.example")
    bound = HostNames.of("10.0.0.7")
    assert bound.include("10.0.0.7") and not bound.include("10.0.0.8") and not bound.include("sandbox")


@pytest.mark.drill("security", "A web page of another origin sends a request", "403, before its body is read")
def test_other_origins_are_refused(port: int) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "file://", "http://localhost", "http://["):
        assert status(raw(port, request(BODY, JSON, f"Origin: {origin}"))) == 403, origin
    assert status(raw(port, request(BODY, JSON, "Origin: http://127.0.0.1"))) == 200


@pytest.mark.drill("security", "A form of a web page posts to a server", "415: bodies must be declared as JSON")
def test_bodies_must_be_json(port: int) -> None:
    kinds = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", ""]
    for kind in kinds:
        assert status(raw(port, request(BODY, f"Content-Type: {kind}"))) == 415, kind
    assert status(raw(port, request(BODY, "X-Nothing: 1"))) == 415
    assert status(raw(port, request(BODY, JSON, "Content-Type: text/plain"))) == 415
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert status(raw(port, request(BODY, f"Content-Type: {kind}"))) == 200


@pytest.mark.drill("security", "A body of hundreds of megabytes", "413; it is not read")
def test_large_bodies_are_refused_declared_or_not(port: int) -> None:
    declared = request(b"", JSON).replace(b"Content-Length: 0", b"Content-Length: 400000000")
    assert status(raw(port, declared)) == 413
    endless = request(b"", JSON, "Transfer-Encoding: chunked") + (b"1000\r\n" + b" " * 4096 + b"\r\n") * 40
    answer = raw(port, endless)
    assert status(answer) == 413 and b"larger than 0.0953674 MiB" in answer
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert status(raw(port, request(b"", JSON, "Transfer-Encoding: chunked") + chunks)) == 200


def test_large_headers_are_refused(port: int) -> None:
    assert status(raw(port, request(BODY, JSON, "X-Large: " + "a" * 9000))) == 431
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert status(raw(port, many, *[b"X: " + b"a" * 4000 + b"\r\n"] * 4, pause=0.02)) == 431


@pytest.mark.drill("security", "Hundreds of half-open connections", "Closed after head_seconds; others are served")
def test_half_open_connections_end_and_do_not_keep_others_out(port: int) -> None:
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(200)]
        for number, link in enumerate(links):
            with contextlib.suppress(ConnectionError):
                link.sendall((b"", b"POST /generate HTTP/1.1\r\nHo", request(b"", JSON)[:-4])[number % 3])
        for link in links:
            answer = b""
            with contextlib.suppress(ConnectionError):
                while chunk := link.recv(4096):
                    answer += chunk
            assert answer == b"" or status(answer) in (408, 503)
    alive(port)


@pytest.mark.drill("security", "A client that sends a byte at a time", "408 or a closed connection, for head and body")
def test_slow_heads_and_bodies_end(port: int) -> None:
    def drip(first: bytes, rest: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
            link.sendall(first)
            until = time.monotonic() + 25
            with pytest.raises((ConnectionError, AssertionError)):
                while time.monotonic() < until:
                    link.sendall(rest)
                    time.sleep(0.1)
                    link.settimeout(0.001)
                    with contextlib.suppress(TimeoutError):
                        assert link.recv(4096) == b"not closed", "it answered or closed"
                    link.settimeout(30)
            assert time.monotonic() < until, "it was never closed"

    drip(b"POST /generate HTTP/1.1\r\nHost: localhost\r\n", b"X")
    slow = request(b"", JSON).replace(b"Content-Length: 0", b"Content-Length: 5000")
    drip(slow, b" ")
    drip(slow.replace(b"/generate", b"/nothing"), b" ")  # answered at once; the rest of the body must not hold it
    alive(port)


@pytest.mark.drill("security", "Endless trailers, or a second head beside a request", "The connection is closed")
@pytest.mark.parametrize("piece", [b"X: " + b"y" * 4000 + b"\r\n", b"y" * 4096], ids=["many headers", "one header"])
@pytest.mark.parametrize("kind", ["trailers", "second head", "chunk extension"])
def test_what_belongs_to_no_body_is_bounded_while_a_request_runs(piece: bytes, kind: str) -> None:
    release = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        while not release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    chunked = request(b"", JSON, "Transfer-Encoding: chunked") + b"1\r\n5\r\n"
    first = {
        "trailers": chunked + b"0\r\nT: ",
        "chunk extension": chunked + b"1;a=",
        "second head": request().replace(b"close", b"keep-alive") + b"POST / HTTP/1.1\r\nT: ",
    }[kind]
    limits = HttpLimits(max_body=100_000, max_head=8192, body_seconds=60.0)
    with serving(app, limits) as own, socket.create_connection(("127.0.0.1", own), timeout=30) as link:
        try:
            with pytest.raises(ConnectionError):
                link.sendall(first)
                for _ in range(5000):  # 20 MB
                    link.sendall(piece)
        finally:
            release.set()


def test_small_chunks_are_no_attack(port: int) -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 20_000) + b"0\r\n\r\n"
    assert status(raw(port, request(b"", JSON, "Transfer-Encoding: chunked") + body)) == 200


def test_garbage_and_pipelined_garbage_end_the_connection(port: int) -> None:
    keep = request().replace(b"Connection: close", b"Connection: keep-alive")
    for bad in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"NONSENSE " * 50,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0" * 99,
    ):
        answer = raw(port, bad + b"\r\n\r\n")
        assert answer == b"" or 400 <= status(answer) < 500, bad
        after = raw(port, keep + bad + b"\r\n\r\n")
        assert after == b"" or status(after) in (200, 400)
    for smuggled in ("Transfer-Encoding: chunked\r\nContent-Length: 5", "Content-Length: 5\r\nContent-Length: 6"):
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n{smuggled}\r\n\r\n0\r\n\r\n"
        assert 400 <= status(raw(port, head.encode() + b"GET /health HTTP/1.1\r\n\r\n")) < 500
    upgrade = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert status(raw(port, upgrade)) in (200, 400)
    alive(port)


async def test_ordinary_clients_go_on_over_kept_connections(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://localhost:{port}") as http:
        for _ in range(3):
            answers = await asyncio.gather(
                *(http.post("/generate", content=BODY, headers={"Content-Type": "application/json"}) for _ in range(20))
            )
            assert {answer.status_code for answer in answers} == {200}
            await asyncio.sleep(1.5 * LIMITS.head_seconds)  # an idle connection is not a half-open one


def test_every_server_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve`, which all commands use, puts the guard in front of the application."""
    from rally.services.http_server import serve

    taken: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: taken.update(options, app=app))
    serve(lambda: sandbox_service.create_app(NoSandbox()), "127.0.0.1", 0, allow_hosts=["box"], max_body_mb=1)
    assert taken["ws"] == "none" and "http" in taken
    asked = {"code": "print(1)", "language": "python"}

    async def ask(url: str, **how: Any) -> httpx.Response:
        transport = httpx.ASGITransport(taken["app"], raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=url) as http:
            return await http.post("/run_code", **how)

    for url, how, expected in (
        ("http://evil.example", {"json": asked}, 403),
        ("http://box:8080", {"json": asked, "headers": {"Origin": "http://evil.example"}}, 403),
        ("http://box:8080", {"content": json.dumps(asked), "headers": {"Content-Type": "text/plain"}}, 415),
        ("http://box:8080", {"json": {"code": "x" * 2_000_000, "language": "python"}}, 413),
        ("http://box:8080", {"json": {"code": 5}}, 422),
    ):
        answer = asyncio.run(ask(url, **how))
        assert answer.status_code == expected and answer.json()["detail"]
