"""Stop strings end a turn over servers at the same token, with the same reason, as in the embedded engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from fake_server import FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_model

from rally.engines import EmbeddedEngine, EngineError, EngineSettings
from rally.engines.base import first_stop
from rally.engines.remote import ClientSettings, ServerApi, ServerReplica, Sglang, Vllm
from rally.types import Generation, Routes, SamplingParams, Segment, WeightSpan

APIS: dict[str, ServerApi] = {"vllm": Vllm(), "sglang": Sglang()}
PROMPT = (5, 9, 13, 17)
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + i % 26) + chr(ord("A") + i // 26) for i in ids)


@pytest.fixture(params=APIS)
async def replica(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServerReplica]:
    monkeypatch.setattr("rally.engines.remote.client.STRING_TOKENS", 5)  # several parts
    async with FakeServer(request.param, model=make_model(seed=0), label="3") as fake:
        made = ServerReplica(fake.url, APIS[request.param], ClientSettings(decode=decode, max_model_len=64))
        made.version, made.serving = 3, True
        yield made
        await made.close()


async def test_a_server_and_the_embedded_engine_stop_alike(replica: ServerReplica) -> None:
    model = make_model(seed=0)
    engine = EmbeddedEngine(model, EngineSettings(max_model_len=64, max_num_seqs=4), num_pages=64, decode=decode)
    whole = await engine.generate(PROMPT, GREEDY)
    text = decode(whole.ids)
    strings = [(text[3:6],), (text[-3:],), (text[20:23], text[9:12]), ("not in it",), (text[0],)]
    stop_id = whole.ids[12]
    for params in [
        *(replace(GREEDY, stop=one) for one in strings),
        replace(GREEDY, stop=(text[40:44],), stop_ids=(stop_id,)),
        replace(GREEDY, stop=(text[3:6],), stop_ids=(stop_id,)),
    ]:
        mine, theirs = await engine.generate(PROMPT, params), await replica.generate(PROMPT, params)
        assert (theirs.ids, theirs.finish) == (mine.ids, mine.finish), params.stop
        assert theirs.logprobs == pytest.approx(mine.logprobs, abs=1e-4)
        assert theirs.spans[-1].end == len(theirs.ids) and len(theirs.spans) == 1
    await engine.close()


async def test_a_client_without_a_tokenizer_says_so(replica: ServerReplica) -> None:
    replica.settings = replace(replica.settings, decode=None)
    with pytest.raises(EngineError, match="stop strings need a tokenizer"):
        await replica.generate(PROMPT, replace(GREEDY, stop=("x",)))


def test_without_the_string_the_turn_has_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.engines.remote.client.STRING_TOKENS", 3)

    async def run() -> None:
        async with FakeServer("vllm", label="3") as fake:
            made = ServerReplica(fake.url, Vllm(), ClientSettings(decode=decode))
            made.version, made.serving = 3, True
            got = await made.generate([1, 2, 3], SamplingParams(max_tokens=7, stop=("never",)))
            assert len(got.ids) == 7 and got.finish == "length"
            await made.close()

    asyncio.run(run())


@pytest.mark.parametrize("stop", ["never", "eEfFgG"])
async def test_the_experts_are_those_of_all_computed_tokens(monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    """A turn that was sampled in parts, and one of which the last tokens were dropped."""
    monkeypatch.setattr("rally.engines.remote.client.STRING_TOKENS", 5)

    async def sample(self: ServerReplica, ids: Sequence[int], params: SamplingParams, *_: object) -> Generation:
        new = tuple(i % 26 * 27 for i in range(len(ids), len(ids) + params.max_tokens))  # aA, bB, cC, ...
        experts = np.arange(len(ids) + len(new) - 1, dtype="<i2")
        routes = Routes(experts.tobytes(), layers=1, experts=1)
        spans = (WeightSpan(3, 0, len(new)),)
        return Generation(ids=new, logprobs=(-1.0,) * len(new), finish="length", routes=routes, spans=spans)

    monkeypatch.setattr(ServerReplica, "_generate", sample)
    made = ServerReplica("http://127.0.0.1:1", Vllm(), ClientSettings(decode=decode))
    got = await made.generate(PROMPT, SamplingParams(max_tokens=12, stop=(stop,)))
    segment = Segment(prompt_ids=PROMPT).append_sampled(got)
    assert segment.routes is not None and len(segment.routes) == len(PROMPT) + len(got.ids) - 1
    assert np.frombuffer(segment.routes.data, "<i2").tolist() == list(range(len(segment.routes)))
    assert got.finish == ("length" if stop == "never" else "stop")
    await made.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=40), st.integers(0, 40), st.text("abAB", min_size=1, max_size=4))
def test_the_first_token_that_completes_a_string_is_found(ids: list[int], start: int, stop: str) -> None:
    """As the embedded engine finds it, which looks at each token in turn."""
    tail = 4 * len(stop) + 8
    each = [end for end in range(start + 1, len(ids) + 1) if stop in decode(ids[max(0, end - tail) : end])]
    assert first_stop(decode, ids, start, (stop,)) == (each[0] if each else None)
