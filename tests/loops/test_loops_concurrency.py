"""Hundreds of episodes run at once: waiting for a tool costs the others nothing."""

import asyncio
import threading
import time

from loop_cases import Reply, ScriptedEngine, make_job, make_runner, make_task, said, sampling_of

from rally.chat import ChatCodec
from rally.tools import function_tool
from rally.types import Episode, StopReason


async def test_three_hundred_episodes_wait_for_their_tools_together(tiny: ChatCodec) -> None:
    async def pause() -> str:
        await asyncio.sleep(0.05)
        return "ok"

    runner = make_runner(tiny, [Reply(said(tiny, "", ("pause", {})))] * 2, [function_tool(pause)])
    jobs = [make_job(number=i) for i in range(300)]
    began = time.perf_counter()
    episodes = await runner.run(jobs, sampling_of(tiny))
    elapsed = time.perf_counter() - began
    assert [e.id for e in episodes] == [job.episode_id for job in jobs], "in the order of the jobs"
    assert {e.stop_reason for e in episodes} == {StopReason.STOP}
    assert {len(e.tool_results) for e in episodes} == {2}
    assert elapsed < 300 * 2 * 0.05 / 3, "one at a time they would wait 30 s for their tools alone"


async def test_a_slow_tool_delays_nobody_else(tiny: ChatCodec) -> None:
    """The tool blocks its thread until all others have finished: it would wait in vain if they waited for it."""
    others_done = threading.Event()
    done: list[str] = []

    @function_tool
    def block() -> str:
        return "freed" if others_done.wait(timeout=20) else "nobody came"

    @function_tool
    def quick() -> str:
        return "ok"

    runner = make_runner(
        tiny, [Reply(said(tiny, "", ("block", {}))), Reply(said(tiny, "", ("quick", {})))], [block, quick]
    )
    slow = make_job(make_task(extra_info={"tool_selection": ["block", "quick"]}), 0)
    others = [make_job(make_task(extra_info={"tool_selection": ["quick"]}), i) for i in range(1, 31)]

    async def finish(episode: Episode) -> Episode:
        done.append(episode.id)
        if len(done) == len(others):
            others_done.set()
        return episode

    episodes = await runner.run([slow, *others], sampling_of(tiny), finish=finish)
    assert done[-1] == "e0"
    assert episodes[0].tool_results[0].response.text == "freed"
    assert isinstance(runner.engine, ScriptedEngine)
    assert [call.session for call in runner.engine.calls].index("e0") < 31, "it had begun like the others"
    assert runner.engine.calls[-1].session == "e0"
