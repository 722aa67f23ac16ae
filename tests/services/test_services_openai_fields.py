"""Fields of OpenAI's API that cannot be honoured are refused with a sentence, and tools are never dropped silently."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_cases import QUESTION, ROOT, TOOLS
from small_models import make_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rally.chat import ChatCodec, tiny_tokenizer
from rally.chat.grammars import Constraint
from rally.engines import EmbeddedEngine, EngineSettings
from rally.models.load import load_tokenizer
from rally.services.admission import SamplingAsk, Served
from rally.services.anthropic_api import message_of
from rally.services.engine import create_app
from rally.services.openai_api import left_out
from rally.services.openai_responses import CompletionResponse, ResponseOptions, chat_shape
from rally.services.responses_api import ResponsesRequest, response_of
from rally.types import Generation, SamplingParams

CHAT = {"model": "tiny", "messages": QUESTION, "max_tokens": 2}
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + TURNS
WHOLE = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + TURNS
ONLY_WITH_SYSTEM = "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}" + TURNS


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(make_model(), EngineSettings(max_model_len=1024, max_num_seqs=2), num_pages=128)
    made.core._vocabulary = 200  # the tokenizer has more tokens than the small model
    made.core.model.resize_token_embeddings(200)
    yield made
    await made.close()


def client(engine: EmbeddedEngine, template: str, **how: Any) -> httpx.AsyncClient:
    app = create_app(Served(engine=engine, tokenizer=tokenizer_with(template), name="tiny", **how))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


@pytest.mark.drill("reliability", "Tools for a chat template that drops them", "The request is refused with the reason")
async def test_tools_that_the_template_drops_are_refused(engine: EmbeddedEngine) -> None:
    for template, missing in ((TURNS, "the tool calculator"), (NAMES, "the parameter expression of the tool")):
        async with client(engine, template) as http:
            refused = await http.post("/v1/chat/completions", json=CHAT | {"tools": TOOLS})
            error = refused.json()["error"]
            assert refused.status_code == 400 and f"leaves out {missing}" in error["message"]
            assert error["param"] == "tools" and "--chat-template FILE" in error["message"]
            for fine in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
                assert (await http.post("/v1/chat/completions", json=CHAT | fine)).status_code == 200
        async with client(engine, template, hidden_tools=True) as http:
            assert (await http.post("/v1/chat/completions", json=CHAT | {"tools": TOOLS})).status_code == 200
    async with client(engine, WHOLE) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT | {"tools": TOOLS})).status_code == 200


def test_a_message_that_mentions_the_tool_does_not_count_as_showing_it() -> None:
    mention = [{"role": "user", "content": "use the calculator with an expression"}]
    assert left_out(ChatCodec(tokenizer_with(TURNS), tools=TOOLS), mention) == "the tool calculator"
    assert left_out(ChatCodec(tokenizer_with(WHOLE), tools=TOOLS), mention) is None
    codec = ChatCodec(tokenizer_with(ONLY_WITH_SYSTEM), tools=TOOLS)
    assert left_out(codec, mention) == "the tool calculator"
    assert left_out(codec, [{"role": "system", "content": "be brief"}, *mention]) is None
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
    turns = [*mention, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    assert left_out(ChatCodec(tokenizer_with(TURNS)), turns) == "the call of lookup in the messages"


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "calculator"}}},
        {"tool_choice": {"type": "custom", "custom": {"name": "calculator"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "grammar"}},
        {"top_logprobs": 2},
        {"top_logprobs": 21, "logprobs": True},
        {"logit_bias": {"5": 1}},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -1},
        {"functions": []},
        {"function_call": "auto"},
        {"reasoning_effort": "low"},
        {"verbosity": "low"},
        {"prediction": {"type": "content", "content": "x"}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "a"}},
        {"web_search_options": {}},
        {"store": True},
        {"service_tier": "flex"},
        {"stream_options": {"include_usage": True}},
        {"max_completion_tokens": 3},
        {"n": 0},
        {"tools": [{"type": "custom", "name": "calculator", "parameters": {}}]},
        {"unknown": 1},
    ],
)
async def test_what_would_be_ignored_is_refused_by_name(engine: EmbeddedEngine, change: dict[str, Any]) -> None:
    async with client(engine, WHOLE) as http:
        refused = await http.post("/v1/chat/completions", json=CHAT | change)
        name = next(iter(change))
        assert refused.status_code == 400 and name in str(refused.json()["error"])
        tier = {"store": False, "service_tier": "auto", "user": "u", "response_format": {"type": "text"}, "stop": ""}
        assert (await http.post("/v1/chat/completions", json=CHAT | tier)).status_code == 200


@pytest.mark.parametrize(
    "said", [{"function_call": {"name": "f", "arguments": "{}"}}, {"refusal": "no"}, {"audio": {"id": "a"}}]
)
async def test_parts_of_a_message_that_no_template_shows_are_refused(
    engine: EmbeddedEngine, said: dict[str, Any]
) -> None:
    async with client(engine, WHOLE) as http:
        turns = [*QUESTION, {"role": "assistant", "content": None, **said}, *QUESTION]
        refused = await http.post("/v1/chat/completions", json=CHAT | {"messages": turns})
        assert refused.status_code == 400
        assert f"messages.1.{next(iter(said))} is not supported" in refused.json()["error"]["message"]
        turns[1] = {"role": "assistant", "content": "x", **dict.fromkeys(said)}
        assert (await http.post("/v1/chat/completions", json=CHAT | {"messages": turns})).status_code == 200


async def test_a_client_that_leaves_while_its_body_is_read_is_no_failure(engine: EmbeddedEngine) -> None:
    app = create_app(Served(engine=engine, tokenizer=tokenizer_with(WHOLE), name="tiny"))
    head = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"10")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": head}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)  # an exception would be written to the terminal of the run
    assert sent[0]["status"] == 499


@pytest.mark.parametrize("name", ["llama3_2", "qwen2_5", "qwen3"])
def test_templates_of_real_models_that_show_tools_are_not_refused(shared: Path, name: str) -> None:
    properties = {"query": {"type": "string", "description": "what <to> find & 'where'"}, "max_results": {}}
    search = {"name": "web_search", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": search}, {"type": "function", "function": {"name": "now-2"}}]
    codec = ChatCodec(AutoTokenizer.from_pretrained(shared / "tokenizers" / name), tools=tools)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "web_search", "arguments": {"query": "x"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    for messages in (QUESTION, [{"role": "system", "content": "s"}, *QUESTION], [*QUESTION, turn]):
        assert left_out(codec, messages) is None


@pytest.mark.parametrize(("finish", "told"), [("length", "length"), ("stop", "tool_calls")])
def test_a_reply_that_was_cut_after_a_call_is_no_whole_one(finish: Any, told: str) -> None:
    codec = ChatCodec(tiny_tokenizer(), "hermes", TOOLS)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
    ids = tiny_tokenizer().encode(call + ('\n<tool_call>\n{"name' if finish == "length" else "<|im_end|>"))
    generation = Generation(ids=tuple(ids), logprobs=(-0.1,) * len(ids), finish=finish)
    asks = [SamplingAsk([1], SamplingParams(max_tokens=len(ids), stop_ids=codec.stop_ids))]
    options = ResponseOptions(model="m", logprobs=False, token_ids=False, usage_in_stream=False, choices=1)
    whole = CompletionResponse(chat_shape(codec, Constraint()), options, asks).whole([generation])
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == told and len(choice["message"]["tool_calls"]) == 1
    response = response_of(whole, ResponsesRequest(model="m", input="x"))
    assert response["status"] == ("incomplete" if finish == "length" else "completed")
    assert message_of(whole)["stop_reason"] == ("max_tokens" if finish == "length" else "tool_use")
    last = list(CompletionResponse(chat_shape(codec, Constraint()), options, asks).ending(0, generation))[-1]
    assert last["choices"][0]["finish_reason"] == told


@pytest.mark.long
def test_the_template_of_smollm2_drops_tools() -> None:
    model = ROOT / "models" / "smollm2-135m.gguf"
    if not model.exists():
        pytest.skip("no model (make models)")
    codec = ChatCodec(load_tokenizer(str(model), option="MODEL"), tools=TOOLS)
    assert left_out(codec, QUESTION) == "the tool calculator"
