"""BFCL: oracle calls score 1 and wrong ones 0, by the package's own checkers; worlds are apart; calls are literals."""

import ast
import json
from typing import Any

import pytest

from rally.envs import EnvTurn
from rally.types import ToolCall

bfcl = pytest.importorskip("bfcl_eval", reason="needs bfcl-eval") and __import__(
    "rally.envs.adapters.bfcl", fromlist=["bfcl"]
)
FIRST = 2  # tasks of each category; all 60 first ones were played once (docs/environments.md)


def call_of(source: str, functions: list[Any]) -> ToolCall:
    """A call of the ground truth, with positional arguments by name."""
    node: Any = ast.parse(source, mode="eval").body
    name = ast.unparse(node.func)
    arguments = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    if node.args:
        (names,) = [list(f["parameters"]["properties"]) for f in functions if f["name"] == name]
        arguments |= dict(zip(names, map(ast.literal_eval, node.args), strict=False))
    return ToolCall(name=name, id="c", arguments=arguments)


def played(env: Any, row: Any, oracle: bool) -> tuple[float | None, bool]:
    env.reset(row, 0)
    withheld = [f for some in env.entry.get("missed_function", {}).values() for f in some]
    functions = env.entry["function"] + withheld
    for turn in bfcl._truths(env.category)[row["entry"]]:
        for source in turn if oracle else ():
            _, reward, done, _ = env.step(EnvTurn(text="", calls=(call_of(source, functions),)))
            assert reward is None and not done
        _, reward, done, _ = env.step(EnvTurn(text="I cannot."))
    env.close()
    return reward, done


@pytest.mark.parametrize("category", bfcl.MULTI_TURN[:3])
def test_the_oracle_of_a_multi_turn_task_scores_1_and_silence_0(category: str) -> None:
    for row in bfcl.make(category).tasks()[:FIRST]:
        assert played(bfcl.make(category), row, True) == (1.0, True)
        assert played(bfcl.make(category), row, False) == (0.0, True)
    held = vars(bfcl._multi_turn("multi_turn_utils"))
    assert not [name for name in held if name.startswith("rally")], "worlds are deleted"


def test_withheld_functions_are_added_with_a_message() -> None:
    for row in bfcl.make("multi_turn_miss_func").tasks()[:FIRST]:
        env = bfcl.make("multi_turn_miss_func")
        _, tools = env.reset(row, 0)
        while not env.added_tools:
            messages, _, done, _ = env.step(EnvTurn(text="ok"))
            assert not done
        name = env.added_tools[0]["function"]["name"]
        assert name in messages[0]["content"] and messages[0]["content"].endswith("What about now?")
        assert name not in {tool["function"]["name"] for tool in tools}
        env.close()


def test_two_episodes_of_one_task_have_their_own_worlds() -> None:
    row = bfcl.make("multi_turn_base").tasks()[0]
    make = EnvTurn(text="", calls=(ToolCall(name="mkdir", id="c", arguments={"dir_name": "fresh"}),))
    answers = []
    for _ in range(2):
        env = bfcl.make("multi_turn_base")
        env.reset(row, 0)
        answers.append(env.step(make)[0][0]["content"])
    assert answers[0] == answers[1] and "exists" not in answers[0]
    assert "exists" in env.step(make)[0][0]["content"]


@pytest.mark.parametrize("category", [*bfcl.AST, *bfcl.RELEVANCE])
def test_single_turn_categories_are_scored_by_the_package(category: str) -> None:
    for row in bfcl.make(category).tasks()[: 1 if category == "simple_java" else FIRST]:
        env = bfcl.make(category)
        _, tools = env.reset(row, 0)
        if category in bfcl.RELEVANCE:
            wanted = "irrelevance" not in category
            called = (ToolCall(name=tools[0]["function"]["name"], id="c"),) if tools else ()
            assert env.step(EnvTurn(text="no"))[1] == float(not wanted)
            assert not called or env.step(EnvTurn(text="", calls=called))[1] == float(wanted)
            continue
        truth = bfcl._truths(category)[row["entry"]]
        right = [(name.replace(".", "_"), _first(args)) for one in truth for name, args in one.items()]
        if "java" in category:  # values are texts in the syntax of the language
            right = [(name, {k: v if isinstance(v, str) else json.dumps(v) for k, v in a.items()}) for name, a in right]
        calls = tuple(ToolCall(name=name, id=str(i), arguments=args) for i, (name, args) in enumerate(right))
        assert env.step(EnvTurn(text="", calls=calls))[1:3] == (1.0, True), row
        wrong = (ToolCall(name=calls[0].name, id="0", arguments={"zz": 1}), *calls[1:])
        assert env.step(EnvTurn(text="", calls=wrong))[1] == 0.0
        assert env.step(EnvTurn(text="none"))[1] == 0.0


def _first(arguments: dict[str, Any]) -> dict[str, Any]:
    """The first accepted value of each argument; "" means that it may be left out."""

    def value(accepted: Any) -> Any:
        if isinstance(accepted, dict):
            return {name: value(options[0]) for name, options in accepted.items() if options[0] != ""}
        if isinstance(accepted, list):
            return [value(one) for one in accepted]
        return accepted

    return {name: value(options[0]) for name, options in arguments.items() if options[0] != ""}


class Sneaky(str):
    """A value whose source is not a literal."""

    def __repr__(self) -> str:
        return "__import__('os').getcwd()"


def test_only_literals_are_evaluated() -> None:
    good = ToolCall(name="cd", arguments={"folder": "a'b\"); __import__('os')", "n": [1, {"x": None}]})
    source = bfcl.source_of(good)
    node: Any = ast.parse(source, mode="eval").body
    assert {k.arg: ast.literal_eval(k.value) for k in node.keywords} == good.arguments and not node.args
    for name, arguments in (
        ("cd", {"folder": Sneaky("x")}),
        ("cd", {"a=1)or(b": 1}),
        ("cd", {"lambda": 1}),
        ("cd", {"x": float("nan")}),
        ("cd(1);ls", {}),
    ):
        assert bfcl.source_of(ToolCall(name=name, arguments=arguments)) is None
