"""Scores BFCL episodes independently, with the package's own checkers and without any of Rally's code.

    envs/bfcl/bin/python benchmarks/score_bfcl.py runs/rally/tool_use/eval/global_step_100_eval_bfcl/eval

It runs in the environment of bfcl-eval, and reads the recorded turns alone: the calls that the policy wrote and that
were not answered as malformed. A turn without calls ends a user turn. `differing` counts episodes whose recorded reward
is not what the checker says. An episode that a limit ended is wrong, as in the recorded reward.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("BFCL_PROJECT_ROOT", os.path.join(tempfile.gettempdir(), f"score-bfcl-{os.getuid()}"))

NAME = "scorer"
MOST_STEPS = 20  # the package's limit for a user turn
WORLDS = itertools.count()


def checkers() -> tuple[Any, Any]:
    """The checker of syntax trees and the one of dialogues. The table of models imports the SDKs of all vendors, so a
    table with one model takes its place."""
    table: Any = types.ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {NAME: types.SimpleNamespace(underscore_to_dot=True)}
    sys.modules["bfcl_eval.constants.model_config"] = table
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    return ast_checker, multi_turn_checker


@cache
def entries(category: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tasks in the package's order, and the ground truth by id."""
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

    tasks = load_dataset_entry(category, include_prereq=False, include_language_specific_hint=False)
    if "relevance" in category:
        return tasks, {}
    return tasks, {entry["id"]: entry["ground_truth"] for entry in load_ground_truth_entry(category)}


def source(call: Mapping[str, Any]) -> str | None:
    """The call as the package runs it; None if its arguments are no Python literals."""
    text = f"{call['name']}({','.join(f'{k}={v!r}' for k, v in call['arguments'].items())})"
    try:
        node = ast.parse(text, mode="eval").body
        values = [ast.literal_eval(keyword.value) for keyword in node.keywords]  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, AttributeError):
        return None
    return text if values == list(call["arguments"].values()) else None


def turns_of(episode: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The accepted calls of each reply. A reply whose calls were all malformed was answered and is not one, and neither
    is one that a limit of tokens cut off."""
    turns = [turn for turn in episode["turns"] if turn["role"] != "user"]
    results = {json.dumps(r["call"], sort_keys=True): r["status"] for turn in turns for r in turn["tool_results"]}
    for turn in turns:
        if turn["role"] != "assistant" or turn["finish"] == "length":
            continue
        calls = [c for c in turn["tool_calls"] if results.get(json.dumps(c, sort_keys=True), "ok") == "ok"]
        if calls or not turn["tool_calls"]:
            yield calls


def right(episode: Mapping[str, Any], category: str, number: int) -> bool:
    tasks, truths = entries(category)
    task = tasks[number]
    replies = list(turns_of(episode))
    if category.startswith("multi_turn"):
        return right_dialogue(replies, category, task, truths[task["id"]])
    if not replies:
        return False
    calls = [{call["name"]: call["arguments"]} for call in replies[0]]
    if "relevance" in category:
        return bool(calls) == ("irrelevance" not in category)
    if not calls:
        return False
    from bfcl_eval.constants.enums import Language

    languages = {"simple_java": Language.JAVA, "simple_javascript": Language.JAVASCRIPT}
    language = languages.get(category, Language.PYTHON)
    try:
        result = checkers()[0](task["function"], calls, truths[task["id"]], language, category, NAME)
    except Exception:  # noqa: BLE001 - calls that the checker cannot read are wrong
        return False
    return bool(result["valid"])


def right_dialogue(replies: list[list[dict[str, Any]]], category: str, task: dict[str, Any], truth: Any) -> bool:
    users: list[list[list[str]]] = [[]]
    for calls in replies:
        if not calls:
            users.append([])
            continue
        users[-1].append([text for call in calls if (text := source(call)) is not None])
    if users.pop() or len(users) != len(truth) or any(len(steps) > MOST_STEPS for steps in users):
        return False  # the episode ended before its last user turn did
    steps = [[step for step in user if step] for user in users]
    world = f"{NAME}{next(WORLDS)}x"  # the package keeps the state of a world under this name
    return bool(checkers()[1](steps, truth, task, category, world)["valid"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of an evaluation, or of a run")
    parser.add_argument("--episodes", nargs="*", help="files in it; the validation episodes if not given")
    given = parser.parse_args()
    files = [given.folder / name for name in given.episodes or ()]
    found: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for file in files or sorted((given.folder / "episodes").glob("val_*.jsonl")):
        for episode in map(json.loads, file.open(encoding="utf-8")):
            row = episode["task"]["row"]
            if not row["env"].startswith("bfcl/"):
                continue
            category = row["env"].removeprefix("bfcl/")
            found[category].append((float(episode["reward"] or 0.0), right(episode, category, row["seed"])))
    if not found:
        raise SystemExit("there are no BFCL episodes in these files")
    print(f"{'category':26} episodes  recorded  package  differing")
    for category, scores in found.items():
        recorded, checked = (sum(values) / len(scores) for values in zip(*scores, strict=True))
        differing = sum(reward != valid for reward, valid in scores)
        print(f"{category:26} {len(scores):>8} {recorded:>9.1%} {checked:>8.1%} {differing:>10}")


if __name__ == "__main__":
    main()
