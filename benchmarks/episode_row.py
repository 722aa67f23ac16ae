"""Row 3: episodes that wait for a slow tool, all at once against one after the other.

It uses the real tool loop, runner and engine. The policy is the demo's model before degradation, which calls its
calculator in every episode. The calculator sleeps before it answers, like a tool behind a network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.demo_models import DemoModels
from benchmarks.engine_rows import forget
from benchmarks.measure import Row, alternate
from rally.chat import ChatCodec
from rally.data import load_tasks
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.loops import Job, LoopSettings, Runner
from rally.models.load import load_model, load_tokenizer
from rally.tools import ToolBox, ToolResponse
from rally.tools.builtin.calculator import Calculator
from rally.types import Episode, SamplingParams

EPISODES = 64
TOOL_SECONDS = 0.2


class SlowCalculator(Calculator):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        await asyncio.sleep(TOOL_SECONDS)
        return await super().execute(instance_id, parameters, **kwargs)


def episodes_row(demo: DemoModels) -> Row:
    toolbox = ToolBox([SlowCalculator()])
    codec = ChatCodec(load_tokenizer(str(demo.caller)), "hermes", toolbox.schemas())
    engine = EmbeddedEngine(load_model(str(demo.caller)), EngineSettings(max_model_len=320))
    runner = Runner(
        engine=engine,
        codec=codec,
        toolbox=toolbox,
        settings=LoopSettings(response_length=256, max_assistant_turns=3),
        default_loop="tool_agent",
    )
    tasks = load_tasks(demo.data / "gate.parquet")
    jobs = [Job(task=tasks[i], episode_id=str(i), group=str(i), seed=i) for i in range(EPISODES)]
    sampling = SamplingParams(temperature=0.0, max_tokens=256, stop_ids=codec.stop_ids)
    counts: list[int] = []

    def timed(batches: Sequence[Sequence[Job]]) -> float:
        forget(engine)
        began = time.perf_counter()
        episodes = asyncio.run(_hold(runner, batches, sampling))
        seconds = time.perf_counter() - began
        counts.append(sum(len(e.tool_results) for e in episodes))
        return seconds

    timings = alternate(lambda: timed([jobs]), lambda: timed([[job] for job in jobs]))
    asyncio.run(engine.close())
    assert len(set(counts)) == 1, "greedy episodes make the same calls, alone or together"
    return Row(
        what=f"{EPISODES} episodes of the demo agent with a tool that takes {TOOL_SECONDS} s",
        against="one episode after the other",
        goal=10.0,
        timings=timings,
        note=f"{counts[0]} tool calls each way, tool loop, runner and engine as in training",
    )


async def _hold(runner: Runner, batches: Sequence[Sequence[Job]], sampling: SamplingParams) -> list[Episode]:
    return [episode for batch in batches for episode in await runner.run(batch, sampling)]
