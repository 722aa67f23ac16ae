"""Unmodified clients against a server or gateway of Rally, one function each. Needs only the client's own package.

    python benchmarks/client_cases.py CASE BASE_URL API_KEY MODEL

A case raises if its result is not what its API promises: with constrained decoding a model with random weights keeps
these promises too. It prints the versions of the packages and a word about the result, as JSON. `tests/clients` runs
all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

Server = tuple[str, str, str]
"""The base URL (with /v1), the API key and the model."""
QUESTION = "What is 1+1?"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
ASK = [{"role": "user", "content": QUESTION}]


def check(value: Any) -> str:
    """A value of SCHEMA, as text."""
    value = value if isinstance(value, dict) else value.model_dump()
    assert value["colour"] in ("red", "blue") and 1 <= value["count"] <= 99, value
    return json.dumps(value)


def answer_type() -> Any:
    """SCHEMA as a Pydantic model."""
    from pydantic import BaseModel, Field

    class Paint(BaseModel):
        """The answer."""

        colour: Literal["red", "blue"]
        count: int = Field(ge=1, le=99)

    Paint.model_rebuild(_types_namespace={"Literal": Literal})
    return Paint


def openai_client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=server[0], api_key=server[1], max_retries=0)


def openai_chat(server: Server) -> str:
    client = openai_client(server)
    choice = {"type": "function", "function": {"name": "paint"}}
    first = client.chat.completions.create(model=server[2], messages=ASK, tools=[TOOL], tool_choice=choice)
    (call,) = first.choices[0].message.tool_calls
    text = check(json.loads(call.function.arguments))
    reply = first.choices[0].message.model_dump(exclude_none=True)
    messages = [*ASK, reply, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    after = client.chat.completions.create(model=server[2], messages=messages, tools=[TOOL], max_tokens=5)
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert client.models.retrieve(client.models.list().data[0].id).object == "model"
    return text


def openai_parse(server: Server) -> str:
    client = openai_client(server)
    parsed = client.chat.completions.parse(model=server[2], messages=ASK, response_format=answer_type())
    return check(parsed.choices[0].message.parsed)


def openai_streaming(server: Server) -> str:
    client = openai_client(server)
    wanted = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
    chunks = client.chat.completions.create(
        model=server[2], messages=ASK, response_format=wanted, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in chunks:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert usage is not None and usage.completion_tokens > 0
    return check(json.loads(text))


def openai_responses(server: Server) -> str:
    client = openai_client(server)
    tool = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}
    first = client.responses.create(model=server[2], input=QUESTION, tools=[tool], tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    text = check(json.loads(calls[0].arguments))
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls]
    items = [*ASK, *(item.model_dump(exclude_none=True) for item in first.output), *outputs]
    after = client.responses.create(model=server[2], input=items, tools=[tool], max_output_tokens=5)
    assert after.status in ("completed", "incomplete")
    parsed = client.responses.parse(model=server[2], input=QUESTION, text_format=answer_type())
    check(parsed.output_parsed)
    with client.responses.stream(model=server[2], input=QUESTION, text_format=answer_type()) as stream:
        kinds = [event.type for event in stream]
        check(stream.get_final_response().output_parsed)
    assert "response.output_text.delta" in kinds
    return text


def anthropic_messages(server: Server) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=server[0].removesuffix("/v1"), api_key=server[1], max_retries=0)
    tools = [{"name": "paint", "description": "Paints.", "input_schema": SCHEMA}]
    common: dict[str, Any] = {"model": server[2], "max_tokens": 200, "system": "Be brief.", "tools": tools}
    first = client.messages.create(messages=ASK, tool_choice={"type": "any"}, **common)
    assert first.stop_reason == "tool_use"
    uses = [block for block in first.content if block.type == "tool_use"]
    text = check(uses[0].input)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "done"} for use in uses]
    messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    named = {"type": "tool", "name": "paint", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=messages, tool_choice=named, **common) as stream:
        kinds = {event.type for event in stream}
        (use,) = (block for block in stream.get_final_message().content if block.type == "tool_use")
    check(use.input)
    assert {"message_start", "content_block_delta", "message_stop"} <= kinds
    assert client.messages.count_tokens(model=server[2], messages=ASK).input_tokens > 0
    return text


def litellm_chat(server: Server) -> str:
    import litellm

    where = {"api_base": server[0], "api_key": server[1], "num_retries": 0}
    wanted = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(model=f"openai/{server[2]}", messages=ASK, response_format=wanted, **where)
    text = check(json.loads(answer.choices[0].message.content))
    called = litellm.completion(
        model=f"openai/{server[2]}", messages=ASK, tools=[TOOL], tool_choice="required", stream=True, **where
    )
    whole = litellm.stream_chunk_builder(list(called), messages=ASK)
    check(json.loads(whole.choices[0].message.tool_calls[0].function.arguments))
    return text


def litellm_errors(server: Server) -> str:
    """What an agent does next depends on the class: it shortens its messages, or gives up."""
    import litellm

    long = [{"role": "user", "content": "word " * 5000}]
    expected: dict[Any, dict[str, Any]] = {litellm.ContextWindowExceededError: {"messages": long}}
    if "rally-" in server[1]:  # the gateway's keys; the server of the tests has none
        expected[litellm.AuthenticationError] = {"messages": ASK, "api_key": "another"}
    for kind, fields in expected.items():
        for api, base in (("openai", server[0]), ("anthropic", server[0].removesuffix("/v1"))):
            where = {"model": f"{api}/{server[2]}", "api_base": base, "api_key": server[1], "num_retries": 0}
            try:
                litellm.completion(**({"max_tokens": 5} | where | fields))
            except kind:
                continue
            raise AssertionError(f"{api} was answered without {kind.__name__}")
    return f"{len(expected)} classes"


def langchain_structured(server: Server) -> str:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model=server[2], base_url=server[0], api_key=server[1], max_retries=0)
    for method in ("json_schema", "function_calling"):
        text = check(llm.with_structured_output(answer_type(), method=method).invoke(QUESTION))
    return text


def langgraph_agent(server: Server) -> str:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model=server[2], base_url=server[0], api_key=server[1], max_retries=0)
    agent = create_agent(llm, tools=[], response_format=ToolStrategy(answer_type()))
    return check(agent.invoke({"messages": ASK})["structured_response"])


def openai_agents(server: Server) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server[0], api_key=server[1], max_retries=0)
    model = agents.OpenAIResponsesModel(model=server[2], openai_client=client)
    agent = agents.Agent(name="painter", instructions="Paint.", model=model, output_type=answer_type())
    return check(agents.Runner.run_sync(agent, QUESTION).final_output)


def pydantic_ai_output(server: Server) -> str:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(server[2], provider=OpenAIProvider(base_url=server[0], api_key=server[1]))
    for output in (answer_type(), NativeOutput(answer_type())):
        text = check(Agent(model, output_type=output).run_sync(QUESTION).output)
    return text


def smolagents_tools(server: Server) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent

    model = OpenAIServerModel(model_id=server[2], api_base=server[0], api_key=server[1])
    agent = ToolCallingAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
    return f"answered {type(agent.run(QUESTION)).__name__}"


def instructor_modes(server: Server) -> str:
    import instructor

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = instructor.from_openai(openai_client(server), mode=mode)
        try:
            answer = client.chat.completions.create(
                model=server[2], messages=ASK, response_model=answer_type(), max_retries=0, max_tokens=200
            )
        except Exception as problem:
            if mode is not instructor.Mode.JSON:  # it asks for any JSON object: random weights write another one
                raise
            assert "alidation" in repr(problem) or "incomplete" in str(problem), problem
            continue
        text = check(answer)
    return text


def autogen_agent(server: Server) -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    info: Any = {**able, "family": "unknown", "multiple_system_messages": True}
    client = OpenAIChatCompletionClient(model=server[2], base_url=server[0], api_key=server[1], model_info=info)
    kind = answer_type()

    async def run() -> Any:
        agent = AssistantAgent("painter", model_client=client, output_content_type=kind)
        try:
            return (await agent.run(task=QUESTION)).messages[-1]
        finally:
            await client.close()

    return check(asyncio.run(run()).content)


def crewai_crew(server: Server) -> str:
    from crewai import LLM

    llm = LLM(model=f"openai/{server[2]}", base_url=server[0], api_key=server[1], response_format=answer_type())
    answer = llm.call(ASK)
    return check(json.loads(answer) if isinstance(answer, str) else answer)


def openai_scores(server: Server) -> str:
    """Text completions: the log-probabilities of a prompt, and alternatives of a chat."""
    client = openai_client(server)
    answer = client.completions.create(model=server[2], prompt=QUESTION, echo=True, logprobs=2, max_tokens=1)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(QUESTION) and found.token_logprobs[0] is None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    chat = client.chat.completions.create(
        model=server[2], messages=ASK, logprobs=True, top_logprobs=3, max_tokens=3, stream=False
    )
    assert all(len(entry.top_logprobs) == 3 for entry in chat.choices[0].logprobs.content)
    return f"{len(found.tokens)} tokens"


def openai_refusals(server: Server) -> str:
    """What the gateway cannot do is refused in a sentence, with OpenAI's error class."""
    import openai

    client = openai_client(server)
    refused: dict[str, dict[str, Any]] = {
        "the model's chat template has no variable for it; leave it out": {"reasoning_effort": "low"},
        "n must be 1, not 2; send one request for each completion": {"n": 2},
        "top_logprobs=2 is not supported during a run; leave it out": {"logprobs": True, "top_logprobs": 2},
        "frequency_penalty=0.5 is not supported; leave it out": {"frequency_penalty": 0.5},
    }
    for sentence, fields in refused.items():
        try:
            client.chat.completions.create(model=server[2], messages=ASK, max_tokens=2, **fields)
        except openai.BadRequestError as error:
            assert sentence in error.message, error.message
        else:
            raise AssertionError(f"not refused: {fields}")
    client.chat.completions.create(model=server[2], messages=ASK, max_tokens=2)
    return f"{len(refused)} refusals"


LM_EVAL_ROWS = [
    {"question": "What is 1+1?", "choices": ["2", "11", "no"], "answer": 0},
    {"question": "Say", "choices": [" yes", " no"], "answer": 1},
]


def lm_eval_loglikelihood(server: Server) -> str:
    """A task of lm_eval over log-probabilities; RALLY_TOKENIZER names the folder of the model's tokenizer."""
    import tempfile
    from pathlib import Path

    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    os.environ["OPENAI_API_KEY"] = server[1]
    model = LocalCompletionsAPI(
        base_url=f"{server[0]}/completions",
        model=server[2],
        tokenizer=os.environ["RALLY_TOKENIZER"],
        tokenizer_backend="huggingface",
        max_retries=1,
        batch_size=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("\n".join(map(json.dumps, LM_EVAL_ROWS)))
        files = {"data_files": {"test": str(rows)}, "cache_dir": folder}
        config = {"task": "sums", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        config |= {"output_type": "multiple_choice", "target_delimiter": ""}
        config |= {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
        done = lm_eval.simple_evaluate(model=model, tasks=[ConfigurableTask(config=config)], bootstrap_iters=0)
    assert 0 <= done["results"]["sums"]["acc,none"] <= 1
    scored = sorted(done["samples"]["sums"], key=lambda sample: sample["doc_id"])
    return json.dumps([[float(pair[0]) for pair in sample["filtered_resps"]] for sample in scored])


class Case(NamedTuple):
    """A client: its packages, and what is run."""

    packages: tuple[str, ...]
    run: Callable[[Server], str]
    server: bool = False  # needs `rally serve engine`: the gateway has no text completions and no alternatives


CASES = {
    "openai chat, tools, models": Case(("openai",), openai_chat),
    "openai chat, parse": Case(("openai",), openai_parse),
    "openai chat, streaming": Case(("openai",), openai_streaming),
    "openai responses, stream, parse": Case(("openai",), openai_responses),
    "anthropic messages, stream, count_tokens": Case(("anthropic",), anthropic_messages),
    "litellm completion, stream": Case(("litellm",), litellm_chat),
    "litellm error classes": Case(("litellm",), litellm_errors),
    "langchain with_structured_output": Case(("langchain-openai", "langchain-core"), langchain_structured),
    "langgraph agent, response_format": Case(("langchain", "langgraph"), langgraph_agent),
    "openai-agents (Responses), output_type": Case(("openai-agents",), openai_agents),
    "pydantic-ai output_type, NativeOutput": Case(("pydantic-ai-slim",), pydantic_ai_output),
    "smolagents ToolCallingAgent": Case(("smolagents",), smolagents_tools),
    "instructor TOOLS, JSON_SCHEMA, JSON": Case(("instructor",), instructor_modes),
    "autogen AssistantAgent, output_content_type": Case(("autogen-agentchat", "autogen-ext"), autogen_agent),
    "crewai LLM, response_format": Case(("crewai",), crewai_crew),
    "openai chat, refusals": Case(("openai",), openai_refusals),
    "openai completions with echo, top_logprobs": Case(("openai",), openai_scores, server=True),
    "lm_eval loglikelihood": Case(("lm_eval",), lm_eval_loglikelihood, server=True),
}


def main() -> None:
    name, *server = sys.argv[1:]
    case = CASES[name]
    versions = {package: version(package) for package in case.packages}
    result = case.run((server[0], server[1], server[2]))
    print(json.dumps({"case": name, "versions": versions, "result": result}))


if __name__ == "__main__":
    main()
