"""The search agent and the code agent are fine-tuned on output of the real tools, and GRPO improves them."""

import importlib
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from rally.chat import tiny_tokenizer
from rally.data import load_tasks
from rally.demo.training_stages import CourseResult
from rally.retrieval import IndexSpec, build_index
from rally.tools import ToolBox, load_tools
from rally.track import RunConsole, RunFolder
from rally.types import Message, Task, ToolCall, ToolStatus

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TASK = Task(id="t", data_source="d", prompt=({"role": "user", "content": "?"},))


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports a module of an example as its script does, from its own folder."""
    folder, name = request.param
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    return importlib.import_module(name)


facts = pytest.mark.parametrize("example", [("search_agent", "facts")], indirect=True)
sums = pytest.mark.parametrize("example", [("code_agent", "sums")], indirect=True)
worlds = pytest.mark.parametrize("example", [("search_agent", "facts"), ("code_agent", "sums")], indirect=True)


async def said(toolbox: ToolBox, call: dict[str, Any]) -> str | None:
    session = toolbox.open(TASK, "e")
    [result] = await session.run([ToolCall(name=call["name"], arguments=call["arguments"])])
    await session.close()
    assert result.status is ToolStatus.OK
    return result.response.text


def told(conversation: list[Message]) -> tuple[dict[str, Any], str]:
    """The call of a supervised conversation and the tool response in it."""
    _, call, answer, _ = conversation
    return call["tool_calls"][0]["function"], answer["content"]


@facts
async def test_what_is_taught_of_searching_is_what_the_index_says(example: ModuleType, tmp_path: Path) -> None:
    example.write_corpus(tmp_path / "corpus.jsonl")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", IndexSpec())
    config = {"index_path": str(tmp_path / "index"), "topk": 1}
    toolbox = ToolBox(load_tools({"tools": [{"name": "search", "config": config}]}))
    rng = random.Random(0)
    for _ in range(20):
        call, answer = told(example.tell("good", rng))
        assert await said(toolbox, call) == answer
    call, _ = told(example.tell("name_only", rng))
    assert call["arguments"]["query"] in (await said(toolbox, call) or ""), "the right entity, whichever attribute"


@sums
async def test_what_is_taught_of_programs_is_what_the_sandbox_prints(example: ModuleType) -> None:
    toolbox = ToolBox(load_tools({"tools": [{"name": "code_interpreter"}]}))
    rng = random.Random(0)
    for habit in ("good", "off_by_one", "wrong_term"):
        for _ in range(3):
            call, answer = told(example.tell(habit, rng))
            assert await said(toolbox, call) == answer


@worlds
def test_nothing_tested_is_taught(example: ModuleType, tmp_path: Path) -> None:
    example.write_data(tmp_path, 3)
    asked = {
        name: {str(task.prompt[0]["content"]) for task in load_tasks(tmp_path / f"{name}.parquet")}
        for name in ("train", "gate", "test")
    }
    assert len(asked["gate"]) == example.GATE_ROWS and len(asked["test"]) == example.TEST_ROWS
    assert not asked["gate"] & asked["test"]
    rng = random.Random(0)
    taught = {str(example.tell(habit, rng)[0]["content"]) for habit in example.HABITS for _ in range(500)}
    assert not (asked["gate"] | asked["test"]) & (asked["train"] | taught) and taught <= asked["train"]


@facts
def test_a_held_out_entity_is_told_of_by_the_corpus_alone(example: ModuleType) -> None:
    held_out = example.held_out_names()
    assert len(held_out) == example.HELD_OUT and not held_out & {fact.name for fact in example.world().train}
    rng = random.Random(1)
    conversations = [str(example.tell(habit, rng)) for habit in example.HABITS for _ in range(300)]
    assert not [text for text in conversations if any(name in text for name in held_out)]


@worlds
def test_programs_and_names_are_few_tokens(example: ModuleType) -> None:
    tokenizer = tiny_tokenizer(example.WORDS)
    [user, call, *_] = example.tell("good", random.Random(0))
    text = user["content"] + str(call["tool_calls"][0]["function"]["arguments"])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text) / 2


LESS = {"gate": 0.0, "habit_steps": 20, "habit_batch": 16, "rehearsals": 8, "grpo_steps": 6, "prompts": 8}
LEAST = {**LESS, "habit_steps": 1, "habit_batch": 2, "rehearsals": 1, "grpo_steps": 1, "prompts": 2}


def short(agent: ModuleType, lessons: Mapping[str, Any], out: Path, *keys: str) -> CourseResult:
    """The example with smaller batches and fewer steps."""
    with (out / "console.txt").open("w", encoding="utf-8") as paper:
        console = RunConsole(Console(file=paper, width=200, highlight=False))
        overrides = ["actor_rollout_ref.actor.optim.lr=5e-4", "reward.num_workers=1", *keys]
        return agent.learn(out, replace(agent.SETTINGS, **{**LESS, **lessons}), console, overrides)


@pytest.mark.parametrize("name, world", [("search_agent", "facts"), ("code_agent", "sums")], ids=["search", "code"])
def test_all_stages_run_with_the_real_services(
    name: str, world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    monkeypatch.setattr(importlib.import_module(world), "GATE_ROWS", 2)
    monkeypatch.setattr(importlib.import_module(world), "TEST_ROWS", 2)
    monkeypatch.setenv("RETRIEVAL_URL", "")
    agent = importlib.import_module(name)
    few = ("data.max_response_length=24", "actor_rollout_ref.rollout.n=2")
    result = short(agent, {**LEAST, "clean_blocks": (2,), "batch": 2}, tmp_path, *few)
    assert result.before.keys() == result.after.keys() and "sampled" in result.after
    assert len(RunFolder(tmp_path).read_metrics()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, world, lessons",
    [
        ("search_agent", "facts", {"clean_blocks": (130,), "batch": 24}),
        ("code_agent", "sums", {"clean_blocks": (110,), "batch": 16}),
    ],
    ids=["search", "code"],
)
@pytest.mark.long
def test_reward_rises_with_the_real_services(
    name: str, world: str, lessons: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    monkeypatch.setattr(importlib.import_module(world), "GATE_ROWS", 8)
    monkeypatch.setattr(importlib.import_module(world), "TEST_ROWS", 48)
    monkeypatch.setenv("RETRIEVAL_URL", "")  # so that the example's value is removed afterwards
    result = short(importlib.import_module(name), lessons, tmp_path)
    assert result.before["sampled"] < 0.5
    assert result.after["sampled"] > result.before["sampled"] + 0.2
    run = RunFolder(tmp_path)
    last = list(run.read_episodes(run.episode_steps(validate=True)[-1], validate=True))
    answered = [result for episode in last for result in episode.tool_results if result.status is ToolStatus.OK]
    assert len(answered) > len(last) / 2, "what was learned is to use the tool"
