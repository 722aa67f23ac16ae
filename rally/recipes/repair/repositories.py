"""Small repositories, each with one defect, an issue about it, and hidden tests.

A repository is a module with three functions. One of them has a defect: an operator, a bound or a start value is
changed. Names, constants and the other functions vary with the seed. The hidden tests are calls, with the values that
the correct source returns.

Rows of the split train have a defect in a function of TRAINED. The split test has two data sources: `repair/trained`
with defects in those functions, but never the same defective source, and `repair/held_out` with defects in functions of
HELD_OUT, which occur in no repository of the split train.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "test"]


@dataclass(frozen=True)
class DefectFamily:
    """A function: its source with {name} and {k}, defects as (right, wrong), and inputs for the tests."""

    about: str
    source: str
    defects: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[Any, ...], ...]


TRAINED = (
    DefectFamily(
        "returns the sum of the values that are at least {k}",
        "def {name}(values):\n    total = 0\n    for value in values:\n        if value >= {k}:\n"
        "            total += value\n    return total\n",
        ((">= {k}", "> {k}"), ("total = 0", "total = 1"), ("+= value", "-= value")),
        (([],), ([1, 2, 3, 4, 5, 6, 7, 8],), ([9, 9],)),
    ),
    DefectFamily(
        "returns every {k}th item, beginning with the first",
        "def {name}(items):\n    return [item for place, item in enumerate(items) if place % {k} == 0]\n",
        (("== 0", "== 1"), ("% {k}", "// {k}")),
        ((list("abcdefghijkl"),), ([],), ([1],)),
    ),
    DefectFamily(
        "returns the text repeated {k} times, separated by commas",
        "def {name}(text):\n    return ','.join([text] * {k})\n",
        (("','", "''"), ("* {k}", "* ({k} + 1)")),
        (("a",), ("bc",)),
    ),
    DefectFamily(
        "returns the largest difference between neighbours, and 0 for fewer than two numbers",
        "def {name}(numbers):\n    best = 0\n    for left, right in zip(numbers, numbers[1:]):\n"
        "        best = max(best, abs(right - left))\n    return best\n",
        (("numbers[1:]", "numbers[2:]"), ("abs(right - left)", "right - left"), ("max(", "min(")),
        (([5, 1, 2, 9, 3],), ([9, 1],), ([4],)),
    ),
    DefectFamily(
        "counts the words with more than {k} letters",
        "def {name}(sentence):\n    return sum(len(word) > {k} for word in sentence.split())\n",
        (("> {k}", "< {k}"), ("sentence.split()", "sentence")),
        (("a bb ccc dddd eeeee ffffff ggggggg",), ("",)),
    ),
    DefectFamily(
        "clips the number to the range from 0 to {k}",
        "def {name}(number):\n    return max(0, min({k}, number))\n",
        (("max(0, min({k}, number))", "min(0, max({k}, number))"), ("max(0,", "max(1,")),
        ((-4,), (0,), (3,), (99,)),
    ),
    DefectFamily(
        "returns the items without repetitions, in the order in which they first occur",
        "def {name}(items):\n    kept = []\n    for item in items:\n        if item not in kept:\n"
        "            kept.append(item)\n    return kept\n",
        (("if item not in kept", "if item in kept"), ("kept.append(item)", "kept.insert(0, item)")),
        (([3, 1, 3, 2, 1],), (["b", "a", "b"],), ([],)),
    ),
    DefectFamily(
        "returns the mean of the numbers, and 0 if there are none",
        "def {name}(numbers):\n    if not numbers:\n        return 0\n    return sum(numbers) / len(numbers)\n",
        (("/ len(numbers)", "/ (len(numbers) - 1)"), ("/ len", "// len"), ("sum(", "max(")),
        (([1, 2, 4, 6],), ([5, 8],), ([],)),
    ),
)
HELD_OUT = (
    DefectFamily(
        "moves the items {k} places to the right, where the last ones come first",
        "def {name}(items):\n    if not items:\n        return []\n    cut = {k} % len(items)\n"
        "    return items[-cut:] + items[:-cut] if cut else list(items)\n",
        (("items[-cut:] + items[:-cut]", "items[cut:] + items[:cut]"), ("{k} % len(items)", "{k} // len(items)")),
        (([1, 2, 3, 4, 5, 6, 7],), (["a", "b", "c"],), ([],)),
    ),
    DefectFamily(
        "says whether the text is the same backwards, without regard to upper case and spaces",
        "def {name}(text):\n    letters = text.replace(' ', '').lower()\n    return letters == letters[::-1]\n",
        (("== letters", "!= letters"), (".lower()", ""), ("letters[::-1]", "letters[::1]")),
        (("Never odd or even",), ("Rally",), ("",)),
    ),
    DefectFamily(
        "returns the running totals of the numbers, one for each of them",
        "def {name}(numbers):\n    totals, total = [], 0\n    for number in numbers:\n        total += number\n"
        "        totals.append(total)\n    return totals\n",
        (("[], 0", "[], 1"), ("total += number", "total = number"), ("totals.append(total)", "totals.append(number)")),
        (([1, 2, 3, 4],), ([5],), ([],)),
    ),
    DefectFamily(
        "counts how often each word occurs, as a dictionary, for words that occur at least twice",
        "def {name}(words):\n    counts = {}\n    for word in words:\n        counts[word] = counts.get(word, 0) + 1\n"
        "    return {word: count for word, count in counts.items() if count >= 2}\n",
        (("get(word, 0)", "get(word, 1)"), ("count >= 2", "count > 2"), ("+ 1", "+ 2")),
        ((["a", "b", "a", "c", "c", "c"],), (["x"],), ([],)),
    ),
)
VERBS = ("compute", "find", "get", "build", "make", "take")
NOUNS = ("report", "batch", "entry", "record", "segment", "series", "ledger", "window")


def train_rows(count: int, seed: int = 0, first: int = 0) -> Iterator[dict[str, Any]]:
    """`count` rows of the split train after the `first` ones, each with another defective source."""
    for index, row in enumerate(_rows(first + count, seed, TRAINED, "train", "repair/trained")):
        if index >= first:
            yield row


def test_rows(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` rows of the split test for each of its two data sources."""
    yield from _rows(count, seed, TRAINED, "test", "repair/trained")
    yield from _rows(count, seed, HELD_OUT, "test", "repair/held_out")


def _rows(
    count: int, seed: int, families: Sequence[DefectFamily], split: Split, source: str
) -> Iterator[dict[str, Any]]:
    rng, seen = random.Random(f"{seed}/{split}/{source}"), set[str]()
    while len(seen) < count:
        row = _row(rng, families)
        files = row["extra_info"]["files"]
        held_out = sum(files.encode()) % 5 == 0
        if held_out == (split == "test") and files not in seen and _fails(row["extra_info"]):
            seen.add(files)
            about = {"index": len(seen) - 1, "split": split}
            yield {**row, "data_source": source, "extra_info": {**row["extra_info"], **about}}


def _row(rng: random.Random, families: Sequence[DefectFamily]) -> dict[str, Any]:
    chosen = rng.sample(families, 3)
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
        "reward_model": {"ground_truth": ""},
        "extra_info": {  # as JSON: the columns of a file have one type
            "files": json.dumps({module: "\n\n".join(wrong)}),
            "solution": json.dumps({module: "\n\n".join(right)}),
            "function": names[broken],
            "test": json.dumps({"module": module.removesuffix(".py"), "cases": [c for some in cases for c in some]}),
        },
    }


def _filled(text: str, name: str, k: int) -> str:
    return text.replace("{name}", name).replace("{k}", str(k))


def _cases(family: DefectFamily, name: str, source: str) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Inputs with the values of the correct source, which is ours."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return [(name, given, scope[name](*given)) for given in family.inputs]


def _fails(info: dict[str, Any]) -> bool:
    """Whether the defect changes a value that the tests look at. With some constants it does not."""
    ((_, source),) = json.loads(info["files"]).items()
    scope: dict[str, Any] = {}
    exec(source, scope)
    try:
        return any(scope[name](*given) != wanted for name, given, wanted in json.loads(info["test"])["cases"])
    except (ArithmeticError, TypeError, ValueError):
        return True
