"""Fault drills in training: whatever a tool does, the step ends, no episode is lost or zeroed, and the counts are
right.

Real runs, from a configuration to metrics and episodes on disk. Only the policy's replies are scripted, so that every
episode makes the calls of the drill.
"""

import asyncio
import random
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from search_cases import Server, write_corpus
from train_cases import Paper, run_config

from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines.embedded import EmbeddedEngine
from rally.retrieval import IndexSpec, build_index
from rally.runs.train import train
from rally.track import RunFolder
from rally.types import Episode, Generation, SamplingParams, WeightSpan

EPISODES = 12  # three prompts, four samples of each
Script = Callable[[int, int], list[dict[str, Any]]]
"""The arguments of the calls that an episode makes in a turn; none ends it with an answer."""


class Stepped(NamedTuple):
    metrics: dict[str, float]
    episodes: list[Episode]
    said: str

    def texts(self) -> list[str]:
        return [result.response.text or "" for episode in self.episodes for result in episode.tool_results]


def number(episode_id: str) -> int:
    """0 to 11, from an id such as t000001-00002-3."""
    _, place, sample = episode_id.split("-")
    return int(place) * 4 + int(sample)


class Speaker:
    """Stands in for the sampling of an engine."""

    def __init__(self, tool: str, script: Script) -> None:
        self.tool, self.script = tool, script
        self.codec = ChatCodec(tiny_tokenizer(), "hermes")
        self.turns: Counter[str] = Counter()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        assert session is not None
        calls = self.script(number(session), self.turns[session])
        self.turns[session] += 1
        message: dict[str, Any] = {"role": "assistant", "content": "" if calls else f"#### {number(session)}"}
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": self.tool, "arguments": arguments}} for arguments in calls
            ]
        ids = self.codec.encode_assistant(message)
        assert len(ids) <= params.max_tokens, "a drill is not about lengths"
        return Generation(ids=ids, logprobs=(-1.0,) * len(ids), finish="stop", spans=(WeightSpan(0, 0, len(ids)),))


@pytest.fixture
def drill(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stepped]:
    def one_step(tools: str, script: Script, *overrides: str, tool: str = "drill", code: str = "") -> Stepped:
        (tmp_path / f"drill_{tmp_path.name}.py").write_text(textwrap.dedent(code), encoding="utf-8")
        (tmp_path / "tools.yaml").write_text(tools.replace("MODULE", f"drill_{tmp_path.name}"), encoding="utf-8")
        speaker = Speaker(tool, script)
        monkeypatch.setattr(EmbeddedEngine, "generate", lambda _, *args, **kwargs: speaker.generate(*args, **kwargs))
        paper, rollout = Paper(), "actor_rollout_ref.rollout."
        config = run_config(
            home,
            tmp_path / "run",
            f"{rollout}multi_turn.tool_config_path={tmp_path / 'tools.yaml'}",
            f"{rollout}agent_loop_config.tools=[{tool}]",
            f"{rollout}multi_turn.max_tool_response_length=40",
            f"{rollout}max_turns=4",
            "data.max_response_length=220",
            "data.val_files=[]",
            "trainer.startup_check=false",  # the speaker is no model
            f"{rollout}mismatch_limit=1000",
            "trainer.total_training_steps=1",
            *(rollout + override for override in overrides),
        )
        train(config, paper.console)
        folder = RunFolder(tmp_path / "run")
        [row] = folder.read_metrics()
        return Stepped(row.metrics, sorted(folder.read_episodes(1), key=lambda e: number(e.id)), paper.text)

    return one_step


def check_nothing_lost(stepped: Stepped) -> None:
    """Every episode is recorded, scored by its own reply, in a batch that was trained on."""
    assert [number(e.id) for e in stepped.episodes] == list(range(EPISODES))
    for episode in stepped.episodes:
        assert "attempts" not in episode.extra and episode.error is None
        assert episode.reward == episode.reward_info["score"]
    metrics = stepped.metrics
    assert metrics["episodes/count"] == EPISODES and metrics["episodes/unscored"] == 0
    assert [metrics[f"failures/{kind}"] for kind in ("loop", "reward", "dropped_groups", "set_aside")] == [0.0] * 4
    assert metrics["actor/grad_norm"] > 0
    results = [result for episode in stepped.episodes for result in episode.tool_results]
    assert metrics["tool/calls"] == len(results)


FAULTS = """
    import asyncio
    import sys
    import time

    from rally.tools import BaseTool, run_process

    FLOOD = "x" * 10_000_000


    class Drill(BaseTool):
        open = 0

        async def create(self, instance_id=None, **kwargs):
            Drill.open += 1
            return instance_id, None

        async def release(self, instance_id, **kwargs):
            Drill.open -= 1

        async def execute(self, instance_id, parameters, **kwargs):
            return await getattr(self, parameters["how"])()

        async def fine(self):
            return "fine"

        async def hang(self):
            await asyncio.sleep(600)

        async def block(self):
            from rally.tools.invoke import call
            await call(time.sleep, 20)

        async def crash(self):
            ran = await run_process(["sh", "-c", "kill -9 $$"])
            return {"error": f"it ended with {ran.code}"}

        async def flood(self):
            return FLOOD

        async def latin(self):
            return b"caf\\xe9"

        async def surrogate(self):
            return "half \\ud83d"

        async def leave(self):
            sys.exit(3)
"""
FAULT_SCHEMA = "{name: drill, parameters: {type: object, properties: {how: {type: string}}, required: [how]}}"


@pytest.mark.drill(
    "reliability",
    "Tools that raise, hang, return garbage or die, all in one step",
    "The step ends, no episode is lost, and the counts are right",
)
def test_every_fault_at_once(drill: Callable[..., Stepped]) -> None:
    plan = [
        "fine",
        "hang",
        "block",
        "crash",
        "flood",
        "latin",
        "surrogate",
        "leave",
        "fine",
        "hang",
        "flood",
        "nothing",
    ]

    def script(episode: int, turn: int) -> list[dict[str, Any]]:
        return [{"how": plan[episode]}] if turn == 0 else []

    tools = (
        f"tools: [{{class_name: MODULE.Drill, process: false, limits: {{timeout: 15}}, tool_schema: {FAULT_SCHEMA}}}]"
    )
    stepped = drill(tools, script, code=FAULTS)
    check_nothing_lost(stepped)
    flood = "x" * 20 + "[9999960 characters cut]" + "x" * 20
    late = "Error: drill did not answer within 15 seconds."
    gone = "Error: AttributeError: 'Drill' object has no attribute 'nothing'"
    gone = gone[:20] + f"[{len(gone) - 40} characters cut]" + gone[-20:]
    crashed = '{"error": "it ended with -9"}'
    exited = "Error: SystemExit: 3"
    ends = ["fine", late, late, crashed, flood, "caf\ufffd", "half ?", exited, "fine", late, flood, gone]
    assert stepped.texts() == ends
    told = stepped.metrics
    assert (told["tool/ok"], told["tool/timeout"], told["tool/error"]) == (6, 3, 3)
    assert (told["tool/drill/calls"], told["tool/drill/timeouts"], told["tool/drill/truncations"]) == (12, 3, 3)
    assert told["failures/outage"] == told["tool/drill/outage_episodes"] == 3, "late calls are not the policy's fault"
    assert told["tool/abandoned"] == 1, "the thread that still sleeps"
    assert told["tool/release_errors"] == told["tool/create_errors"] == told["tool/cancelled"] == 0
    assert told["stop/stop"] == 1.0
    [module] = [module for name, module in sys.modules.items() if name.startswith("drill_test_every_fault")]
    assert module.Drill.open == 0, "all twelve were released"


@pytest.mark.drill("reliability", "Tools end their process in a training step", "The step ends with all its episodes")
def test_tools_that_end_their_process_do_not_end_the_run(drill: Callable[..., Stepped]) -> None:
    ways = ["exit", "segfault", "interrupt", "fine"]

    def script(episode: int, turn: int) -> list[dict[str, Any]]:
        return [{"how": ways[episode % 4]}] if turn == 0 else []

    code = """
    import ctypes, os

    def lethal(how: str) -> str:
        if how == "exit":
            os._exit(9)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "interrupt":
            raise KeyboardInterrupt
        return "fine"
    """
    stepped = drill("tools: [{class_name: MODULE.lethal}]", script, code=code, tool="lethal")
    check_nothing_lost(stepped)
    told = stepped.metrics
    assert told["tool/lethal/calls"] == EPISODES and told["tool/ok"] + told["tool/error"] == EPISODES
    assert told["tool/error"] >= EPISODES // 2, "calls beside one that ends the process may be lost with it"


@pytest.mark.drill(
    "reliability", "Three in ten tool calls fail", "The step ends and the episodes say which calls failed"
)
def test_three_in_ten_calls_fail(drill: Callable[..., Stepped]) -> None:
    rng = random.Random(5)
    fails = {(episode, turn): rng.random() < 0.3 for episode in range(EPISODES) for turn in range(3)}

    def script(episode: int, turn: int) -> list[dict[str, Any]]:
        if turn == 2:
            return []
        return [{"fail": fails[episode, turn], "n": turn}, {"fail": fails[episode, turn], "n": turn}]

    code = """
    def flaky(fail: bool, n: int) -> str:
        if fail:
            raise ConnectionResetError("try again")
        return f"{n}"
    """
    tools = "tools: [{class_name: MODULE.flaky, limits: {cache: true}, on_outage: count}]"
    stepped = drill(tools, script, code=code, tool="flaky")
    check_nothing_lost(stepped)
    failed = 2 * sum(fails[episode, turn] for episode in range(EPISODES) for turn in range(2))
    told = stepped.metrics
    assert 0 < failed < 48 and told["tool/flaky/calls"] == 48
    assert (told["tool/unavailable"], told["tool/ok"]) == (failed, 48 - failed)
    assert told["tool/flaky/redundant"] == 24, "each call was made twice"
    assert told["tool/flaky/success_rate"] == pytest.approx(1 - failed / 48)
    assert stepped.texts().count("Error: ConnectionResetError: try again") == failed, "the model is told"


@pytest.mark.drill(
    "reliability",
    "A retrieval server dies and comes back within a step",
    "Searches wait for it and the step is complete",
)
def test_a_retrieval_server_killed_and_restarted_in_mid_step(
    drill: Callable[..., Stepped], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("wiki")
    build_index(write_corpus(folder / "corpus.jsonl"), folder / "index", IndexSpec())
    server = Server(folder / "index")
    server.wait_ready()
    second_turns = 0

    def script(episode: int, turn: int) -> list[dict[str, Any]]:
        nonlocal second_turns
        if turn == 1:
            second_turns += 1
            if second_turns == 4:
                server.kill()
                asyncio.get_running_loop().call_later(0.5, server.launch)
        return [{"query": "paris"}] if turn < 2 else []

    tools = f"tools: [{{name: search, config: {{retrieval_service_url: {server.url}, topk: 1}}}}]"
    try:
        stepped = drill(tools, script, "multi_turn.max_tool_response_length=10", tool="search")
    finally:
        server.kill()
    check_nothing_lost(stepped)
    told = stepped.metrics
    assert (told["tool/search/calls"], told["tool/ok"], told["tool/search/redundant"]) == (24, 24, 12)
    attempts = [r.metrics["attempts"] for e in stepped.episodes for r in e.tool_results]
    assert sum(n > 1 for n in attempts) >= 9, "whoever came after the kill had to ask again"
    [line] = [line for line in stepped.said.splitlines() if line.startswith("warning: episodes wait longer for tools")]
    assert "most of all for 'search': 24 calls, latency p50" in line and line.endswith(
        "set limits.cache=true if equal calls have equal answers"
    )


@pytest.mark.drill("reliability", "A step passes its deadline", "Episodes end with what they have")
def test_at_the_step_s_deadline_episodes_end_with_what_they_have(drill: Callable[..., Stepped]) -> None:
    code = """
    import asyncio

    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"
    """

    def script(episode: int, turn: int) -> list[dict[str, Any]]:
        slow = episode % 4 == 3
        return [{"seconds": 600 if slow and turn == 1 else 0.01}] if turn < 2 else []

    began = time.perf_counter()
    stepped = drill("tools: [{class_name: MODULE.wait}]", script, "step_timeout=1.5", code=code, tool="wait")
    assert time.perf_counter() - began < 30
    check_nothing_lost(stepped)
    assert [e.stop_reason.value for e in stepped.episodes] == ["stop", "stop", "stop", "deadline"] * 3
    assert stepped.metrics["stop/deadline"] == 0.25 and stepped.metrics["tool/cancelled"] == 3
    late = stepped.episodes[3]
    assert [turn.role for turn in late.turns] == ["assistant", "tool", "assistant"]
    assert late.segments[0].sampled == late.turns[0].end + late.turns[2].end - late.turns[2].start
    assert [call.arguments for call in late.turns[2].tool_calls] == [{"seconds": 600}], "it asked, and is told nothing"
