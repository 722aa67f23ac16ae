"""The workloads of `benchmarks.rollout`: the same seeded conversations for every engine, counted the same way.

`single` is 256 requests with a prompt of 200 random tokens and 256 new ones. `multi-N` is N conversations with a prompt
of 400 tokens and 5 turns of 128 new ones; between turns a tool sleeps up to half a second and 64 random tokens of its
answer are appended. In `multi-N-groups` 8 conversations share each prompt, as the episodes of a GRPO group do. All
conversations start at once, no token stops a turn, and every sampled token comes with its logprob.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rally.types import RallyError

GROUP = 8


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths are in tokens; a tool takes a random time up to `tool_seconds`."""

    name: str
    conversations: int
    prompt: int
    new: int
    turns: int = 1
    observed: int = 64
    tool_seconds: float = 0.5
    group: int = 1

    @classmethod
    def named(cls, name: str) -> Workload:
        if name == "single":
            return cls(name=name, conversations=256, prompt=200, new=256)
        found = re.fullmatch(r"multi-([1-9]\d*)(-groups)?", name)
        if not found:
            raise RallyError(f"there is no workload {name!r}; name single, multi-N or multi-N-groups, as in multi-256")
        group = GROUP if found[2] else 1
        if int(found[1]) % group:
            raise RallyError(f"{name} has no whole groups; give a number of conversations that {group} divides")
        return cls(name=name, conversations=int(found[1]), prompt=400, new=128, turns=5, group=group)

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.prompt + self.turns * self.new + (self.turns - 1) * self.observed

    @property
    def sampled(self) -> int:
        """Tokens that all conversations sample."""
        return self.conversations * self.turns * self.new

    def shortened(self, factor: int) -> Workload:
        """The same shape with lengths, times and conversations divided, to try a script on a small machine."""
        return dataclasses.replace(
            self,
            conversations=max(self.group, self.conversations // factor // self.group * self.group),
            prompt=self.prompt // factor,
            new=self.new // factor,
            observed=self.observed // factor,
            tool_seconds=self.tool_seconds / factor,
        )


class Reply(NamedTuple):
    """One turn as an engine returned it; `cached` prompt tokens were not computed again."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    cached: int


Sample = Callable[[Sequence[int], int], Awaitable[Reply]]
"""Continues a history by exactly the given number of tokens."""


class Script(NamedTuple):
    """The parts of a conversation besides the policy's turns: one observation and one pause between each two."""

    prompt: list[int]
    observed: list[list[int]]
    pauses: list[float]


class Played(NamedTuple):
    """The time and the counts of one run of a workload."""

    seconds: float
    sampled: int
    prompted: int  # tokens of all histories given to the engine, each turn's counted anew
    cached: int
    waited: float  # seconds that requests spent in the engine, summed over requests


def scripts(workload: Workload, vocabulary: int, seed: int) -> list[Script]:
    ids = range(vocabulary)
    result = []
    for number in range(workload.conversations):
        own = random.Random(f"{seed}/{workload.name}/{number}")
        shared = random.Random(f"{seed}/{workload.name}/prompt {number // workload.group}")
        between = range(workload.turns - 1)
        result.append(
            Script(
                prompt=shared.choices(ids, k=workload.prompt),
                observed=[own.choices(ids, k=workload.observed) for _ in between],
                pauses=[own.uniform(0, workload.tool_seconds) for _ in between],
            )
        )
    return result


async def play(sample: Sample, workload: Workload, vocabulary: int, seed: int) -> Played:
    """Run all conversations of a workload at once; the clock starts when they are drawn."""
    drawn = scripts(workload, vocabulary, seed)
    began = time.perf_counter()
    played = await asyncio.gather(*(_converse(sample, workload, script) for script in drawn))
    seconds = time.perf_counter() - began
    sampled, prompted, cached, waited = (sum(column) for column in zip(*played, strict=True))
    assert sampled == workload.sampled, "an engine stopped a turn early"
    return Played(seconds, int(sampled), int(prompted), int(cached), waited)


async def _converse(sample: Sample, workload: Workload, script: Script) -> tuple[int, int, int, float]:
    ids = list(script.prompt)
    sampled = prompted = cached = 0
    waited = 0.0
    for turn in range(workload.turns):
        began = time.perf_counter()
        reply = await sample(ids, workload.new)
        waited += time.perf_counter() - began
        assert len(reply.ids) == len(reply.logprobs), "every sampled token has its logprob"
        sampled, prompted, cached = sampled + len(reply.ids), prompted + len(ids), cached + reply.cached
        ids += reply.ids
        if turn < workload.turns - 1:
            await asyncio.sleep(script.pauses[turn])
            ids += script.observed[turn]
    return sampled, prompted, cached, waited
