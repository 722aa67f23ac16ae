"""A model of random weights is taught one way to behave until it is sure of it, and is then spoiled with bad habits.

What is left is a start for reinforcement learning that can do the task and mostly does not. Everything follows from the
model, the conversations and one random generator.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rally.chat import ChatCodec
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.track import RunConsole
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.sft import SftSettings, conversation_row, sft_step
from rally.types import Message

Tell = Callable[[Any, random.Random], Sequence[Message]]
"""A conversation that shows the habit of this name, about a problem drawn with the generator."""

GOOD = "good"
"""The name of the one habit that is to be learned."""


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """How much is taught; the defaults were checked over several seeds on the demo's task (docs/demo.md)."""

    clean_blocks: tuple[int, ...] = (200, 100, 100)  # after each, greedy success must reach `gate` or more follow
    gate: float = 0.97
    habit_steps: int = 60
    batch: int = 64
    habit_batch: int = 48
    rehearsals: int = 32  # beside each batch of habits


@dataclass(frozen=True)
class Material:
    """What is taught: conversations, the habits to be spoiled with by weight, and the longest an episode can be."""

    codec: ChatCodec
    tell: Tell
    habits: Mapping[str, float]
    max_length: int


@dataclass(frozen=True)
class Teacher:
    """Teaches one model; `success` plays held-out problems greedily with it and says how many it solves."""

    model: PreTrainedModel
    material: Material
    lessons: Lessons
    success: Callable[[EmbeddedEngine], float]
    rng: random.Random
    console: RunConsole

    def teach(self) -> None:
        """Clean conversations until success passes the gate, then the bad habits."""
        engine = EmbeddedEngine(self.model, EngineSettings(max_model_len=self.material.max_length))
        done, share = 0, 0.0
        for block in self.lessons.clean_blocks:
            with engine.updating():
                loss = self._clean(block, first=done == 0)
            done += block
            share = self.success(engine)
            self.console.note(
                f"sft {done} steps: loss {loss:.4f}, the agent solves {share:.1%} of held-out problems, greedy"
            )
            if share >= self.lessons.gate:
                break
        else:
            self.console.warn_once("gate", f"the format was not learned surely ({share:.1%}); try another --seed")
        with engine.updating():
            self._spoil()
        asyncio.run(engine.close())

    def _clean(self, steps: int, *, first: bool) -> float:
        policy = Policy(self.model, OptimizerSettings(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0), steps)
        policy.schedule = torch.optim.lr_scheduler.LambdaLR(policy.optimizer, _hold_then_fall(steps, warm=first))
        batches = self._batches({GOOD: 1.0}, self.lessons.batch)
        with self.console.phase("sft, clean conversations", steps) as phase:
            for rows in itertools.islice(batches, steps):
                loss = sft_step(policy, rows, self._sft)["train/loss"]
                phase.advance()
        return loss

    def _spoil(self) -> None:
        steps = self.lessons.habit_steps
        fade = OptimizerSettings(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, schedule="linear", min_lr_ratio=0.05)
        policy = Policy(self.model, fade, steps)
        habits = self._batches(self.material.habits, self.lessons.habit_batch)
        clean = self._batches({GOOD: 1.0}, self.lessons.rehearsals)
        with self.console.phase("sft, bad habits", steps) as phase:
            for rows, good in itertools.islice(zip(habits, clean, strict=True), steps):
                sft_step(policy, [*rows, *map(_rehearsal, good)], self._sft)
                phase.advance()

    def _batches(self, mix: Mapping[str, float], size: int) -> Iterator[list[Row]]:
        habits, weights = list(mix), list(mix.values())
        codec, tell = self.material.codec, self.material.tell
        while True:
            chosen = self.rng.choices(habits, weights, k=size)
            yield [conversation_row(codec, tell(habit, self.rng), self._sft) for habit in chosen]

    @property
    def _sft(self) -> SftSettings:
        return SftSettings(batch_size=self.lessons.batch, max_length=self.material.max_length, max_tokens=8192)


def _hold_then_fall(steps: int, warm: bool) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / 30 if warm else 1.0, max(0.1, 2 * (1 - (step + 1) / steps)))


def _rehearsal(row: Row) -> Row:
    """A good conversation whose first token, the decision to call, carries no loss: it keeps copying sharp and teaches
    no habit."""
    return replace(row, sampled=row.sampled[1:], logprobs=row.logprobs[1:])
