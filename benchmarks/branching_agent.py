"""The agent of the picture of branches in docs/viewer.md: it samples three answers after a tool call, asks a judge that
is not trained on, gives rewards to calls, and asks again.

    rally train CONFIG actor_rollout_ref.rollout.agent_loop_class=black_box \\
        actor_rollout_ref.rollout.agent_loop_config.agent=benchmarks/branching_agent.py:run

CONFIG is the `config.yaml` of the demo without its tools (`agent_loop_config.tools`) and its limit of turns, with a
checkpoint of the demo as the model.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rally.gateway import AgentClient
from rally.tools.builtin.calculator import calculate

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": PARAMETERS}}]


def answered(call: Any) -> dict[str, Any]:
    """The tool message for a call."""
    try:
        text = calculate(json.loads(call.function.arguments)["expression"])
    except (KeyError, ValueError) as error:
        text = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": text}


async def run(row: dict[str, Any], client: AgentClient) -> dict[str, Any]:
    llm = client.openai()

    async def ask(messages: list[Any], **options: Any) -> Any:
        return await llm.chat.completions.create(model=client.model, messages=messages, **options)

    messages = list(row["prompt"])
    first = (await ask(messages, tools=TOOLS)).choices[0].message
    calls = first.tool_calls or []
    await asyncio.sleep(0.1)  # the time of a slow tool
    messages += [first, *map(answered, calls)] if calls else [first, {"role": "user", "content": "Use the calculator."}]
    answers = await asyncio.gather(*(ask(messages, tools=TOOLS) for _ in range(3)))
    texts = [answer.choices[0].message.content or "" for answer in answers]
    client.exclude(await ask([{"role": "user", "content": "Which is best? " + " ".join(texts)}]))
    for answer, text in zip(answers, texts, strict=True):
        client.credit(answer, 0.25 if "####" in text else -0.25)
    again = [*messages, answers[0].choices[0].message, {"role": "user", "content": "Are you sure?"}]
    last = (await ask(again, tools=TOOLS)).choices[0].message.content or ""
    return {"answer": last, "reward": float("####" in last)}
