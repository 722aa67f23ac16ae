"""mini-swe-agent in the sandbox: the tests decide, a malformed reply does not split the segment; the generated rows."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Held, Reply, hold, make_runner, make_task, said

from rally.chat import ChatCodec, tiny_tokenizer
from rally.gateway import BlackBoxAgentLoop
from rally.loops import LoopSpec

FOLDER = Path(__file__).parents[2] / "examples" / "repair_agent"
sys.path.insert(0, str(FOLDER))
import repositories  # noqa: E402


def passes(source: str, test: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a generated source passes its test, here in the process: both are ours."""
    (name, text), *_ = json.loads(source).items()
    module: Any = type(sys)(name.removesuffix(".py"))
    exec(text, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        exec(test, {})
    except Exception:  # noqa: BLE001 - a defect may raise anything
        return False
    return True


def test_every_defect_fails_the_tests_and_every_solution_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = (list(repositories.rows(count, split)) for count, split in ((150, "train"), (30, "test")))
    for row in train + test:
        info = row["extra_info"]
        assert passes(info["solution"], info["test"], monkeypatch), info["solution"]
        assert not passes(info["files"], info["test"], monkeypatch), info["files"]
    assert not {r["extra_info"]["files"] for r in train} & {r["extra_info"]["files"] for r in test}
    assert list(repositories.rows(5, "train")) == train[:5]


class TestAgent:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("minisweagent", reason="needs mini-swe-agent")

    def played(self, row: dict[str, Any], *turns: Any) -> Held:
        codec = ChatCodec(tiny_tokenizer(), "hermes")
        script = [
            Reply(said(codec, turn) if isinstance(turn, str) else said(codec, "", ("bash", {"command": turn[0]})))
            for turn in turns
        ]
        options = {"agent": f"{FOLDER / 'agent.py'}:run"}
        runner = make_runner(codec, script, loops={"black_box": LoopSpec(BlackBoxAgentLoop, options)}, loop="black_box")
        return asyncio.run(hold(runner, make_task(row["prompt"], row=row)))

    def test_a_repair_is_rewarded_and_a_malformed_reply_keeps_the_segment(self) -> None:
        (row,) = repositories.rows(1, "train")
        (name, solution), *_ = json.loads(row["extra_info"]["solution"]).items()
        repair = f"cat > {name} <<'EOF'\n{solution}\nEOF"
        submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        held = self.played(row, "I will look.", ("ls",), (repair,), (submit,))
        episode = held.episode
        assert episode.error is None and episode.reward == 1.0
        assert episode.extra["returned"] == {"exit_status": "Submitted", "steps": 4}
        assert len(episode.segments) == 1 and episode.extra["agent"]["rewritten"] == 0
        texts = [turn.text for turn in episode.turns]
        assert "No tool calls found" in texts[1] and name in texts[3]

    def test_an_agent_that_changes_nothing_or_cheats_gets_nothing(self) -> None:
        (row,) = repositories.rows(1, "train")
        submit = ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)
        assert self.played(row, submit).episode.reward == 0.0
        (name,) = json.loads(row["extra_info"]["files"])
        early = (f"printf 'import os\\nos._exit(0)\\n' > {name}",)
        assert self.played(row, early, submit).episode.reward == 0.0
