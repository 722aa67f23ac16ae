"""Writes rows of small repositories, each with one defect, an issue about it, and hidden tests.

python examples/repair_agent/repositories.py --train 400 --test 60 --out data/repair

A repository has a module with several functions. One of them gets a defect: an operator, a bound or a start value is
changed. Names, constants and the other functions vary with the seed. The hidden tests compare the functions with values
of the correct source. A row of the split test never has the same defective source as a row of the split train.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rally.data.row_files import write_rows


@dataclass(frozen=True)
class Family:
    """A function: its source with {name} and {k}, defects as (right, wrong), and inputs for the tests."""

    about: str
    source: str
    defects: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[Any, ...], ...]


FAMILIES = (
    Family(
        "returns the sum of the values that are at least {k}",
        "def {name}(values):\n    total = 0\n    for value in values:\n        if value >= {k}:\n"
        "            total += value\n    return total\n",
        ((">= {k}", "> {k}"), ("total = 0", "total = 1"), ("+= value", "-= value")),
        (([],), ([1, 2, 3, 4, 5, 6, 7, 8],), ([9, 9],)),
    ),
    Family(
        "returns every {k}th item, beginning with the first",
        "def {name}(items):\n    return [item for place, item in enumerate(items) if place % {k} == 0]\n",
        (("== 0", "== 1"), ("% {k}", "// {k}")),
        ((list("abcdefghijkl"),), ([],), ([1],)),
    ),
    Family(
        "returns the text repeated {k} times, separated by commas",
        "def {name}(text):\n    return ','.join([text] * {k})\n",
        (("','", "''"), ("* {k}", "* ({k} + 1)")),
        (("a",), ("bc",)),
    ),
    Family(
        "returns the largest difference between neighbours, and 0 for fewer than two numbers",
        "def {name}(numbers):\n    best = 0\n    for left, right in zip(numbers, numbers[1:]):\n"
        "        best = max(best, abs(right - left))\n    return best\n",
        (("numbers[1:]", "numbers[2:]"), ("abs(right - left)", "right - left"), ("max(", "min(")),
        (([5, 1, 2, 9, 3],), ([9, 1],), ([4],)),
    ),
    Family(
        "counts the words with more than {k} letters",
        "def {name}(sentence):\n    return sum(len(word) > {k} for word in sentence.split())\n",
        (("> {k}", "< {k}"), ("sentence.split()", "sentence")),
        (("a bb ccc dddd eeeee ffffff ggggggg",), ("",)),
    ),
    Family(
        "clips the number to the range from 0 to {k}",
        "def {name}(number):\n    return max(0, min({k}, number))\n",
        (("max(0, min({k}, number))", "min(0, max({k}, number))"), ("max(0,", "max(1,")),
        ((-4,), (0,), (3,), (99,)),
    ),
)
VERBS = ("compute", "find", "get", "build", "make", "take")
NOUNS = ("report", "batch", "entry", "record", "segment", "series", "ledger", "window")


def rows(count: int, split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` rows of a split, each with another defective source."""
    rng, seen = random.Random(f"{seed}/{split}"), set[str]()
    while len(seen) < count:
        row = _row(rng)
        source = row["extra_info"]["files"]
        held_out = sum(source.encode()) % 5 == 0
        if held_out == (split == "test") and source not in seen and _fails(row["extra_info"]):
            seen.add(source)
            yield {**row, "extra_info": {**row["extra_info"], "index": len(seen) - 1, "split": split}}


def _row(rng: random.Random) -> dict[str, Any]:
    chosen = rng.sample(FAMILIES, 3)
    names = [f"{rng.choice(VERBS)}_{noun}" for noun in rng.sample(NOUNS, 3)]
    ks = [rng.randint(2, 6) for _ in chosen]
    broken = rng.randrange(3)
    right = [_filled(f.source, n, k) for f, n, k in zip(chosen, names, ks, strict=True)]
    wrong = list(right)
    old, new = (_filled(part, names[broken], ks[broken]) for part in rng.choice(chosen[broken].defects))
    wrong[broken] = wrong[broken].replace(old, new, 1)
    cases = [_cases(family, name, source) for family, name, source in zip(chosen, names, right, strict=True)]
    module = f"{rng.choice(NOUNS)}s.py"
    about = _filled(chosen[broken].about, names[broken], ks[broken])
    issue = f"In {module}, the function {names[broken]} is wrong: it should be a function that {about}. Repair it."
    return {
        "prompt": [{"role": "user", "content": issue}],
        "data_source": "repair_agent",
        "reward_model": {"ground_truth": ""},
        "extra_info": {  # as JSON: the columns of a file have one type
            "files": json.dumps({module: "\n\n".join(wrong)}),
            "solution": json.dumps({module: "\n\n".join(right)}),
            "test": _test(module.removesuffix(".py"), [case for some in cases for case in some]),
        },
    }


def _filled(text: str, name: str, k: int) -> str:
    return text.replace("{name}", name).replace("{k}", str(k))


def _cases(family: Family, name: str, source: str) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Inputs with the values of the correct source, which is ours."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return [(name, given, scope[name](*given)) for given in family.inputs]


def _fails(info: dict[str, Any]) -> bool:
    """Whether the defect changes a value that the tests look at. With some constants it does not."""
    ((name, source),) = json.loads(info["files"]).items()
    module, scope = name.removesuffix(".py"), dict[str, Any]()
    exec(source, scope)
    test = info["test"].removeprefix(f"import {module} as m\n").replace("getattr(m, name)", "scope[name]")
    try:
        exec(test, {"scope": scope})
    except (AssertionError, ArithmeticError, TypeError, ValueError):
        return True
    return False


def _test(module: str, cases: list[tuple[str, tuple[Any, ...], Any]]) -> str:
    return (
        f"import {module} as m\nfor name, given, wanted in {cases!r}:\n    assert getattr(m, name)(*given) == wanted\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--test", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for split in ("train", "test"):
        count = write_rows(rows(getattr(options, split), split), options.out / f"{split}.parquet")
        print(f"{options.out / split}.parquet: {count} rows")


if __name__ == "__main__":
    main()
