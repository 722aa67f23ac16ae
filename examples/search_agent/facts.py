"""Invented facts: a corpus that holds all of them, questions, and conversations that search well or badly.

Everything follows from one number, `WORLD`. One entity in six is held out: it is in the corpus, but in no conversation
or training row.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rally.data import write_rows
from rally.tools.builtin.search import format_passages
from rally.types import Message

DATA_SOURCE = "searchR1_facts"
WORLD = 1
SYLLABLES = ("BA", "DO", "FU", "GA", "HO", "JU", "KA", "LO", "MU", "NA", "PO", "RU", "SA", "TO", "VU", "ZA")
ATTRIBUTES = ("code", "port", "year")
VALUES = (1000, 10_000)
ENTITIES, HELD_OUT = 1200, 200
GATE_ROWS, TEST_ROWS = 128, 200

WORDS = (
    *SYLLABLES,
    *ATTRIBUTES,
    *("What is the ", " of ", " is ", "search", "query", 'Doc 1(Title: "', '") The ', "<answer>", "</answer>"),
)
"""Single tokens of the tokenizer, so that a name has three tokens."""


HABITS = {"good": 0.2, "guess": 0.6, "name_only": 0.1, "misspelt": 0.1}
"""The behaviours of the degraded agent, by weight: it searches for attribute and name; does not search; searches for
the name alone and repeats the value of any attribute; searches for a name with one wrong syllable, which finds the
attribute of another entity, and repeats that."""


class Fact(NamedTuple):
    name: str
    attribute: str
    value: str

    @property
    def key(self) -> str:
        return f"{self.attribute} of {self.name}"

    @property
    def passage(self) -> str:
        return f'"{self.name}"\nThe {self.key} is {self.value}.'


class World(NamedTuple):
    """Lists of whole entities, with their attributes in the order of `ATTRIBUTES`."""

    train: list[Fact]
    held_out: list[Fact]


@cache
def world() -> World:
    rng = random.Random(f"facts:{WORLD}")
    names = rng.sample(["".join(parts) for parts in itertools.product(SYLLABLES, repeat=3)], ENTITIES)
    facts = [Fact(name, attribute, str(rng.randrange(*VALUES))) for name in names for attribute in ATTRIBUTES]
    cut = HELD_OUT * len(ATTRIBUTES)
    return World(facts[cut:], facts[:cut])


def write_corpus(path: Path) -> None:
    facts = [fact for part in world() for fact in part]
    random.Random(f"corpus:{WORLD}").shuffle(facts)
    write_rows(({"id": str(i), "contents": fact.passage} for i, fact in enumerate(facts)), path)


def write_data(folder: Path, seed: int) -> None:
    train, held_out = world()
    rng = random.Random(f"questions:{WORLD}")
    tested = rng.sample(held_out, GATE_ROWS + TEST_ROWS)
    write_rows(rows(random.Random(f"questions:{seed}").sample(train, len(train)), "train"), folder / "train.parquet")
    write_rows(rows(tested[:GATE_ROWS], "test"), folder / "gate.parquet")
    write_rows(rows(tested[GATE_ROWS:], "test"), folder / "test.parquet")


def rows(facts: Iterable[Fact], split: str) -> Iterator[dict[str, Any]]:
    for index, fact in enumerate(facts):
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [_question(fact)],
            "agent_name": "tool_agent",
            "reward_model": {"style": "rule", "ground_truth": {"target": [fact.value]}},
            "extra_info": {"split": split, "index": index},
        }


def tell(habit: str, rng: random.Random) -> list[Message]:
    """A conversation about a fact that is not held out, with one of the `HABITS`."""
    facts = world().train
    at = rng.randrange(len(facts))
    return [_question(facts[at]), *_reply(facts, at, habit, rng)]


def _reply(facts: Sequence[Fact], at: int, habit: str, rng: random.Random) -> list[Message]:
    fact, which = facts[at], at % len(ATTRIBUTES)
    match habit:
        case "good":
            return _searched(fact.key, fact)
        case "guess":
            return [_answer(str(rng.randrange(*VALUES)))]
        case "name_only":
            entity = at - which
            return _searched(fact.name, rng.choice(facts[entity : entity + len(ATTRIBUTES)]))
        case "misspelt":
            found = rng.choice([other for other in facts[which :: len(ATTRIBUTES)] if other != fact])
            return _searched(f"{fact.attribute} of {_misspelt(fact.name, rng)}", found)
    raise ValueError(f"there is no habit {habit!r}; the habits are {', '.join(HABITS)}")


def _misspelt(name: str, rng: random.Random) -> str:
    # Never into the name of a held-out entity, which a conversation must not show.
    wrong = [
        name[:at] + other + name[at + 2 :] for at in (0, 2, 4) for other in SYLLABLES if other != name[at : at + 2]
    ]
    return rng.choice([other for other in wrong if other not in held_out_names()])


@cache
def held_out_names() -> frozenset[str]:
    return frozenset(fact.name for fact in world().held_out)


def _question(fact: Fact) -> Message:
    return {"role": "user", "content": f"What is the {fact.key}?"}


def _searched(query: str, found: Fact) -> list[Message]:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": format_passages([found.passage]), "name": "search"},
        _answer(found.value),
    ]


def _answer(value: str) -> Message:
    return {"role": "assistant", "content": f"<answer>{value}</answer>"}
