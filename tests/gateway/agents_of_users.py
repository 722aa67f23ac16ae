"""Agents as users write them: with OpenAI's SDK, with LangGraph, over plain HTTP. They answer calls of `calculator`
with `calculate` of the loop tests."""

import asyncio
import json
import time
from typing import Any

import httpx
from langchain_core.messages import convert_to_openai_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from rally.gateway import AgentClient

Row = dict[str, Any]


def value_of(expression: str) -> str:
    return f"the value of {expression}"


def answers(calls: Any) -> list[dict[str, Any]]:
    said = [(call.id, value_of(**json.loads(call.function.arguments))) for call in calls]
    return [{"role": "tool", "tool_call_id": i, "content": text} for i, text in said]


async def with_openai(row: Row, client: AgentClient) -> str | None:
    llm, messages = client.openai(), list(row["raw_prompt"])
    while True:
        completion = await llm.chat.completions.create(model="gpt-5-mini", messages=messages, tools=row["tools"])
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        messages += answers(message.tool_calls)


async def with_openai_stream(row: Row, client: AgentClient) -> str | None:
    llm, messages = client.openai(), list(row["raw_prompt"])
    while True:
        wanted: Any = {"model": client.model, "messages": messages, "tools": row["tools"]}
        async with llm.chat.completions.stream(**wanted, stream_options={"include_usage": True}) as stream:
            completion = await stream.get_final_completion()
        assert completion.usage.completion_tokens > 0
        message = completion.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return str(message.content)
        messages += answers(message.tool_calls)


def with_openai_blocking(row: Row, client: AgentClient) -> str | None:
    llm, messages = client.sync_openai(), list(row["raw_prompt"])
    while True:
        completion = llm.chat.completions.create(model=client.model, messages=messages, tools=row["tools"])
        message = completion.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            return str(message.content)
        messages += answers(message.tool_calls)


async def blocking_inside_async(row: Row, client: AgentClient) -> str | None:
    """A common mistake, which must not block the trainer."""
    return with_openai_blocking(row, client)


def over_http(row: Row, client: AgentClient) -> str | None:
    """Rewrites received messages as clients do: other call ids, sorted arguments, text in parts, empty fields."""
    messages, number = list(row["raw_prompt"]), 0
    headers = {"Authorization": f"Bearer {client.api_key}"}
    while True:
        body = {"model": "any", "messages": messages, "tools": row["tools"]}
        got = httpx.post(f"{client.base_url}/chat/completions", json=body, headers=headers, trust_env=False).json()
        message = got["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        for call in calls:
            number += 1
            call["id"] = f"mine_{number}"
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
        content = [{"type": "text", "text": message["content"] or ""}]
        messages.append(
            {"content": content, "refusal": None, "annotations": [], "role": "assistant", "tool_calls": calls}
        )
        if not calls:
            return str(message["content"])
        for call in calls:
            text = value_of(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": text}]})


@tool
def calculator(expression: str) -> str:
    """Evaluates nothing, but says so."""
    return value_of(expression)


def _graph(client: AgentClient) -> Any:
    """ReAct: the model, its tools, and the model again until it calls none."""
    llm = ChatOpenAI(model=client.model, base_url=client.base_url, api_key=client.api_key)  # type: ignore[arg-type]

    async def agent(state: MessagesState) -> dict[str, Any]:
        reply = await llm.bind_tools([calculator]).ainvoke(state["messages"])
        reply.name = "mathematician"  # as graphs of several agents do
        return {"messages": [reply]}

    graph = StateGraph(MessagesState).add_node("agent", agent).add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "agent").add_edge("tools", "agent").add_conditional_edges("agent", tools_condition)
    return graph.compile()


async def with_langgraph(row: Row, client: AgentClient) -> str:
    result = await _graph(client).ainvoke({"messages": row["raw_prompt"]})
    return str(result["messages"][-1].content)


async def with_langgraph_stream(row: Row, client: AgentClient) -> str:
    """Each step's messages, converted to LangChain's other forms and back."""
    last = ""
    async for state in _graph(client).astream({"messages": row["raw_prompt"]}, stream_mode="values"):
        last = str(convert_to_openai_messages(state["messages"])[-1]["content"])
    return last


async def never_asks(row: Row, client: AgentClient) -> float:
    return 1.0


async def dies(row: Row, client: AgentClient) -> None:
    await ask(client, "hello")
    raise ZeroDivisionError("division by zero")


async def hangs(row: Row, client: AgentClient) -> None:
    await ask(client, "hello")
    await asyncio.sleep(3600)


async def hangs_at_once(row: Row, client: AgentClient) -> None:
    await asyncio.sleep(3600)


def hangs_in_a_thread(row: Row, client: AgentClient) -> None:
    client.sync_openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    time.sleep(30)


async def blocks_the_loop(row: Row, client: AgentClient) -> None:
    time.sleep(30)


async def ask(client: AgentClient, *texts: str, **options: Any) -> str:
    """Sends the user's `texts` one by one, with sampled replies in between; returns the last reply."""
    llm, messages = client.openai(max_retries=0), list[Any]()
    for text in texts:
        messages.append({"role": "user", "content": text})
        completion = await llm.chat.completions.create(model="m", messages=messages, **options)
        messages.append(completion.choices[0].message)
    return str(messages[-1].content)


async def asks_three_times(row: Row, client: AgentClient) -> str:
    return await ask(client, *"abc")


async def asks_ten_times(row: Row, client: AgentClient) -> str:
    return await ask(client, *"abcdefghij")


async def asks_ten_times_or_gives_up(row: Row, client: AgentClient) -> dict[str, Any]:
    try:
        return {"answer": await ask(client, *"abcdefghij"), "reward": 1}
    except Exception as refusal:  # noqa: BLE001 - what users write
        return {"answer": str(refusal), "reward": 0.25, "gave_up": True}


async def shortens_itself(row: Row, client: AgentClient) -> str:
    """Sends a history that is too long, and a shorter one after the error."""
    try:
        return await ask(client, "x " * 500)
    except Exception as refusal:  # noqa: BLE001 - what users write
        return f"{refusal} / {await ask(client, 'short')}"


async def offers_no_function(row: Row, client: AgentClient) -> str:
    """Offers a tool of an unknown kind first, then none."""
    try:
        return await ask(client, "hello", tools=[{"type": "custom", "custom": {"name": "shell"}}])
    except Exception as refusal:  # noqa: BLE001 - what users write
        return f"{refusal} / {await ask(client, 'hello', stop='')}"


async def is_impatient(row: Row, client: AgentClient) -> str:
    llm = client.openai(timeout=0.3, max_retries=1)
    question: Any = [{"role": "user", "content": "hello"}]
    return str((await llm.chat.completions.create(model="m", messages=question)).choices[0].message.content)


async def wants_three(row: Row, client: AgentClient) -> str:
    return await ask(client, "hello", n=3)


async def wants_to_be_cold(row: Row, client: AgentClient) -> str:
    return await ask(client, "hello", temperature=0.0)


async def echoes_its_name(row: Row, client: AgentClient) -> str:
    """Three turns, each with the name of its episode, with pauses so that episodes interleave."""
    llm, messages = client.openai(), list[Any]()
    for turn in range(3):
        messages.append({"role": "user", "content": f"{row['name']} {turn}"})
        completion = await llm.chat.completions.create(model="m", messages=messages)
        messages.append(completion.choices[0].message)
        await asyncio.sleep(0)
    return str(row["name"])


async def two_heads(row: Row, client: AgentClient) -> str:
    """One question, then two concurrent continuations, then a sub-agent, then the first continuation again."""
    llm = client.openai()

    async def said(messages: list[Any]) -> Any:
        return (await llm.chat.completions.create(model="m", messages=messages)).choices[0].message

    first = [{"role": "user", "content": "plan"}]
    first.append(await said(first))
    left, right = [*first, {"role": "user", "content": "left"}], [*first, {"role": "user", "content": "right"}]
    one, _ = await asyncio.gather(said(left), said(right))
    await said([{"role": "user", "content": "a sub-agent"}])
    last = await said([*left, one, {"role": "user", "content": "sum up"}])
    return str(last.content)


async def asks_at_once(row: Row, client: AgentClient) -> dict[str, Any]:
    """Sends eight questions concurrently; returns how many were answered."""
    said = await asyncio.gather(*[ask(client, f"question {n}") for n in range(8)], return_exceptions=True)
    return {"answered": sum(isinstance(one, str) for one in said)}


async def writes_into_its_row(row: Row, client: AgentClient) -> str:
    messages = row["raw_prompt"]
    for _ in range(2):
        completion = await client.openai().chat.completions.create(model="m", messages=messages)
        messages += [completion.choices[0].message, {"role": "user", "content": "go on"}]
    return str(len(messages))


async def asks_for_ever(row: Row, client: AgentClient) -> None:
    while True:
        try:
            await ask(client, "again")
        except Exception:  # noqa: BLE001 - what users write
            await asyncio.sleep(0.01)


KEPT: list[AgentClient] = []


async def keeps_its_client(row: Row, client: AgentClient) -> None:
    KEPT.append(client)
    await ask(client, "hello")


async def returns_a_list(row: Row, client: AgentClient) -> list[str]:
    return [await ask(client, "hello")]


def echoes_its_name_blocking(row: Row, client: AgentClient) -> str:
    return asyncio.run(echoes_its_name(row, client))


async def is_checked_by_another(row: Row, client: AgentClient) -> Any:
    """Answers, lets a critic with its own prompt comment on the answer, and returns it as `row["returns"]` says."""
    llm = client.openai()
    main: list[Any] = [{"role": "system", "content": "You solve."}, *row["raw_prompt"]]
    router: list[Any] = [{"role": "user", "content": "Which expert is needed?"}]
    critic: list[Any] = [{"role": "system", "content": "You check."}, {"role": "user", "content": "Is it right?"}]
    replies = [
        (await llm.chat.completions.create(model="m", messages=messages)).choices[0].message
        for messages in (router, main, critic)
    ]
    return {"text": replies[1].content, "message": replies[1], "nothing": None}[row["returns"]]


async def trusts_the_policy(row: Row, client: AgentClient) -> str:
    """Runs calls as some frameworks do: an unknown tool, or arguments that do not parse, raise."""
    llm, messages = client.openai(), list(row["raw_prompt"])
    while True:
        completion = await llm.chat.completions.create(model="m", messages=messages, tools=row["tools"])
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            tool = {"calculator": value_of}[call.function.name]
            text = tool(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def has_a_dead_tool(row: Row, client: AgentClient) -> None:
    await ask(client, "hello")
    raise RuntimeError("the tool failed") from ConnectionRefusedError("nobody listens")


async def is_misspelled(row: Row, client: AgentClient) -> None:
    await ask(client, "hello")
    aks(client, "again")  # type: ignore[name-defined]  # noqa: F821 - a bug in the agent
