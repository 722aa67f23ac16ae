"""mini-swe-agent in the sandbox: the tests decide, a malformed reply does not split the segment; the generated rows and
the independent scorer."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Held, Reply, hold, make_runner, make_task, said

from benchmarks.score_repair import passes as score_passes
from benchmarks.score_repair import rows_of, score
from rally.chat import ChatCodec, tiny_tokenizer
from rally.data import load_conversations
from rally.gateway import BlackBoxAgentLoop
from rally.loops import LoopSpec
from rally.recipes.repair import repositories
from rally.recipes.repair.data import RepairSizes, write_repair
from rally.recipes.repair.hidden_tests import passes_hidden_tests, patch_of
from rally.track import RunFolder
from rally.types import Episode, Segment, StopReason, Task


def passes(source: str, test: str) -> bool:
    """Whether a generated source passes its test, here in the process: both are ours."""
    ((_, text),) = json.loads(source).items()
    scope: dict[str, Any] = {}
    exec(text, scope)
    try:
        return all(scope[name](*given) == wanted for name, given, wanted in json.loads(test)["cases"])
    except Exception:  # noqa: BLE001 - a defect may raise anything
        return False


def test_every_defect_fails_the_tests_and_every_solution_passes() -> None:
    train, test = list(repositories.train_rows(150)), list(repositories.test_rows(30))
    for row in train + test:
        info = row["extra_info"]
        assert passes(info["solution"], info["test"]), info["solution"]
        assert not passes(info["files"], info["test"]), info["files"]
    assert not {r["extra_info"]["files"] for r in train} & {r["extra_info"]["files"] for r in test}
    assert list(repositories.train_rows(5)) == train[:5]
    assert list(repositories.train_rows(5, first=5)) == train[5:10], "the supervised rows follow those of training"


CHEATS = {
    "equal to everything": """
class Same:
    __eq__ = lambda self, other: True
def __getattr__(name):
    return lambda *given: Same()
""",
    "what the program knows": """
import os, sys
frame = sys._getframe()
while frame:
    for text in frame.f_code.co_consts:
        print(text)
    frame = frame.f_back
sys.stdout.flush()
os._exit(0)
""",
    "nothing is compared": """
import builtins, json, os
json.dumps = json.loads = lambda *given: True
builtins.any = builtins.all = lambda *given: True
def __getattr__(name):
    return lambda *given: True
""",
    "nested without end": "print('[' * 100000, flush=True)\nimport os\nos._exit(0)\n",
    "early end": "import os\nos._exit(0)\n",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
def test_code_of_the_agent_takes_no_part_in_the_comparison(source: str) -> None:
    (row,) = repositories.train_rows(1)
    (name,), test = json.loads(row["extra_info"]["files"]), row["extra_info"]["test"]
    assert not passes_hidden_tests({name: source}, test)
    assert not score_passes({name: source}, "", test, False)


def test_a_repair_that_prints_passes_and_a_tuple_is_no_list() -> None:
    test = json.dumps({"module": "m", "cases": [["f", [[1, 2]], [1, 2]], ["g", [{"a": 1}], {"a": 2}]]})
    right = "print('loaded', end='')\ndef f(a): print(a, end=''); return a\ndef g(d): return {'a': 2}\n"
    for source, verdict in ((right, True), (right.replace("return a", "return tuple(a)"), False)):
        assert passes_hidden_tests({"m.py": source}, test) == verdict
        assert score_passes({"m.py": source}, "", test, False) == verdict


def test_held_out_repositories_have_only_functions_that_training_lacks() -> None:
    trained = " ".join(row["prompt"][0]["content"] for row in repositories.train_rows(300))
    sources = {row["data_source"] for row in repositories.test_rows(20)}
    assert sources == {"repair/trained", "repair/held_out"}
    assert not any(family.about.partition("{k}")[0] in trained for family in repositories.HELD_OUT)
    for row in repositories.test_rows(20):
        issue = row["prompt"][0]["content"]
        if row["data_source"] == "repair/held_out":
            assert any(family.about.partition("{k}")[0] in issue for family in repositories.HELD_OUT)


def episode_of(row: dict[str, Any], reward: float, patch: str | None) -> Episode:
    task = Task(
        id=f"{row['data_source']}{row['extra_info']['index']}",
        data_source=row["data_source"],
        prompt=tuple(row["prompt"]),
        extra_info=row["extra_info"],
    )
    extra = {} if patch is None else {"returned": {"patch": patch}}
    segments = (Segment(prompt_ids=(1,)),)
    return Episode(
        id=task.id, group=task.id, task=task, stop_reason=StopReason.STOP, segments=segments, reward=reward, extra=extra
    )


def test_the_independent_scorer_runs_the_tests_on_the_recorded_patch(tmp_path: Path) -> None:
    write_repair(tmp_path, RepairSizes(1, 2, 0), 0, lambda rows, total, label: rows)
    repaired, broken, *held_out = repositories.test_rows(2)
    episodes = []
    for row, reward in ((repaired, 1.0), (broken, 0.0), (held_out[0], 1.0)):
        files, solution = (json.loads(row["extra_info"][name]) for name in ("files", "solution"))
        left = solution if row is not broken else {name: text + "# as it was" for name, text in files.items()}
        assert passes_hidden_tests(left, row["extra_info"]["test"]) == (row is not broken), "as the reward is computed"
        episodes.append(episode_of(row, reward, patch_of(files, left)))
    episodes.append(episode_of(held_out[1], 1.0, None))  # a reward that nothing supports
    folder = RunFolder(tmp_path / "run").create()
    folder.log_episodes(3, episodes, validate=True)
    rows, files = rows_of(tmp_path / "test.parquet"), sorted((folder.path / "episodes").glob("val_*.jsonl"))
    found = score(files, rows, sandboxed=False)
    assert found["repair/trained"] == [(1.0, True), (0.0, False)]
    assert found["repair/held_out"] == [(1.0, True), (1.0, False)]


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
        options = {"agent": "rally.recipes.repair.agent:run"}
        runner = make_runner(codec, script, loops={"black_box": LoopSpec(BlackBoxAgentLoop, options)}, loop="black_box")
        return asyncio.run(hold(runner, make_task(row["prompt"], row=row)))

    def test_a_repair_is_rewarded_and_a_malformed_reply_keeps_the_segment(self) -> None:
        (row,) = repositories.train_rows(1)
        (name, solution), *_ = json.loads(row["extra_info"]["solution"]).items()
        repair = f"cat > {name} <<'EOF'\n{solution}\nEOF"
        submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        held = self.played(row, "I will look.", ("ls",), (repair,), (submit,))
        episode = held.episode
        assert episode.error is None and episode.reward == 1.0
        patch = episode.extra["returned"].pop("patch")
        assert episode.extra["returned"] == {"exit_status": "Submitted", "steps": 4}
        assert patch.startswith(f"--- a/{name}\n+++ b/{name}\n")
        assert len(episode.segments) == 1 and episode.extra["agent"]["rewritten"] == 0
        texts = [turn.text for turn in episode.turns]
        assert "No tool calls found" in texts[1] and name in texts[3]

    def test_an_agent_that_changes_nothing_or_cheats_gets_nothing(self) -> None:
        (row,) = repositories.train_rows(1)
        submit = ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)
        assert self.played(row, submit).episode.reward == 0.0
        (name,) = json.loads(row["extra_info"]["files"])
        early = (f"printf 'import os\\nos._exit(0)\\n' > {name}",)
        assert self.played(row, early, submit).episode.reward == 0.0

    @pytest.mark.parametrize(
        "command",
        [
            "head -c 3000000 /dev/zero | tr '\\0' x > {name}",  # longer than the sandbox returns
            "echo '[1, 2, 3]' > /proc/$PPID/fd/1",
            "kill -9 $PPID",
            "rm {name}; mkdir {name}",
        ],
    )
    def test_nothing_that_a_command_does_voids_the_episode(self, command: str) -> None:
        (row,) = repositories.train_rows(1)
        (name,) = json.loads(row["extra_info"]["files"])
        submit = ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)
        episode = self.played(row, (command.format(name=name),), submit).episode
        assert episode.error is None and episode.reward == 0.0
        if "kill" in command:
            assert "All files are as they were at the beginning." in episode.turns[1].text

    @pytest.mark.parametrize(
        ("command", "shown"),
        [
            ("sleep 300 & echo begun", "begun"),  # holds the pipe
            ("(exec > /dev/null 2>&1; sleep 300) & echo begun", "begun"),
            ("exec > /dev/null 2>&1; sleep 0.2", '"returncode": 0'),  # closes the pipe and goes on
            ("printf '\\303'; sleep 0.1; printf '\\251'", "\u00e9"),  # a character in two writes
            ("yes | head -c 5000000", "4996000 characters left out"),
        ],
    )
    def test_a_command_ends_when_its_own_process_has_ended(self, command: str, shown: str) -> None:
        from rally.recipes.repair.agent import SandboxEnvironment

        environment = SandboxEnvironment({"a.py": "pass"})
        try:
            started = time.monotonic()
            found = environment.execute({"command": command}, timeout=60)
            assert time.monotonic() - started < 45
        finally:
            environment.close()
        assert shown in json.dumps(found, ensure_ascii=False) and found["returncode"] == 0

    def test_files_are_read_as_they_are(self) -> None:
        from rally.recipes.repair.agent import SandboxEnvironment

        environment = SandboxEnvironment({"a.py": "a = 1\n", "b.py": "b = 1\n"})
        try:
            environment.execute({"command": r"sed -i 's/$/\r/' a.py; printf '# \377\n' > b.py"})
            assert environment.left() == {"a.py": "a = 1\r\n", "b.py": "b = 1\n"}
        finally:
            environment.close()

    def test_a_command_without_end_is_ended_and_the_files_stay(self) -> None:
        from rally.recipes.repair.agent import SandboxEnvironment

        environment = SandboxEnvironment({"a.py": "pass"})
        try:
            environment.execute({"command": "echo changed > a.py"})
            found = environment.execute({"command": "yes & sleep 300"}, timeout=1)
            assert found["returncode"] == -1 and found["output"].endswith("(ended after 1 seconds)")
            assert environment.left() == {"a.py": "changed\n"}
            assert "yes" not in environment.execute({"command": "cat /proc/*/comm"})["output"].split()
        finally:
            environment.close()

    def test_conversations_are_played_by_the_agent_itself(self, tmp_path: Path) -> None:
        written = write_repair(tmp_path, RepairSizes(2, 1, 2), 0, lambda rows, total, label: rows)
        assert [(file.path.name, file.rows) for file in written] == [
            ("train.parquet", 2),
            ("test.parquet", 2),
            ("sft.parquet", 2),
        ]
        for talk in load_conversations(tmp_path / "sft.parquet"):
            roles = [message["role"] for message in talk.messages]
            assert roles == ["system", "user", *("assistant", "tool") * 3, "assistant"]
            assert talk.tools is not None and talk.tools[0]["function"]["name"] == "bash"
            assert '"returncode": 0' in talk.messages[3]["content"]
