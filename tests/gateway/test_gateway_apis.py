"""Agents over OpenAI's Responses and Anthropic's Messages: the same transcripts as over chat, token for token."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks.client_cases import CASES, SCHEMA, TOOL
from benchmarks.constrained_decoding import tiny_model
from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.gateway import BlackBoxAgentLoop
from rally.gateway.agent_runner import AgentClient
from rally.loops import Job, LoopSettings, LoopSpec, Runner
from rally.models.token_masks import Grammars
from rally.tools import ToolBox
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack
from rally.types import Episode, SamplingParams, Task

pytest.importorskip("llguidance")
TOKENIZER = tiny_tokenizer()
CODEC = ChatCodec(TOKENIZER, "hermes")
MODEL = tiny_model(len(TOKENIZER) + 4)
ASK = [{"role": "user", "content": "What is 1+1?"}]
Agent = Callable[[dict[str, Any], AgentClient], Any]
_running: dict[str, Agent] = {}


def agent(row: dict[str, Any], client: AgentClient) -> Any:
    return _running["agent"](row, client)


def played(function: Agent) -> Episode:
    """The episode of a plain function with the real engine."""
    _running["agent"] = function
    settings = EngineSettings(max_model_len=2048, max_num_seqs=4)
    grammars = Grammars(TOKENIZER, len(TOKENIZER) + 4, CODEC.stop_ids)
    engine = EmbeddedEngine(MODEL, settings, decode=CODEC.decode, grammars=grammars)
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

    episode = asyncio.run(run())
    assert episode.error is None, episode.error
    return episode


def post(client: AgentClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx.post(
        f"{client.base_url}/{path}", json={"model": "m", **body}, headers={"x-api-key": client.api_key}, timeout=60
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def two_turns_of_chat(row: dict[str, Any], client: AgentClient) -> str:
    common = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    first = post(client, "chat/completions", {"messages": ASK, **common})["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "done"}
    second = post(client, "chat/completions", {"messages": [*ASK, first, result], **common})
    return str(second["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])


def two_turns_of_responses(row: dict[str, Any], client: AgentClient) -> str:
    tool = {"type": "function", **TOOL["function"], "strict": True}  # type: ignore[dict-item]
    common = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    first = post(client, "responses", {"input": ASK[0]["content"], **common})
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    follow = {"input": [result], "previous_response_id": first["id"], **common}
    return str(post(client, "responses", follow)["output"][0]["arguments"])


def two_turns_of_messages(row: dict[str, Any], client: AgentClient) -> str:
    tool = {"name": "paint", "description": "Paints.", "input_schema": SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    common = {"tools": [tool], "tool_choice": choice, "max_tokens": 300}
    first = post(client, "messages", {"messages": ASK, **common})
    assert first["stop_reason"] == "tool_use"
    (use,) = first["content"]
    result = [{"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "done"}]}]
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": result}]
    return json.dumps(post(client, "messages", {"messages": [*ASK, *turns], **common})["content"][0]["input"])


def test_the_three_apis_record_the_same_tokens_and_the_trainer_agrees_with_them() -> None:
    chat, *others = [played(f) for f in (two_turns_of_chat, two_turns_of_responses, two_turns_of_messages)]
    (segment,) = chat.segments
    assert len(segment.constrained) == 2 and chat.extra["agent"]["constrained"] == 2
    for other in others:
        assert other.segments == chat.segments and other.extra["agent"]["rewritten"] == 0
        assert json.loads(other.extra["agent_answer"]) == json.loads(chat.extra["agent_answer"])
    packed = pack([Row.of(segment, 0)], MODEL.device)
    apart = (token_logprobs(MODEL, packed).logp_M.detach() - packed.old_logp_M).abs().max()
    assert float(apart) < 1e-5


def test_refusals_have_the_format_of_their_api_and_do_not_end_the_episode() -> None:
    refused: dict[str, Any] = {}

    def run(row: dict[str, Any], client: AgentClient) -> str:
        def error(path: str, body: dict[str, Any], status: int = 400) -> str:
            answer = post(client, path, body, status)
            refused[path] = answer
            return str(answer["error"]["message"])

        bad = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
        assert "cannot be applied" in error("responses", {"input": "x", "text": {"format": bad}})
        assert "type web_search" in error("responses", {"input": "x", "tools": [{"type": "web_search"}]})
        assert "has type reasoning" in error("responses", {"input": [{"type": "reasoning", "summary": []}]})
        assert "no response resp_1" in error("responses", {"input": "x", "previous_response_id": "resp_1"}, 404)
        assert "reasoning_effort" in error("responses", {"input": "x", "reasoning": {"effort": "low"}})
        assert "max_tokens is missing" in error("messages", {"messages": ASK})
        image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        assert "type image" in error("messages", {"messages": image, "max_tokens": 5})
        assert "thinking" in error("messages", {"messages": ASK, "max_tokens": 5, "thinking": {"type": "enabled"}})
        ended = post(client, "messages", {"messages": ASK, "max_tokens": 400, "stop_sequences": list("aeiou ")})
        assert ended["stop_reason"] == "stop_sequence" and ended["stop_sequence"] in "aeiou "
        cut = post(
            client, "responses", {"input": "x", "max_output_tokens": 2, "text": {"format": {**bad, "schema": SCHEMA}}}
        )
        assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert post(client, "messages/count_tokens", {"messages": ASK})["input_tokens"] > 3
        unknown = httpx.post(f"{client.base_url}/messages", json={}, headers={"x-api-key": "rally-no"})
        assert unknown.status_code == 401 and unknown.json()["error"]["type"] == "authentication_error"
        return "over"

    episode = played(run)
    assert refused["messages"]["type"] == "error" and refused["messages"]["error"]["type"] == "invalid_request_error"
    assert refused["responses"]["error"]["param"] == "reasoning_effort"
    assert episode.extra["agent"]["requests"] >= 3 and episode.extra["agent_answer"] == "over"


INSTALLED = {"openai", "langchain-openai", "langchain-core"}  # the others: make test-clients


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.server and {*case.packages} <= INSTALLED])
def test_unmodified_clients_keep_their_promises(name: str) -> None:
    episode = played(lambda row, client: CASES[name].run((client.base_url, client.api_key, client.model)))
    assert episode.extra["agent"]["requests"] >= 1
