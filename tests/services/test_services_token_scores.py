"""`echo`, `logprobs` and `top_logprobs` of completions against transformers' own forward."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from small_models import full_logprobs
from transformers import Qwen2Config, Qwen2ForCausalLM

from rally.chat import tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.services.token_scores import token_offsets

TOKENIZER = tiny_tokenizer()
TEXT = "What is 12*3? It is<|im_end|> 36"
IDS: list[int] = TOKENIZER.encode(TEXT)


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=len(TOKENIZER), num_key_value_heads=2, initializer_range=0.1, **sizes)
    model = Qwen2ForCausalLM(config).eval()
    made = EmbeddedEngine(model, EngineSettings(max_model_len=256, max_num_seqs=2), num_pages=64)
    yield made
    await made.close()


@pytest.fixture
async def http(engine: EmbeddedEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Served(engine=engine, tokenizer=TOKENIZER, name="tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield client


async def asked(http: httpx.AsyncClient, path: str = "completions", status: int = 200, **fields: Any) -> Any:
    answer = await http.post(f"/v1/{path}", json={"model": "tiny", **fields})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]["message"]


def best(engine: EmbeddedEngine, ids: list[int], at: int, temperature: float = 1.0) -> list[tuple[float, int]]:
    with torch.no_grad():
        logits = engine.core.model(input_ids=torch.tensor([ids[:at]])).logits[0, -1].float() / temperature
    values, indices = torch.log_softmax(logits, -1).topk(3)
    return list(zip(values.tolist(), indices.tolist(), strict=True))


async def test_an_echoed_prompt_has_the_logprobs_of_a_full_forward(
    engine: EmbeddedEngine, http: httpx.AsyncClient
) -> None:
    expected = full_logprobs(engine.core.model, IDS, 1)
    for prompt in (TEXT, IDS, [TEXT, TEXT[:8]], [IDS, IDS[:4]]):
        for limit in (0, 1):
            answer = await asked(http, prompt=prompt, echo=True, logprobs=1, max_tokens=limit, temperature=0)
            choice, found = answer["choices"][0], answer["choices"][0]["logprobs"]
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert found["token_logprobs"][1 : len(IDS)] == pytest.approx(expected, abs=1e-4)
            assert {len(found[name]) for name in found} == {len(IDS) + limit}
            assert choice["text"].startswith(TEXT) and answer["usage"]["completion_tokens"] == limit * len(
                answer["choices"]
            )
            for at in (1, 5, len(IDS) - 1):
                ((value, token), *_) = best(engine, IDS, at)
                assert max(found["top_logprobs"][at].values()) == pytest.approx(value, abs=1e-4)
                assert TOKENIZER.decode([token]) in found["top_logprobs"][at]
            ends = [*found["text_offset"][1:], len(choice["text"])]
            pieces = [choice["text"][a:b] for a, b in zip(found["text_offset"], ends, strict=True)]
            assert pieces[: len(IDS)] == found["tokens"][: len(IDS)]


async def test_prompts_at_temperature_1_and_samples_at_their_own(
    engine: EmbeddedEngine, http: httpx.AsyncClient
) -> None:
    options = {"prompt": IDS, "max_tokens": 6, "temperature": 0.5, "seed": 4, "ignore_eos": True}
    answer = await asked(http, echo=True, logprobs=2, return_token_ids=True, **options)
    (choice,) = answer["choices"]
    whole = IDS + choice["token_ids"]
    found = choice["logprobs"]["token_logprobs"]
    assert found[1 : len(IDS)] == pytest.approx(full_logprobs(engine.core.model, IDS, 1), abs=1e-4)
    assert found[len(IDS) :] == pytest.approx(full_logprobs(engine.core.model, whole, len(IDS), 0.5), abs=1e-4)
    tops = choice["logprobs"]["top_logprobs"]
    assert max(tops[-1].values()) == pytest.approx(best(engine, whole, len(whole) - 1, 0.5)[0][0], abs=1e-4)
    assert max(tops[3].values()) == pytest.approx(best(engine, whole, 3)[0][0], abs=1e-4)
    assert all(2 <= len(one) <= 3 for one in tops[1:]), "the likeliest two, and the token itself"
    plain = await asked(http, logprobs=0, return_token_ids=True, **options)
    assert plain["choices"][0]["token_ids"] == choice["token_ids"]
    assert plain["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(found[len(IDS) :], abs=1e-5)


async def test_alternatives_of_a_chat(engine: EmbeddedEngine, http: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1, "return_token_ids": True}
    answer = await asked(http, "chat/completions", logprobs=True, top_logprobs=3, **chat)
    (choice,) = answer["choices"]
    whole = answer["prompt_token_ids"] + choice["token_ids"]
    for at, entry in enumerate(choice["logprobs"]["content"], len(answer["prompt_token_ids"])):
        expected = best(engine, whole, at)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx([v for v, _ in expected], abs=1e-4)
        assert [one["token"] for one in entry["top_logprobs"]] == [TOKENIZER.decode([i]) for _, i in expected]


async def test_what_cannot_be_scored_is_refused_in_a_sentence(http: httpx.AsyncClient) -> None:
    ask = {"prompt": IDS, "max_tokens": 1}
    assert "ask for 0 to 20" in await asked(http, status=400, **ask, logprobs=21)
    assert "ask for 0 to 20" in await asked(http, status=400, **ask, logprobs=-1)
    assert "leave stream out" in await asked(http, status=400, **ask, logprobs=1, stream=True)
    assert "leave stream out" in await asked(http, status=400, **ask, echo=True, stream=True)
    assert "max_tokens" in await asked(http, status=400, prompt=IDS, max_tokens=0)
    assert "max_tokens" in await asked(http, status=400, prompt=IDS, max_tokens=-1, echo=True)
    assert "an empty prompt" in await asked(http, status=400, prompt="", max_tokens=0, echo=True)
    assert "vocabulary" in await asked(http, status=400, prompt=[5, 99999], max_tokens=0, echo=True, logprobs=1)
    for fields in ({"max_tokens": 999}, {"prompt": [5] * 300}, {"prompt": [5] * 300, "echo": True, "logprobs": 1}):
        body = {"model": "tiny", **ask, "max_tokens": 0 if "echo" in fields else 1} | fields
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert "logprobs=true" in await asked(http, "chat/completions", 400, **chat, top_logprobs=2)
    assert "leave stream out" in await asked(
        http, "chat/completions", 400, **chat, logprobs=True, top_logprobs=2, stream=True
    )


def test_offsets_of_tokens_that_are_parts_of_a_character() -> None:
    parts = {1: "a", 2: None, 3: None, 4: "b"}

    def decode(ids: Any) -> str:
        text, half = "", 0
        for i in ids:
            half = half + 1 if parts[i] is None else 0
            text += {1: "", 2: "é"}[half] if half else str(parts[i])
        return text + ("\ufffd" if half == 1 else "")

    assert token_offsets([1, 2, 3, 4, 1], decode) == [0, 1, 1, 2, 3]
