"""Scores GSM8K episodes independently, from the original file and without any of Rally's code.

    python -m benchmarks.score_gsm8k runs/rally/gsm8k_tool/episodes/val_000060.jsonl --test data/test.jsonl

An episode is matched to its problem by the text of the question. Only the policy's own text is read. `strict` is the
number after the last `####`, `flexible` the last number of the last turn. Problems without an episode count as wrong,
and their number is reported.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
MARKED = re.compile(rf"####\s*({NUMBER})")
ANY = re.compile(NUMBER)


class Counted(NamedTuple):
    """One episode: right by either rule, attempted calls, calls that the tool answered."""

    strict: bool
    flexible: bool
    calls: int
    good_calls: int


class Report(NamedTuple):
    problems: int
    missing: int
    episodes: int
    strict: float
    flexible: float
    calls: float
    good_calls: float
    calling: float

    def told(self) -> str:
        lines = [
            f"problems            {self.problems} ({self.missing} without an episode), {self.episodes} episodes",
            f"exact match, strict {self.strict:.2%}",
            f"         , flexible {self.flexible:.2%}",
            f"calls a problem     {self.calls:.3f}, in {self.calling:.1%} of the episodes",
            f"successful calls    {self.good_calls:.2%}",
        ]
        return "\n".join(lines)


def value(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def truths(test: Path) -> dict[str, Decimal]:
    """The answer of every problem, by its question."""
    known: dict[str, Decimal] = {}
    for item in map(json.loads, test.read_text(encoding="utf-8").splitlines()):
        number = value(item["answer"].rpartition("####")[2].strip())
        assert number is not None, f"no number in {item['answer']!r}"
        known[item["question"].strip()] = number
    return known


def count(episode: dict[str, Any], truth: Decimal) -> Counted:
    own = [turn["text"] for turn in episode["turns"] if turn["role"] == "assistant"]
    marked = MARKED.findall("\n".join(own))
    numbers = ANY.findall(own[-1]) if own else []
    tried = sum(len(turn["tool_calls"]) for turn in episode["turns"])
    answered = sum(result["status"] == "ok" for turn in episode["turns"] for result in turn["tool_results"])
    strict, flexible = (bool(found) and value(found[-1]) == truth for found in (marked, numbers))
    return Counted(strict, flexible, tried, answered)


def episodes(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each episode with its question."""
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for episode in map(json.loads, lines):
                asked = [m["content"] for m in episode["task"]["prompt"] if m["role"] == "user"]
                yield asked[-1].strip(), episode


def score(files: list[Path], test: Path) -> Report:
    known = truths(test)
    found: dict[str, list[Counted]] = defaultdict(list)
    for question, episode in episodes(files):
        if question not in known:
            raise SystemExit(f"{test} has no problem {question[:80]!r}; give the file that the rows were made from")
        found[question].append(count(episode, known[question]))
    every = [counted for counts in found.values() for counted in counts]
    if not every:
        raise SystemExit("there are no episodes in these files")
    tried = sum(c.calls for c in every)
    return Report(
        problems=len(known),
        missing=len(known) - len(found),
        episodes=len(every),
        strict=sum(sum(c.strict for c in counts) / len(counts) for counts in found.values()) / len(known),
        flexible=sum(sum(c.flexible for c in counts) / len(counts) for counts in found.values()) / len(known),
        calls=tried / len(every),
        good_calls=sum(c.good_calls for c in every) / tried if tried else 0.0,
        calling=sum(c.calls > 0 for c in every) / len(every),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", type=Path, nargs="+", help="episode files of a run folder")
    parser.add_argument("--test", type=Path, required=True, help="GSM8K's own test.jsonl")
    given = parser.parse_args()
    print(score(given.episodes, given.test).told())


if __name__ == "__main__":
    main()
