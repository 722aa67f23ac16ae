"""Many agents at once: each request belongs to its own episode."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from gateway_cases import black_box
from loop_cases import Reply, ScriptedEngine, check_tiling, make_job, make_task, said, sampling_of, tiny_codec

from rally.loops import Runner
from rally.types import Episode, Generation, SamplingParams, StopReason

CODEC = tiny_codec()
EPISODES = 64


@dataclass
class Parrot(ScriptedEngine):
    """Repeats the name that it received last, after a delay that depends on the name."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        name = re.findall(r"n\d+ \d", self.codec.decode(prompt_ids))[-1]
        one = ScriptedEngine(self.codec, [Reply(said(self.codec, name), seconds=int(name[1:-2]) % 7 / 500)])
        return await one.generate(prompt_ids, params, session=session)


def runner_of(agent: str) -> Runner:
    runner = black_box(agent, CODEC)
    runner.engine = Parrot(CODEC, [])
    return runner


def held(runner: Runner) -> list[Episode]:
    names = [f"n{number}" for number in range(EPISODES)]
    jobs = [make_job(make_task(row={"name": name}), number) for number, name in enumerate(names)]
    return asyncio.run(runner.run(jobs, sampling_of(CODEC)))


@pytest.mark.parametrize("agent", ["echoes_its_name", "echoes_its_name_blocking"])
def test_episodes_that_run_at_once_do_not_mix(agent: str) -> None:
    for number, episode in enumerate(held(runner_of(agent))):
        assert episode.stop_reason is StopReason.STOP and episode.extra["agent_answer"] == f"n{number}"
        spoken = [turn.text for turn in episode.turns]
        assert spoken == [f"n{number} {turn}" for turn in (0, 1, 1, 2, 2)]
        (segment,) = episode.segments
        assert set(re.findall(r"n(\d+)", CODEC.decode(segment.ids))) == {str(number)}
        check_tiling(episode)


def test_an_episode_that_is_cancelled_takes_its_agent_and_its_request_along() -> None:
    runner = black_box("asks_ten_times", CODEC, [Reply(said(CODEC, "late"), seconds=3600.0)])

    def asking() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if "_answer_request" in repr(task)]

    async def cancelled() -> None:
        running = asyncio.ensure_future(runner.run([make_job()], sampling_of(CODEC)))
        while not asking():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0)
        assert not asking(), "a request outlived its episode"

    asyncio.run(asyncio.wait_for(cancelled(), 20))
