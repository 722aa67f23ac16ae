"""Generated tool use: the right calls earn 1 in every kind, and dialogues end at the first wrong user turn."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.data import load_conversations
from rally.envs import EnvError, EnvTurn
from rally.recipes.tool_use.data import conversation, conversations, write_tool_use
from rally.recipes.tool_use.dialogues import dialogue
from rally.recipes.tool_use.environment import DIALOGUES, KINDS, MOST_STEPS, ToolUse
from rally.recipes.tool_use.functions import FUNCTIONS, HELD_OUT
from rally.recipes.tool_use.single_turn import WantedCall, right_calls, same_value, single_task
from rally.recipes.tool_use.worlds import Depot
from rally.tools.schema import openai_schema
from rally.types import ToolCall


def turn(*calls: tuple[str, dict[str, Any]]) -> EnvTurn:
    return EnvTurn(text="", calls=tuple(ToolCall(name=n, arguments=a, id=str(i)) for i, (n, a) in enumerate(calls)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_right_replies_earn_1_and_are_tools_of_the_task(kind: str, seed: int) -> None:
    talk = conversation(kind, seed)  # asserts that the environment gave 1
    offered = {openai_schema(tool, "a test")["function"]["name"] for tool in talk["tools"]}
    called = {c["function"]["name"] for m in talk["messages"] for c in m.get("tool_calls", ())}
    asked = [m["content"] for m in talk["messages"] if m["role"] == "user"]
    later = {json.loads(text.splitlines()[0])["name"] for text in asked if text.startswith("{")}
    assert called <= offered | later and not later & offered
    assert talk == conversation(kind, seed)


@pytest.mark.parametrize("kind", ["single", "multiple", "parallel", "parallel_multiple", "irrelevance"])
def test_wrong_calls_of_a_single_turn_earn_nothing(kind: Any) -> None:
    for seed in range(40):
        env = ToolUse(kind)
        _, tools = env.reset({}, seed)
        right = [(call.name, call.arguments) for call in single_task(kind, seed, held_out=False).calls]
        assert env.step(turn(*reversed(right)))[1] == 1.0, "in any order"
        wrong: list[list[Any]] = [[*right, (tools[0]["function"]["name"], {})]]
        if right:
            name, arguments = right[0]
            rest = right[1:]
            wrong += [[], rest, [(name, {**arguments, "other": 1}), *rest], [("unknown", arguments), *rest]]
            wrong += [[(name, {k: v for k, v in arguments.items() if k != first}), *rest] for first in [*arguments][:1]]
        for calls in wrong:
            assert env.step(turn(*calls))[1:3] == (0.0, True), calls


def test_values_are_compared_as_they_were_written() -> None:
    for value, wanted in (("see you at NOON.", "See you at noon"), (3, 3.0), (["A", "b"], ["a", "B"])):
        assert same_value(value, wanted)
    for value, wanted in ((1, True), (True, 1), ("3", 3), (3, "3"), (["a"], ["a", "b"]), (None, 1), ({}, "x")):
        assert not same_value(value, wanted), (value, wanted)
    calls = [WantedCall("f", {"a": 1}, {"unit": "celsius"})]
    for arguments, right in (
        ({"a": 1}, True),
        ({"a": 1, "unit": "celsius"}, True),
        ({"a": 1, "unit": "kelvin"}, False),
        ({"unit": "celsius"}, False),
    ):
        assert right_calls([ToolCall(name="f", arguments=arguments)], calls) == right
    assert right_calls([ToolCall(name="f", arguments={"a": 1})] * 2, calls) is False


def test_functions_that_are_held_out_occur_in_no_training_task() -> None:
    names = {f.name for f in FUNCTIONS if f.domain in HELD_OUT}
    for kind in ("multiple", "parallel", "irrelevance"):
        for seed in range(60):
            for held_out in (False, True):
                tools = json.dumps(single_task(kind, seed, held_out).tools)  # type: ignore[arg-type]
                abouts = [f.about in tools for f in FUNCTIONS if (f.name in names) != held_out]
                assert not any(abouts), tools
    with pytest.raises(EnvError, match="held_out chooses functions of single-turn tasks"):
        ToolUse("dialogue", held_out=True)
    with pytest.raises(EnvError, match="no kind 'other' of tool use; the kinds are single, "):
        ToolUse("other")


def test_a_dialogue_ends_at_its_first_wrong_user_turn() -> None:
    seed = next(s for s in range(99) if len(dialogue(s, False).turns) == 3 and dialogue(s, False).turns[0].calls)
    played = dialogue(seed, False)
    env = ToolUse("dialogue")
    env.reset({}, seed)
    for call in played.turns[0].calls:
        env.step(turn(call))
    messages, reward, done, _ = env.step(turn())
    assert reward == pytest.approx(1 / 3) and not done and messages[0]["content"] == played.turns[1].text  # type: ignore[index,call-overload]
    _, reward, done, info = env.step(turn())
    assert (reward, done) == (0.0, True) and info == {"solved": False, "user_turns_right": 1, "user_turns": 3}


def test_a_call_where_nothing_can_be_done_is_wrong_and_calls_without_end_are_stopped() -> None:
    env = ToolUse("dialogue_gaps")
    _, tools = env.reset({}, 0)
    read = next(t["function"]["name"] for t in tools if t["function"]["name"] in ("list_bin", "list_notes"))
    arguments = {} if read == "list_notes" else {"bin": "A1"}
    assert env.step(turn((read, arguments)))[2] is False
    assert env.step(turn())[1:3] == (0.0, True), "it had to say that it cannot"
    env = ToolUse("dialogue")
    env.reset({}, 0)
    ends = [env.step(turn((read, arguments)))[2] for _ in range(MOST_STEPS + 1)]
    assert ends == [False] * MOST_STEPS + [True]


def test_what_only_is_asked_must_be_read() -> None:
    seed = next(s for s in range(999) if [c[0] for c in dialogue(s, False).turns[0].calls] == ["count_items"])
    env = ToolUse("dialogue")
    env.reset({}, seed)
    assert env.step(turn())[1:3] == (0.0, True)


def test_a_world_refuses_without_changing() -> None:
    world = Depot({"A1": {"bolts": 3}, "B1": {}})
    for name, arguments in (
        ("remove_items", {"bin": "A1", "item": "bolts", "count": 4}),
        ("move_items", {"item": "bolts", "source": "A1", "target": "Z9", "count": 1}),
        ("add_items", {"bin": "A1", "item": "bolts", "count": True}),
        ("add_items", {"bin": "A1", "item": "bolts", "count": 1, "colour": "red"}),
        ("count_items", {"bin": "A1"}),
    ):
        assert "error" in json.loads(world.call(name, arguments))
    assert world.state == {"A1": {"bolts": 3}, "B1": {}}
    assert json.loads(world.call("move_items", {"item": "bolts", "source": "A1", "target": "B1", "count": 3}))
    assert world.state == {"A1": {}, "B1": {"bolts": 3}}


def test_the_supervised_conversations_load(tmp_path: Path) -> None:
    [file] = write_tool_use(tmp_path, 14, 0, lambda rows, total, label: rows)
    loaded = load_conversations(file.path)
    assert [list(talk.messages) for talk in loaded] == [talk["messages"] for talk in islice(conversations(0), 14)]
    assert len(KINDS) == 7 and set(DIALOGUES) <= set(KINDS)
