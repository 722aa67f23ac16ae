"""Incidents for two-round triage as rows, the knowledge base, and supervised conversations.

An incident is a random log code. Which service is at fault and what kind of incident it is are only in an article of
the knowledge base, so the verdict cannot be known without a lookup. A code belongs to the split `test` when its MD5 is
a multiple of five, else to `train`; the knowledge base has both.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from rally.data.row_files import DataError, Row
from rally.recipes.data_files import WrittenFile, write_file
from rally.types import Message

DATA_SOURCE = "rally/triage"
LOOP = "two_rounds"
TOOL = "kb_lookup"
ROUND_2 = 'Verdict: only JSON with "service" and "incident_type".'
SERVICES = ("cart", "login", "search", "payment", "stock", "mail")
INCIDENT_TYPES = ("timeout", "bad_config", "disk_full", "cache_miss", "clock_skew", "deadlock", "old_key", "overload")
CODES = range(1000, 10_000)
NOTHING = "nothing found"
FAILS, LOOK = " fails, log ", ". Look into it, no verdict yet."
SURE, NOTED, UNKNOWN = "I know this one.", "Noted.", "Not known."
WORDS = (
    *(*SERVICES, *INCIDENT_TYPES, TOOL, "query", NOTHING, FAILS, LOOK, SURE, NOTED, UNKNOWN, ROUND_2, " in "),
    *("It is ", '{"service": "', '", "incident_type": "'),
)
"""Texts that should be single tokens in the tokenizer of a tiny model."""

Split = Literal["train", "test"]
Habit = Literal["good", "guess", "prose", "wrong_code"]


class Incident(NamedTuple):
    code: str
    seen_at: str
    service: str
    incident_type: str

    @property
    def verdict(self) -> dict[str, str]:
        return {"service": self.service, "incident_type": self.incident_type}

    @property
    def question(self) -> str:
        return f"{self.seen_at}{FAILS}{self.code}{LOOK}"


def held_out(code: str) -> bool:
    """Whether the code belongs to the test split."""
    return int(hashlib.md5(code.encode(), usedforsecurity=False).hexdigest(), 16) % 5 == 0


def incidents(count: int, seed: int, split: Split) -> list[Incident]:
    """`count` incidents with different codes. The meaning of a code depends only on the seed."""
    codes = [f"E{number}" for number in CODES if held_out(f"E{number}") == (split == "test")]
    if count > len(codes):
        raise DataError(f"there are {len(codes)} {split} incidents, not {count}; ask for fewer")
    return [_incident(code, seed) for code in random.Random(f"triage:{seed}:{split}").sample(codes, count)]


def _incident(code: str, seed: int) -> Incident:
    rng = random.Random(f"triage:{seed}:{code}")
    seen_at, service = rng.sample(SERVICES, 2)
    return Incident(code, seen_at, service, rng.choice(INCIDENT_TYPES))


def articles(seed: int) -> Iterator[Row]:
    """The knowledge base: one article for every code."""
    for number in CODES:
        known = _incident(f"E{number}", seed)
        text = f"{known.incident_type} in {known.service}"
        yield {"id": f"kb-{number}", "title": known.code, "text": text, **known.verdict}


def rows(count: int, seed: int, split: Split) -> Iterator[Row]:
    """Incidents as rows for the two-round loop."""
    for index, incident in enumerate(incidents(count, seed, split)):
        yield {
            "data_source": DATA_SOURCE,
            "agent_name": LOOP,
            "prompt": _prompt(incident),
            "ability": "triage",
            "reward_model": {"style": "rule", "ground_truth": incident.verdict},
            "extra_info": {"split": split, "index": index, "code": incident.code},
        }


def sft_rows(clean: int, mixed: int, mix: Mapping[Habit, float], seed: int) -> Iterator[Row]:
    """First `clean` good conversations, then `mixed` ones with habits drawn by the weights in `mix`.

    The order matters for a model trained from scratch: it must learn to copy a code before it learns habits.
    """
    unknown = sorted(set(mix) - set(get_args(Habit)))
    if unknown or not sum(mix.values()) > 0:
        raise DataError(f"the habits are {', '.join(get_args(Habit))}, with weights above 0; not {dict(mix)}")
    rng = random.Random(f"triage sft:{seed}")
    known = incidents(len(CODES) // 2, seed, "train")
    habits, weights = list(mix), list(mix.values())
    for number in range(clean + mixed):
        habit: Habit = "good" if number < clean else rng.choices(habits, weights)[0]
        yield {"messages": conversation(rng.choice(known), habit, rng), "tools": None}


def conversation(incident: Incident, habit: Habit, rng: random.Random) -> list[Message]:
    """Both rounds about one incident, in OpenAI form."""
    guess = {"service": rng.choice(SERVICES), "incident_type": rng.choice(INCIDENT_TYPES)}
    right = json.dumps(incident.verdict)
    match habit:
        case "good":
            return [*_looked_up(incident, incident.code), *_round_2(right)]
        case "guess":
            sure = {"role": "assistant", "content": SURE}
            return [*_prompt(incident), sure, *_round_2(json.dumps(guess))]
        case "prose":
            return [*_looked_up(incident, incident.code), *_round_2(f"It is {incident.incident_type}.")]
        case "wrong_code":
            return [*_looked_up(incident, f"{incident.code[:-1]}x"), *_round_2(json.dumps(guess))]


def _prompt(incident: Incident) -> list[Message]:
    return [{"role": "user", "content": incident.question}]


def _looked_up(incident: Incident, query: str) -> list[Message]:
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"query": query}}}
    known = f"{incident.code}: {incident.incident_type} in {incident.service}" if query == incident.code else NOTHING
    return [
        *_prompt(incident),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": known, "name": TOOL},
        {"role": "assistant", "content": NOTED if query == incident.code else UNKNOWN},
    ]


def _round_2(answer: str) -> list[Message]:
    return [{"role": "user", "content": ROUND_2}, {"role": "assistant", "content": answer}]


HABITS: dict[Habit, float] = {"good": 0.2, "guess": 0.55, "prose": 0.2, "wrong_code": 0.05}


class TriageSizes(NamedTuple):
    train: int
    test: int
    clean: int
    mixed: int


def write_triage(out: Path, sizes: TriageSizes, seed: int) -> list[WrittenFile]:
    """Write train.parquet, test.parquet, articles.jsonl, sft.parquet, and words.txt for the toy tokenizer."""
    written = [
        write_file(out / "train.parquet", rows(sizes.train, seed, "train")),
        write_file(out / "test.parquet", rows(sizes.test, seed, "test")),
        write_file(out / "articles.jsonl", articles(seed)),
    ]
    if sizes.clean + sizes.mixed:
        conversations = sft_rows(sizes.clean, sizes.mixed, HABITS, seed)
        written.append(write_file(out / "sft.parquet", conversations))
    (out / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    return [*written, WrittenFile(out / "words.txt", len(WORDS))]
