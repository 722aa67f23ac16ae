"""The engine's HTTP app in process, where a step can be held up: authorization, admission, errors of a broken
engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from small_models import make_model

from rally.chat import tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.engines.remote import Rally
from rally.engines.remote.server_api import GenerationRequest
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.types import SamplingParams

REQUEST: dict[str, Any] = {"prompt_ids": [1, 2, 3], "sampling": {"max_tokens": 3, "seed": 1}}


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(make_model(), EngineSettings(max_model_len=128), num_pages=100)
    yield made
    await made.close()


def client(engine: EmbeddedEngine, token: str | None = None, **how: Any) -> httpx.AsyncClient:
    app = create_app(Served(engine=engine, tokenizer=tiny_tokenizer(), name="tiny", **how), token)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


async def test_only_who_knows_the_token_is_served(engine: EmbeddedEngine) -> None:
    async with client(engine, token="geheim") as http:
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer "}):
            refused = await http.post("/generate", json=REQUEST, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.json()["error"]["type"] == "authentication_error"
            assert (await http.get("/metrics", headers=headers)).status_code == 401
        known = {"Authorization": "Bearer geheim"}
        assert (await http.post("/generate", json=REQUEST, headers=known)).status_code == 200
        assert (await http.get("/health")).status_code == 200, "whether it lives, anybody may ask"


async def test_a_rollout_server_of_our_own_is_understood_whole(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLY_ENGINE_TOKEN", "schlüssel ☂")  # headers with any characters must work
    params = SamplingParams(max_tokens=3, top_p=0.5, seed=1)
    asked = GenerationRequest(id="a", prompt_ids=(1, 2, 3), params=params, before=0, after=0, salt="")
    async with client(engine, token="schlüssel ☂") as http:
        call = Rally().generate(asked)
        headers = {name: value.encode() for name, value in Rally().headers().items()}  # as our client sends them
        answered = await http.post(call.path, json=call.body, headers=headers)
    generation, here = Rally().generation(answered.json(), asked), await engine.generate([1, 2, 3], params)
    assert (generation.ids, generation.spans) == (here.ids, here.spans)
    assert generation.sampling_logprobs == pytest.approx(here.sampling_logprobs) != generation.logprobs
    assert generation.first_token_seconds > 0 and generation.queued_seconds == answered.json()["queued_seconds"] > 0


async def test_more_than_it_may_hold_are_told_to_come_later(engine: EmbeddedEngine) -> None:
    opened, step = threading.Event(), engine.core.step

    def held() -> Any:
        assert opened.wait(20)
        return step()

    engine.core.step = held  # type: ignore[method-assign]
    async with client(engine, max_requests=2) as http:
        taken = [asyncio.create_task(http.post("/generate", json=REQUEST)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await http.post("/generate", json=REQUEST)
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        opened.set()
        assert [(await task).status_code for task in taken] == [200, 200]
        assert 'rally_engine_ended_requests_total{end="busy"} 1' in (await http.get("/metrics")).text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_ids": []}, "an empty prompt"),
        ({"prompt_ids": ["a"]}, "prompt_ids.0"),
        ({"sampling": {"temperatur": 1}}, "unknown sampling parameter temperatur"),
        ({"session": "x"}, "session"),  # nothing would read it
    ],
)
async def test_a_faulty_request_is_refused_in_words(engine: EmbeddedEngine, change: dict[str, Any], words: str) -> None:
    async with client(engine) as http:
        refused = await http.post("/generate", json=REQUEST | change)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]


async def test_a_request_that_an_update_aborts_may_be_asked_again_and_is_not_counted_as_answered() -> None:
    settings = EngineSettings(max_model_len=512, max_num_seqs=2, in_flight="abort")
    engine = EmbeddedEngine(make_model(), settings)
    async with client(engine) as http:
        long = REQUEST | {"sampling": {"max_tokens": 400, "ignore_eos": True}}
        asked = asyncio.create_task(http.post("/generate", json=long))
        while engine.core.steps < 3:
            await asyncio.sleep(0.001)
        with engine.updating():
            pass
        refused = await asked
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert "new weights" in refused.json()["error"]["message"]
        told = (await http.get("/metrics")).text
        assert 'ended_requests_total{end="abort"} 1' in told
        assert "rally_engine_prompt_tokens_total 0" in told and "rally_engine_sampled_tokens_total 0" in told
    await engine.close()


async def test_a_broken_engine_is_no_mistake_of_the_caller(engine: EmbeddedEngine) -> None:
    def broken() -> Any:
        raise RuntimeError("out of memory")

    engine.core.step = broken  # type: ignore[method-assign]
    async with client(engine) as http:
        for _ in range(2):
            failed = await http.post("/generate", json=REQUEST)
            assert failed.status_code == 500 and "out of memory" in failed.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 500


async def test_stop_strings_of_a_run_end_a_turn_of_our_own_server() -> None:
    """A `rally serve engine` server has a tokenizer, so it stops itself, at the token of the embedded engine."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    engine = EmbeddedEngine(make_model(), EngineSettings(max_model_len=128), num_pages=100, decode=decode)
    whole = await engine.generate([1, 2, 3], SamplingParams(max_tokens=6, temperature=0))
    params = SamplingParams(max_tokens=6, temperature=0, stop=(f"<{whole.ids[2]}>",))
    asked = GenerationRequest(id="a", prompt_ids=(1, 2, 3), params=params, before=0, after=0, salt="")
    async with client(engine) as http:
        call = Rally().generate(asked)
        answered = await http.post(call.path, json=call.body)
    generation, here = Rally().generation(answered.json(), asked), await engine.generate([1, 2, 3], params)
    await engine.close()
    assert Rally().stops_at_strings and generation.finish == here.finish == "stop"
    assert generation.ids == here.ids == whole.ids[: whole.ids.index(whole.ids[2]) + 1]


async def test_a_model_without_a_chat_template_still_completes(engine: EmbeddedEngine) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    app = create_app(Served(engine=engine, tokenizer=tokenizer, name="tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        refused = await http.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 400 and "no chat template" in refused.json()["error"]["message"]
        completed = await http.post("/v1/completions", json={"model": "tiny", "prompt": [5, 6]})
        assert completed.json()["usage"]["completion_tokens"] == 16


async def test_a_field_that_is_null_was_not_said(engine: EmbeddedEngine) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    unsaid = dict.fromkeys(("n", "stream", "tools", "tool_choice", "ignore_eos", "stop_token_ids", "logit_bias"))
    async with client(engine) as http:
        short, long = [await http.post("/v1/chat/completions", json=body) for body in (asked, asked | unsaid)]
    assert short.status_code == long.status_code == 200
    assert short.json()["choices"] == long.json()["choices"]
