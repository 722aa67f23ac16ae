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
from rally.engines import EmbeddedEngine, EngineSettings
from rally.models.load import load_tokenizer
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.services.openai_api import left_out

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


@pytest.mark.long
def test_the_template_of_smollm2_drops_tools() -> None:
    model = ROOT / "models" / "smollm2-135m.gguf"
    if not model.exists():
        pytest.skip("no model (make models)")
    codec = ChatCodec(load_tokenizer(str(model), option="MODEL"), tools=TOOLS)
    assert left_out(codec, QUESTION) == "the tool calculator"
