"""Arbitrary and hostile requests: each is answered with 2xx or 4xx, and the engine samples as before afterwards."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import make_model

from rally.chat import tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.types import RallyError, SamplingParams

ASKED: dict[str, Any] = {"prompt_ids": [1, 2, 3], "sampling": {"max_tokens": 3, "seed": 1}}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
BODIES = {"/generate": ASKED, "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

HOSTILE: list[tuple[str, Any]] = [
    ("temperature", 1e-38),
    ("temperature", 1e-300),
    ("temperature", 1e300),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", -0.5),
    ("temperature", True),
    ("temperature", "1"),
    ("temperature", 10**400),
    ("top_p", 1e-300),
    ("top_p", 0),
    ("top_p", 2),
    ("top_p", float("nan")),
    ("min_p", -1e-9),
    ("min_p", 1),
    ("top_k", 1e20),
    ("top_k", 10**20),
    ("top_k", 2.5),
    ("top_k", 0),
    ("top_k", True),
    ("max_tokens", 2.5),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 10**30),
    ("max_tokens", "3"),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", ["a"] * 65),
    ("stop", ["a" * 2000]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [97]),
    ("stop_token_ids", [2**40]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", list(range(90)) * 12),
    ("ignore_eos", 1),
    ("logit_bias", {"1": 5}),
    ("n", 10**9),
]


def served(engine: EmbeddedEngine) -> httpx.AsyncClient:
    app = create_app(Served(engine=engine, tokenizer=tiny_tokenizer(), name="tiny"))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


def small_engine() -> EmbeddedEngine:
    tokenizer = tiny_tokenizer()
    options = EngineSettings(max_model_len=64, max_num_seqs=4)
    return EmbeddedEngine(make_model(), options, num_pages=40, decode=lambda ids: str(tokenizer.decode(list(ids))))


Work = Callable[[httpx.AsyncClient], Awaitable[None]]
Run = Callable[[Work], None]


@pytest.fixture(scope="module")
def with_server() -> Iterator[Run]:
    """Runs work against one server, which must answer a fixed request the same before and after it."""
    engine = small_engine()
    with asyncio.Runner() as runner:
        http = served(engine)

        async def main(work: Work) -> None:
            before = (await http.post("/generate", json=ASKED)).json()
            await work(http)
            assert (await http.get("/health")).status_code == 200
            after = (await http.post("/generate", json=ASKED)).json()
            assert after["ids"] == before["ids"] and after["logprobs"] == pytest.approx(before["logprobs"], abs=1e-5)

        yield lambda work: runner.run(main(work))
        runner.run(engine.close())


async def answered(http: httpx.AsyncClient, path: str, content: bytes) -> int:
    response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert 200 <= response.status_code < 500, (path, content[:300], response.text[:300])
    if response.status_code >= 400:
        message = response.json()["error"]["message"]
        assert message and len(message) < 1000
    return response.status_code


@pytest.mark.drill("reliability", "A request with a hostile sampling parameter", "It is refused; the engine goes on")
def test_hostile_sampling_parameters_are_refused_at_every_endpoint(with_server: Run) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for name, value in HOSTILE:
            for path, body in BODIES.items():
                inner = {"sampling": {**body["sampling"], name: value}} if path == "/generate" else {name: value}
                content = json.dumps(body | inner).encode()
                assert await answered(http, path, content) == 400, (path, name, value)

    with_server(work)


async def test_the_embedded_engine_refuses_them_too() -> None:
    engine = small_engine()
    for name, value in HOSTILE[:41]:
        with pytest.raises(RallyError, match=name.replace("stop_token_ids", "stop_ids")):
            await engine.generate([1, 2], SamplingParams.of({"max_tokens": 2, name: value}))
    assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))).ids) == 2
    await engine.close()


def test_extreme_but_valid_parameters_are_honoured(with_server: Run) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        tried = [
            {"temperature": 1e-6, "top_p": 1e-30},
            {"temperature": 1e6, "min_p": 0.999999999999},
            {"top_k": 2**31 - 1, "seed": -(2**63)},
            {"top_p": 1e-37, "min_p": 1e-37, "top_k": 1, "seed": 2**63 - 1},
            {"temperature": None, "top_k": None, "stop": None, "seed": None},
        ]
        for sampling in tried:
            content = json.dumps({"prompt_ids": [1, 2, 3], "sampling": {"max_tokens": 3, **sampling}}).encode()
            assert await answered(http, "/generate", content) == 200, sampling

    with_server(work)


MALFORMED = [
    b"",
    b"null",
    b"[]",
    b'"',
    b"{" * 100_000,
    b"[" * 100_000,
    b'{"prompt_ids":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model":"tiny","messages":' + b'[{"role":"user","content":' * 150 + b"1",
    b"\xff\xfe{}",
    b'{"model":"tiny","prompt":"\\ud800"}',
    b'{"model":"tiny","messages":[{"role":"user","content":"\\udfff"}]}',
    b'{"model":"tiny","prompt":' + b"9" * 5000 + b"}",
    b'{"model":"tiny","prompt":[' + b"9" * 5000 + b"]}",
    b'{"model":"tiny","prompt":[],"prompt":[1],"seed":NaN}',
    b'{"prompt_ids":[-1]}',
    b'{"prompt_ids":[1e3]}',
    b'{"prompt_ids":[true]}',
    b'{"prompt_ids":[1],"sampling":[]}',
    b'{"prompt_ids":[1],"sampling":{"max_tokens":2,"max_new_tokens":3}}',
    b'{"model":"tiny","prompt":[""],"n":128}',
    b'{"model":"tiny","prompt":[[1],[97]]}',
    b'{"model":"tiny","messages":[{"role":"user","content":[5]}]}',
    b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}',
    b'{"model":"tiny","messages":[{"role":"assistant","tool_calls":5}]}',
    b'{"model":"tiny","messages":[{"role":"assistant","tool_calls":[{"function":[]}]}]}',
    b'{"model":"tiny","messages":[{"content":"hi"}]}',
    b'{"model":"tiny","messages":[{"role":5,"content":"hi"}]}',
    b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":5}}]}',
    b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":[5]}',
    b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":2,"max_completion_tokens":3}',
]


def test_malformed_bodies_are_refused_at_every_endpoint(with_server: Run) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for content in MALFORMED:
            for path in BODIES:
                assert await answered(http, path, content) >= 400, (path, content[:100])

    with_server(work)


def test_more_generations_than_the_server_holds_are_refused_before_any_starts(with_server: Run) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        body = COMPLETION | {"prompt": [[1], [2]] * 64, "n": 128}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400 and "asks for 16384 generations" in response.json()["error"]["message"]

    with_server(work)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 130),
    st.floats(allow_nan=True),
    st.sampled_from([1e-38, 1e-45, 2.5, 1e20, 2**31, 2**63, 2**64, "", "tiny", "user", "tool", "text"]),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)
SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "n"]
OTHERS = ["stream", "stream_options", "return_token_ids", "logprobs", "top_logprobs", "logit_bias", "tools", "model"]
CONTENT = ["tool_choice", "response_format", "prompt", "messages", "prompt_ids", "sampling", "user", "echo", "stop_ids"]
KEYS = st.sampled_from([*SAMPLING, *OTHERS, *CONTENT, "max_completion_tokens"])


@settings(suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(st.tuples(st.sampled_from(sorted(BODIES)), st.dictionaries(KEYS, VALUES, max_size=4)), max_size=3)
)
@pytest.mark.drill("reliability", "Arbitrary JSON at every endpoint", "2xx or 4xx; the engine samples as before")
def test_arbitrary_json_never_harms_the_engine(with_server: Run, requests: list[tuple[str, dict[str, Any]]]) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for path, change in requests:
            body = BODIES[path] | change
            if path == "/generate":
                inner = {k: v for k, v in change.items() if k not in ("prompt_ids", "sampling")}
                body = ASKED | {"sampling": ASKED["sampling"] | inner} if inner else body
            await answered(http, path, json.dumps(body).encode())

    with_server(work)
