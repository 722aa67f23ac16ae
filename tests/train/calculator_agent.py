"""An agent that does not import Rally: OpenAI's SDK, a calculator, and a loop around them."""

import json
from typing import Any

from rally.demo.demo import CALCULATOR
from rally.tools.builtin.calculator import calculate

TOOLS = CALCULATOR.toolbox().schemas()


async def run(row: dict[str, Any], client: Any) -> str:
    llm, messages = client.openai(), list(row["raw_prompt"])
    for _ in range(3):
        completion = await llm.chat.completions.create(model="gpt-5-mini", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            try:
                text = calculate(json.loads(call.function.arguments)["expression"])
            except (KeyError, ValueError) as error:
                text = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        if not message.tool_calls:
            break
    return str(message.content)
