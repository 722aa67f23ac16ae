"""Arbitrary requests to the sandbox, retrieval and gateway servers: each is answered with 2xx or 4xx, never 500."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search_cases import write_corpus

from rally.gateway.server import Gateway
from rally.retrieval import IndexSpec, build_index, open_index
from rally.sandbox import Sandbox
from rally.services import retrieval, sandbox
from rally.services.http_guard import Guard, HostNames, HttpLimits

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 1e300, "", "python", "\0", "a\0b", "../x", "/etc/passwd", "\ud800"]),
    st.text(max_size=6),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
MALFORMED = [b"", b"null", b"[]", b"{" * 50_000, b"[" * 50_000, b"\xff", b'{"code":"\\ud800","language":"python"}']
EXAMPLES = settings(suppress_health_check=list(HealthCheck))


class Service:
    """An application behind the guard, in one event loop."""

    def __init__(self, app: Any, runner: asyncio.Runner) -> None:
        transport = httpx.ASGITransport(Guard(app, HostNames.of("127.0.0.1"), HttpLimits()), raise_app_exceptions=False)
        self._http, self._runner = httpx.AsyncClient(transport=transport, base_url="http://localhost"), runner

    def post(self, path: str, content: bytes) -> httpx.Response:
        asked = self._http.post(path, content=content, headers={"Content-Type": "application/json"}, timeout=60)
        answer = self._runner.run(asked)
        assert 200 <= answer.status_code < 500, (content[:300], answer.text[:300])
        return answer


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandboxed(runner: asyncio.Runner) -> Iterator[Service]:
    running = Sandbox()
    runner.run(running.__aenter__())
    yield Service(sandbox.create_app(running), runner)
    runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def searched(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder: Path = tmp_path_factory.mktemp("fuzzed")
    build_index(write_corpus(folder / "corpus.jsonl"), folder / "index", IndexSpec())
    return Service(retrieval.create_app(open_index(folder / "index")), runner)


RUN = {"code": "print(1)", "language": "python", "run_timeout": 5}
RUN_KEYS = ["code", "language", "compile_timeout", "run_timeout", "memory_limit_MB", "stdin", "files", "fetch_files"]


@EXAMPLES
@given(change=st.dictionaries(st.sampled_from([*RUN_KEYS, "args"]), VALUES, max_size=3))
def test_the_sandbox_survives_arbitrary_json(sandboxed: Service, change: dict[str, Any]) -> None:
    body = RUN | change
    timeouts = [body.get(key, 1) for key in ("run_timeout", "compile_timeout")]
    if any(isinstance(t, (int, float)) and t > 5 for t in timeouts):
        body |= {"run_timeout": 5, "compile_timeout": 5}
    sandboxed.post("/run_code", json.dumps(body).encode())


def test_the_sandbox_and_retrieval_refuse_what_is_malformed(sandboxed: Service, searched: Service) -> None:
    for content in MALFORMED:
        assert sandboxed.post("/run_code", content).status_code == 422
        assert searched.post("/retrieve", content).status_code == 422
    for change in ({"memory_limit_MB": 2**70}, {"run_timeout": 1e300}, {"run_timeout": float("nan")}, {"args": "x"}):
        assert sandboxed.post("/run_code", json.dumps(RUN | change).encode()).status_code in (400, 422)
    ok = sandboxed.post("/run_code", json.dumps(RUN).encode()).json()
    assert (ok["status"], ok["run_result"]["stdout"]) == ("Success", "1\n")
    large = {"queries": ["a"] * 8000, "topk": 1000}
    assert "more than 200000 hits" in searched.post("/retrieve", json.dumps(large).encode()).text
    assert searched.post("/retrieve", json.dumps({"queries": ["a"] * 9000}).encode()).status_code == 422


QUERIES = st.lists(st.text(max_size=20) | st.sampled_from(['"', "a AND", "(", "a:b", "*", "~", "\\", "[a TO", "+-"]))


@EXAMPLES
@given(queries=QUERIES | VALUES, change=st.dictionaries(st.sampled_from(["topk", "return_scores", "x"]), VALUES))
def test_retrieval_survives_arbitrary_json(searched: Service, queries: Any, change: dict[str, Any]) -> None:
    searched.post("/retrieve", json.dumps({"queries": queries} | change).encode())


def test_the_gateway_asks_for_the_key_before_it_reads_anything() -> None:
    gateway = Gateway("127.0.0.1", 0)
    try:
        with httpx.Client(base_url=gateway.base_url) as http:
            for content in MALFORMED:
                kind = {"Content-Type": "application/json", "Authorization": "Bearer guess"}
                assert http.post("/chat/completions", content=content, headers=kind).status_code == 401
            assert (
                http.post("/chat/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
            )
            assert http.get("/models", headers={"Origin": "http://evil.example"}).status_code == 403
    finally:
        gateway.close()
