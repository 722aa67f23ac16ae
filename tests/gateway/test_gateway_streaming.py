"""Streams over all APIs: text arrives while it is sampled, and adds up to what is answered and recorded without."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from served_cases import free_port

from benchmarks.client_cases import SCHEMA, TOOL
from benchmarks.constrained_decoding import tiny_model
from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.gateway import BlackBoxAgentLoop
from rally.gateway.agent_runner import AgentClient
from rally.loops import Job, LoopSettings, LoopSpec, Runner
from rally.models.token_masks import Grammars
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.tools import ToolBox
from rally.types import Episode, SamplingParams, Task

pytest.importorskip("llguidance")
TOKENIZER = tiny_tokenizer()
CODEC = ChatCodec(TOKENIZER, "hermes")
ASK = [{"role": "user", "content": "What is 1+1?"}]
LONG = 60  # tokens of a reply, of which the engine holds back all after HELD until a client has read text
HELD = 30
_held: dict[str, Any] = {"steps": 0, "read": Event()}
_running: dict[str, Callable[[AgentClient], Any]] = {}


def held_model() -> Any:
    """A model whose HELD-th forward waits until a client has read something, if `_held` says so."""
    model = tiny_model(len(TOKENIZER) + 4)

    def wait(module: Any, inputs: Any) -> None:
        _held["steps"] += 1
        if _held["steps"] == HELD:
            assert _held["read"].wait(60), "no text arrived while the reply was sampled"

    model.get_input_embeddings().register_forward_pre_hook(wait)
    return model


MODEL = held_model()


def made_engine() -> EmbeddedEngine:
    grammars = Grammars(TOKENIZER, len(TOKENIZER) + 4, CODEC.stop_ids)
    settings = EngineSettings(max_model_len=1024, max_num_seqs=4)
    return EmbeddedEngine(MODEL, settings, decode=CODEC.decode, grammars=grammars)


class Got(NamedTuple):
    """What a stream or an answer held."""

    text: str
    calls: list[dict[str, Any]]
    finish: str
    pieces: int = 1
    tokens: int = 0


def bodies(tools: bool, **fields: Any) -> dict[str, dict[str, Any]]:
    """One request for each API."""
    common = {"model": "policy", "temperature": 1.0, **fields}
    offered = [TOOL] if tools else None
    flat = [{"type": "function", **TOOL["function"]}] if tools else []
    schemas = [{"name": "paint", "description": "Paints.", "input_schema": SCHEMA}] if tools else []
    return {
        "chat/completions": common | {"messages": ASK, "max_tokens": LONG, **({"tools": offered} if offered else {})},
        "responses": common | {"input": ASK, "max_output_tokens": LONG, "tools": flat},
        "messages": common | {"messages": ASK, "max_tokens": LONG, "tools": schemas},
    }


def events(url: str, key: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"}
    options = {"stream_options": {"include_usage": True}} if path == "chat/completions" else {}
    with httpx.stream("POST", f"{url}/{path}", json=body | options | {"stream": True}, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


def streamed(url: str, key: str, path: str, body: dict[str, Any], hold: bool = False) -> Got:
    _held.update(steps=0 if hold else HELD, read=Event())
    text, pieces, finish, tokens = "", 0, "", 0
    calls: list[dict[str, Any]] = []
    for one in events(url, key, path, body):
        assert one.get("type") != "error" and one.get("error") is None, one
        piece = ""
        if path == "chat/completions":
            delta = one["choices"][0]["delta"] if one["choices"] else {}
            piece = delta.get("content") or ""
            calls += [json.loads(call["function"]["arguments"]) for call in delta.get("tool_calls", ())]
            finish = (one["choices"][0]["finish_reason"] or finish) if one["choices"] else finish
            tokens = (one.get("usage") or {}).get("completion_tokens", tokens)
        elif path == "responses":
            piece = one["delta"] if one["type"] == "response.output_text.delta" else ""
            if one["type"] in ("response.completed", "response.incomplete"):
                whole = got(path, one["response"])
                assert whole.text == text, "the deltas are the whole text"
                calls, finish, tokens = whole.calls, whole.finish, whole.tokens
        else:
            delta = one.get("delta") or {}
            piece = delta.get("text") or ""
            calls += [json.loads(delta["partial_json"])] if delta.get("type") == "input_json_delta" else []
            if one["type"] == "message_delta":
                finish, tokens = delta["stop_reason"], one["usage"]["output_tokens"]
        text, pieces = text + piece, pieces + bool(piece)
        if piece:
            _held["read"].set()
    return Got(text, calls, finish, pieces, tokens)


def got(path: str, answer: dict[str, Any]) -> Got:
    if path == "chat/completions":
        (choice,) = answer["choices"]
        calls = [json.loads(one["function"]["arguments"]) for one in choice["message"].get("tool_calls", ())]
        tokens = answer["usage"]["completion_tokens"]
        return Got(choice["message"]["content"] or "", calls, choice["finish_reason"], 1, tokens)
    if path == "responses":
        texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
        calls = [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
        return Got("".join(texts), calls, answer["status"], 1, answer["usage"]["output_tokens"])
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    calls = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    return Got("".join(texts), calls, answer["stop_reason"], 1, answer["usage"]["output_tokens"])


def answered(url: str, key: str, path: str, body: dict[str, Any]) -> Got:
    _held["steps"] = HELD
    answer = httpx.post(f"{url}/{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return got(path, answer.json())


def agent(row: dict[str, Any], client: AgentClient) -> Any:
    return _running["agent"](client)


def played(function: Callable[[AgentClient], Any]) -> Episode:
    _running["agent"] = function
    engine = made_engine()
    loops = {"black_box": LoopSpec(BlackBoxAgentLoop, {"agent": f"{__name__}:agent"})}
    runner = Runner(
        engine=engine, codec=CODEC, toolbox=ToolBox([]), settings=LoopSettings(response_length=4096), loops=loops
    )
    task = Task(id="t", data_source="s", prompt=tuple(ASK), agent_name="black_box", row={"prompt": ASK})

    async def run() -> Episode:
        try:
            job = Job(task=task, episode_id="e", group="g", seed=3)
            (episode,) = await runner.run([job], SamplingParams(max_tokens=512, stop_ids=CODEC.stop_ids))
            return episode
        finally:
            await engine.close()

    return asyncio.run(run())


def results(episode: Episode) -> Any:
    assert episode.error is None, episode.error
    return json.loads(episode.extra["agent_answer"])


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("tools", [False, True])
def test_the_gateway_streams_and_records_what_it_would_without(path: str, tools: bool) -> None:
    body = bodies(tools)[path]
    whole = played(lambda client: json.dumps(answered(client.base_url, client.api_key, path, body)))
    stream = played(lambda client: json.dumps(streamed(client.base_url, client.api_key, path, body, hold=True)))
    expected, found = Got(*results(whole)), Got(*results(stream))
    assert stream.segments == whole.segments and len(whole.segments) == 1
    assert found._replace(pieces=1) == expected and expected.tokens == LONG
    assert found.pieces > 10, "the text came in many pieces"
    assert stream.turns[0].text.startswith(found.text.strip()) and stream.extra["agent"]["gone"] == 0


def forced(path: str) -> dict[str, Any]:
    choice = {"messages": {"type": "any"}}.get(path, "required")
    return bodies(True, tool_choice=choice)[path] | ({"max_tokens": 200} if path != "responses" else {})


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_calls_are_streamed_whole_and_can_be_answered(path: str) -> None:
    def run(client: AgentClient) -> str:
        found = streamed(client.base_url, client.api_key, path, forced(path))
        assert found.text == "" and found.calls and all(call.keys() == {"colour", "count"} for call in found.calls)
        return json.dumps(found)

    stream = played(run)
    whole = played(lambda client: json.dumps(answered(client.base_url, client.api_key, path, forced(path))))
    assert results(stream)[1] == results(whole)[1] and stream.segments == whole.segments


def test_a_streamed_turn_is_continued_like_any_other() -> None:
    def run(client: AgentClient) -> str:
        _held["steps"] = HELD
        llm = client.sync_openai(max_retries=0)
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for chunk in llm.chat.completions.create(
            model="m", messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True
        ):
            message["tool_calls"] += [call.model_dump() for call in chunk.choices[0].delta.tool_calls or ()]
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]
        llm.chat.completions.create(model="m", messages=[*ASK, message, *answers], tools=[TOOL], max_tokens=4)
        return "over"

    episode = played(run)
    assert episode.error is None and len(episode.segments) == 1 and episode.extra["agent"]["rewritten"] == 0


def test_a_client_that_leaves_ends_its_request() -> None:
    def run(client: AgentClient) -> str:
        _held.update(steps=HELD)
        body = bodies(False)["chat/completions"] | {"max_tokens": 900}
        for one in events(client.base_url, client.api_key, "chat/completions", body):
            if one["choices"][0]["delta"].get("content"):
                break
        return json.dumps(
            answered(client.base_url, client.api_key, "chat/completions", bodies(False)["chat/completions"])
        )

    episode = played(run)
    assert episode.error is None and episode.extra["agent"]["gone"] == 1 and len(episode.segments) == 1


@contextmanager
def server() -> Iterator[str]:
    """`rally serve engine`'s application in a thread."""
    served = Served(engine=made_engine(), tokenizer=TOKENIZER, name="policy", tool_format="hermes", hidden_tools=True)
    port = free_port()
    web = uvicorn.Server(uvicorn.Config(create_app(served), port=port, log_level="error"))
    thread = Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        web.should_exit = True
        thread.join()


def test_the_server_streams_all_apis_as_it_answers_them() -> None:
    with server() as url:
        for tools in (False, True):
            seeded = bodies(tools)
            for path, body in seeded.items():
                greedy = body | {"temperature": 0.0}
                expected = answered(url, "key", path, greedy)
                found = streamed(url, "key", path, greedy, hold=True)
                assert found._replace(pieces=1) == expected and found.pieces > 10
        completion = {"model": "policy", "prompt": "What is", "max_tokens": LONG, "temperature": 0.0}
        _held["steps"] = HELD
        whole = httpx.post(f"{url}/completions", json=completion).json()
        text = "".join(one["choices"][0]["text"] for one in events(url, "key", "completions", completion))
        assert text == whole["choices"][0]["text"]


def test_an_error_before_the_first_token_has_a_status() -> None:
    with server() as url:
        for path, body in bodies(False).items():
            wrong = body | {"model": "other", "stream": True}
            assert httpx.post(f"{url}/{path}", json=wrong).status_code == 404
