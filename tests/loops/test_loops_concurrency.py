"""Hundreds of episodes run at once: one that waits for a tool does not delay the others."""

import asyncio
import threading
import time
from dataclasses import replace

from loop_cases import Reply, ScriptedEngine, make_job, make_runner, make_task, said, sampling_of

from rally.chat import ChatCodec
from rally.loops import Job
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
    """The tool blocks its thread until all others have finished; if they waited for it, it would never return."""
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


class Attendance(ScriptedEngine):
    """An engine that records which exchanges are expected and which have left."""

    def __init__(self, codec: ChatCodec) -> None:
        super().__init__(codec, ())
        self.book: list[str] = []

    def expect(self, session: str) -> None:
        self.book.append(f"+{session}")

    def dismiss(self, session: str) -> None:
        if f"-{session}" not in self.book:
            self.book.append(f"-{session}")


async def test_what_an_episode_leads_to_is_expected_before_the_episode_leaves(tiny: ChatCodec) -> None:
    """Otherwise a lockstep engine might make a step in between, depending on the time that scoring takes."""
    runner = make_runner(tiny)
    runner.engine = engine = Attendance(tiny)

    async def finish(episode: Episode) -> Episode:
        await asyncio.sleep(0.01)
        engine.book.append(f"scored {episode.id}")
        return episode

    def more(episode: Episode) -> list[Job]:
        return [make_job(number=1)] if episode.id == "e0" else []

    episodes = await runner.run([make_job()], sampling_of(tiny), finish=finish, more=more)
    assert [e.id for e in episodes] == ["e0", "e1"]
    assert engine.book == ["+e0", "scored e0", "+e1", "-e0", "scored e1", "-e1"]
    engine.book.clear()
    await runner.run([make_job()], sampling_of(tiny), finish=finish)
    assert engine.book == ["+e0", "-e0", "scored e0"], "where nothing follows, nobody waits for a score"


async def test_a_baseline_is_greedy_whatever_the_others_are_sampled_with(tiny: ChatCodec) -> None:
    runner = make_runner(tiny)
    sampling = replace(sampling_of(tiny), temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    sampled, greedy = await runner.run([make_job(), replace(make_job(number=1), baseline=True)], sampling)
    assert isinstance(runner.engine, ScriptedEngine)
    asked = {call.session: call.params for call in runner.engine.calls}
    assert (asked["e0"].temperature, asked["e0"].top_p) == (0.7, 0.9) and not sampled.baseline
    assert greedy.baseline and asked["e1"].temperature == 0
    assert (asked["e1"].top_p, asked["e1"].top_k, asked["e1"].min_p) == (1.0, -1, 0.0)
    assert asked["e1"].stop_ids == asked["e0"].stop_ids
