"""Scores reasoning-gym episodes independently, with the package's own scorer and without any of Rally's code.

    python -m benchmarks.score_reasoning_gym runs/rally/reasoning_gym --episodes episodes/val_000100.jsonl
    python -m benchmarks.score_reasoning_gym runs/rally/reasoning_gym/eval/global_step_100/eval

The question is made anew from the seed of the episode and the arguments in the run's config.yaml. It must be the
question that was asked. Only the policy's last text is read. `package` is the share of answers to which the package's
scorer gives 1, `exact` of those that equal the stored answer. `differing` counts episodes whose recorded reward is not
what the package says.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import reasoning_gym
import yaml

OF_THE_PROMPT = ("answer", "scoring", "instruction", "level")
"""Arguments that are not the data set's own. `level` is not supported here."""


EVALUATED = (
    *("binary_matrix", "coin_flip", "complex_arithmetic", "countdown", "game_of_life_halting"),
    *("intermediate_integration", "n_queens", "number_sorting", "polynomial_multiplication", "puzzle24"),
    *("rubiks_cube", "rush_hour", "simple_integration", "spiral_matrix", "string_insertion"),
)
"""Data sets whose scorers run an answer as Python, compute it without bound, or take wrong answers as right."""


class Scored(NamedTuple):
    """One episode: whether it is right by the package and by comparison, and the reward that was recorded."""

    package: bool
    exact: bool
    recorded: float


def families(config: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The data set and its arguments for each label of a run."""
    env = yaml.safe_load(config.read_text(encoding="utf-8"))["env"]
    entries = env["mixture"] or [env]
    found = {}
    for entry in entries:
        args = entry.get("args") or {}
        if args.get("answer", "tag") != "tag" or args.get("level") is not None or args.get("scoring") != "strict":
            raise SystemExit(f"{entry['name']}: only answers in tags, scoring=strict and no level are supported")
        if entry["name"].removeprefix("reasoning_gym/") in EVALUATED:
            raise SystemExit(f"{entry['name']}: its scorer is not safe with what a policy wrote; leave it out")
        own = {key: value for key, value in args.items() if key not in OF_THE_PROMPT}
        found[entry.get("label") or entry["name"]] = (entry["name"].removeprefix("reasoning_gym/"), own)
    return found


def answer_of(text: str) -> str | None:
    """What stands in the last complete pair of tags, after the thinking."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") : end].strip() if 0 <= start < end else None


def scored(episode: Mapping[str, Any], known: Mapping[str, tuple[str, dict[str, Any]]]) -> tuple[str, Scored]:
    row = episode["task"]["row"]
    name, config = known[row["env"]]
    dataset = reasoning_gym.create_dataset(name, size=1, seed=row["seed"], **config)
    entry = dataset[0]
    asked = "\n".join(message["content"] for message in episode["task"]["prompt"])
    if entry["question"] not in asked:
        raise SystemExit(f"{row['id']}: the question of its seed is not the one that was asked; use the run's version")
    said = [turn for turn in episode["turns"] if turn["role"] == "assistant"]
    # A reply that a limit of tokens cut off is not complete, whatever stands in it.
    answer = answer_of(said[-1]["text"]) if said and said[-1]["finish"] != "length" else None
    right = False
    if answer is not None:
        try:
            right = float(dataset.score_answer(answer, entry)) >= 1.0
        except Exception:  # noqa: BLE001 - an answer that the package cannot read is wrong
            right = False
    exact = answer is not None and answer == str(entry["answer"]).strip()
    return row["env"], Scored(right, exact, float(episode["reward"] or 0.0))


def report(folder: Path, episodes: list[Path]) -> str:
    known = families(folder / "config.yaml")
    found: dict[str, list[Scored]] = defaultdict(list)
    for file in episodes:
        for line in file.open(encoding="utf-8"):
            label, result = scored(json.loads(line), known)
            found[label].append(result)
    if not found:
        raise SystemExit("there are no episodes in these files")
    rows = {label: found[label] for label in known if label in found}
    for group in dict.fromkeys(label.partition("/")[0] for label in rows):
        rows[f"all of {group}"] = [one for label in known if label.startswith(f"{group}/") for one in found[label]]
    lines = [f"{'family':32} episodes  recorded  package   exact  differing"]
    for label, some in rows.items():
        differing = sum(one.recorded != one.package for one in some)
        shares = [fmean(value) for value in zip(*[(s.recorded, s.package, s.exact) for s in some], strict=True)]
        cells = "".join(f"{share:>9.1%}" for share in shares)
        lines.append(f"{label:32} {len(some):>8} {cells} {differing:>9}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run folder, or the folder of an evaluation")
    parser.add_argument("--episodes", nargs="*", help="files in it; the validation episodes if not given")
    given = parser.parse_args()
    files = [given.folder / name for name in given.episodes or ()]
    print(report(given.folder, files or sorted((given.folder / "episodes").glob("val_*.jsonl"))))


if __name__ == "__main__":
    main()
