"""Runs an episode of a user's agent through the gateway, and the same exchange through the tool loop."""

import asyncio
from collections.abc import Sequence
from typing import Any

from loop_cases import Held, Reply, hold, make_runner, make_task

from rally.chat import ChatCodec
from rally.gateway import BlackBoxAgentLoop
from rally.loops import LoopSpec, Runner
from rally.tools import BaseTool
from rally.types import Task


def black_box(agent: str, codec: ChatCodec, script: Sequence[Reply] = (), **settings: Any) -> Runner:
    options = {"agent": f"agents_of_users:{agent}"}
    return make_runner(
        codec, script, loops={"black_box": LoopSpec(BlackBoxAgentLoop, options)}, loop="black_box", **settings
    )


def row_of(codec: ChatCodec, question: str = "What is 2+2?") -> Task:
    prompt = [{"role": "user", "content": question}]
    return make_task(prompt, row={"raw_prompt": prompt, "tools": codec.tools})


def held_by(agent: str, codec: ChatCodec, script: Sequence[Reply] = (), **settings: Any) -> Held:
    return asyncio.run(hold(black_box(agent, codec, script, **settings), row_of(codec)))


def held_by_tool_loop(codec: ChatCodec, script: Sequence[Reply], tools: Sequence[BaseTool[Any]]) -> Held:
    return asyncio.run(hold(make_runner(codec, script, tools), row_of(codec)))
