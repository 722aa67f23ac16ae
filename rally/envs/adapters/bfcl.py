"""The adapter `bfcl/<category>`: the Berkeley function-calling leaderboard (bfcl-eval) as an evaluation environment.

The package's own checkers give the score, 1 or 0, once per task. It evaluates calls as Python source in its process, so
a call is rendered from its name and from arguments that are literals; nothing else that the policy wrote is evaluated.
Each episode has a world of its own, which is deleted afterwards. Keep it for evaluation, and train on other tasks.
"""

from __future__ import annotations

import ast
import copy
import itertools
import json
import keyword
import os
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from rally.envs.base import EnvError, Environment, EnvTurn, tool_reply
from rally.types import Message, ToolCall

# The package makes folders for results where it is installed, unless this names another place.
os.environ.setdefault("BFCL_PROJECT_ROOT", os.path.join(tempfile.gettempdir(), f"bfcl-{os.getuid()}"))

MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
AST = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
RELEVANCE = ("irrelevance", "live_irrelevance", "live_relevance")
MODEL = "rally"  # a name in the package's table of models
NEW_TOOLS = "I have updated some more functions you can choose from. What about now?"  # the package's own sentence
_WORLDS = itertools.count()


def names() -> list[str]:
    return sorted((*MULTI_TURN, *AST, *RELEVANCE))


def make(name: str, max_steps: int = 20) -> Environment:
    """The environment of a category. A user turn with more than `max_steps` turns of calls fails the task."""
    if name not in names():
        raise EnvError(f"there is no category bfcl/{name}; known are {', '.join(names())}")
    return MultiTurnTask(name, max_steps) if name in MULTI_TURN else SingleTurnTask(name)


@lru_cache(maxsize=8)
def _entries(category: str, hints: bool = True) -> dict[str, Any]:
    utils = import_module("bfcl_eval.utils")
    entries = utils.load_dataset_entry(category, include_prereq=False, include_language_specific_hint=hints)
    return {entry["id"]: entry for entry in entries}


@lru_cache(maxsize=8)
def _truths(category: str) -> dict[str, Any]:
    return {
        entry["id"]: entry["ground_truth"]
        for entry in import_module("bfcl_eval.utils").load_ground_truth_entry(category)
    }


class BfclTask(Environment):
    """One task of a category."""

    arguments_as_written = True  # the checkers look at the types

    def __init__(self, category: str) -> None:
        self.category = category

    def tasks(self) -> Sequence[Mapping[str, Any]]:
        return [{"entry": entry} for entry in _entries(self.category)]

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[list[Message], list[Mapping[str, Any]]]:
        self.entry = copy.deepcopy(_entries(self.category)[row["entry"]])
        return [dict(message) for message in self.entry["question"][0]], [tool_of(f) for f in self.entry["function"]]


class SingleTurnTask(BfclTask):
    """The first turn with well-formed calls, or without any call, is scored."""

    def step(self, turn: EnvTurn) -> tuple[str, float, bool, dict[str, Any]]:
        called = [{call.name: call.arguments} for call in turn.calls]
        if self.category in RELEVANCE:
            right = bool(called) == ("irrelevance" not in self.category)
            return "", float(right), True, {"calls": len(called)}
        if not called:
            return "", 0.0, True, {"error_type": "no call"}
        try:
            result = check_ast(self.category, self.entry["id"], called)
        except Exception as error:  # noqa: BLE001 - what the checker cannot read is a wrong call
            result = {"valid": False, "error_type": f"{type(error).__name__}: {error}"}
        return "", float(result["valid"]), True, {"error_type": str(result.get("error_type", ""))}


class MultiTurnTask(BfclTask):
    """Several user turns over a simulated world. A turn without calls asks for the next user turn."""

    def __init__(self, category: str, max_steps: int) -> None:
        super().__init__(category)
        self.most, self.user_turn, self.steps = max_steps, 0, 0
        self.world = f"rally{os.getpid()}x{next(_WORLDS)}x"
        self.called: list[list[list[str]]] = []

    def step(self, turn: EnvTurn) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        if len(self.called) <= self.user_turn:
            self.called.append([])
        if not turn.calls:
            return self._next_user_turn()
        sources = [source_of(call) for call in turn.calls]
        self.called[-1].append([source for source in sources if source is not None])
        self.steps += 1
        if self.steps > self.most:
            return [], 0.0, True, {"error_type": "force_terminated"}
        answers = iter(self._run(self.called[-1][-1]))
        replies = [
            tool_reply(call, "Error: the arguments are not literals." if source is None else next(answers))
            for call, source in zip(turn.calls, sources, strict=True)
        ]
        return replies, None, False, {}

    def close(self) -> None:
        held = vars(_multi_turn("multi_turn_utils"))
        for name in [name for name in held if name.startswith(self.world)]:
            del held[name]

    def _run(self, sources: list[str]) -> list[str]:
        entry = self.entry
        results, _ = _multi_turn("multi_turn_utils").execute_multi_turn_func_call(
            sources,
            entry["initial_config"],
            entry["involved_classes"],
            self.world,
            entry["id"],
            long_context="long_context" in self.category,
        )
        return [str(result) for result in results]

    def _next_user_turn(self) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        self.user_turn, self.steps = self.user_turn + 1, 0
        if self.user_turn == len(self.entry["question"]):
            result = self._checked()
            return [], float(result["valid"]), True, {"error_type": str(result.get("error_type", ""))}
        added = self.entry.get("missed_function", {}).get(str(self.user_turn))
        if added:
            self.added_tools = [tool_of(function) for function in added]
            described = "\n".join(json.dumps(tool["function"]) for tool in self.added_tools)
            return [{"role": "user", "content": f"{described}\n{NEW_TOOLS}"}], None, False, {}
        return [dict(message) for message in self.entry["question"][self.user_turn]], None, False, {}

    def _checked(self) -> Mapping[str, Any]:
        checker = _multi_turn("multi_turn_checker").multi_turn_checker
        called = [[step for step in turn if step] for turn in self.called]
        truth = _truths(self.category)[self.entry["id"]]
        result: Mapping[str, Any] = checker(called, truth, self.entry, self.category, self.world)
        return result


def source_of(call: ToolCall) -> str | None:
    """The call as Python source whose arguments are literals; None if they are not."""
    if not all(part.isidentifier() for part in call.name.split(".")):
        return None
    for name, value in call.arguments.items():
        if not name.isidentifier() or keyword.iskeyword(name):
            return None
        try:
            if ast.literal_eval(repr(value)) != value:
                return None
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return f"{call.name}({','.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def check_ast(category: str, entry: str, called: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The result of the package's checker for the calls of a turn."""
    language = import_module("bfcl_eval.constants.enums").Language
    spoken = {"simple_java": language.JAVA, "simple_javascript": language.JAVASCRIPT}.get(category, language.PYTHON)
    functions = _entries(category, False)[entry]["function"]
    result: Mapping[str, Any] = _ast_checker()(
        functions, list(called), _truths(category)[entry], spoken, category, MODEL
    )
    return result


@lru_cache(maxsize=1)
def _ast_checker() -> Any:
    """The checker, without the SDKs of all vendors, which its table of models imports."""
    table = "bfcl_eval.constants.model_config"
    models = {MODEL: types.SimpleNamespace(underscore_to_dot=True)}
    before = sys.modules.get(table)
    stand_in: Any = types.ModuleType(table)
    stand_in.MODEL_CONFIG_MAPPING = models
    sys.modules[table] = stand_in
    try:
        module: Any = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    finally:
        sys.modules.pop(table)
        if before is not None:
            sys.modules[table] = before
    module.MODEL_CONFIG_MAPPING = models
    return module.ast_checker


def _multi_turn(module: str) -> Any:
    return import_module(f"bfcl_eval.eval_checker.multi_turn_eval.{module}")


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function of the package as a tool in OpenAI form. Dots in names become underscores, as the checker expects."""
    described = {key: value for key, value in function.items() if key != "response"}
    described |= {"name": function["name"].replace(".", "_"), "parameters": _schema(function["parameters"])}
    return {"type": "function", "function": described}


def _schema(schema: Any) -> Any:
    """The schema with the types of JSON schema."""
    if not isinstance(schema, Mapping):
        return schema
    types_of = import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    fixed = dict(schema)
    if isinstance(schema.get("type"), str):
        fixed["type"] = types_of.get(schema["type"], "string")
    if isinstance(schema.get("properties"), Mapping):
        fixed["properties"] = {name: _schema(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        fixed["items"] = _schema(schema["items"])
    return fixed
