"""An agent loop whose slow episodes are as slow as the schedule allows, and readers of what a run recorded."""

from collections.abc import Iterator
from pathlib import Path

from rally.track import RunFolder
from rally.types import Episode

LOOP_KEY = "actor_rollout_ref.rollout.agent_loop_class=two_turns_loop.TwoTurns"
LOOP = '''
import asyncio
from rally.loops import AgentLoopBase, AgentLoopOutput

class TwoTurns(AgentLoopBase):
    """Two turns. Between them, episodes of every second row wait for the last update before their own, so they are as
    slow as they can be."""

    async def run(self, sampling_params, **row):
        prompt = list(self.codec.encode_prompt(row["prompt"]))
        first = await self.server.generate(prompt, {**sampling_params, "max_tokens": 6})
        step, slow = int(self.context.episode_id[1:7]), sum(map(ord, row["prompt"][0]["content"])) % 2
        while slow and self.server.engine.weight_version < step - 1:
            await asyncio.sleep(0.001)
        ids = [*first.ids, prompt[0]]
        second = await self.server.generate(prompt + ids, {**sampling_params, "max_tokens": 6})
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*ids, *second.ids],
            response_mask=[1] * len(first.ids) + [0] + [1] * len(second.ids),
            num_turns=2,
        )
'''


def write_loop(folder: Path) -> Path:
    """Write the loop as a module; returns the folder, for the path of Python."""
    (folder / "two_turns_loop.py").write_text(LOOP, encoding="utf-8")
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [row.metrics for row in RunFolder(folder).read_metrics() if row.step]


def versions(episode: Episode) -> Iterator[int]:
    """The weight version of each sampled token."""
    for segment in episode.segments:
        recorded = [span.version for span in segment.spans for _ in range(span.start, span.end)]
        assert len(recorded) == segment.sampled, "every sampled token has a version"
        yield from recorded
