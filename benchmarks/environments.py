"""Trains a tiny model on one environment of each adapter, on the CPU: the reward of the first and the last steps.

python -m benchmarks.environments [--steps 20] [--only gymnasium] [--seeds 3]

In self-play the rewards of the seats sum to 0, so the validation reward against a random opponent is shown instead.

The model is first fine-tuned on games with random replies, so that it knows the form of a reply and nothing about the
task. Each adapter needs its package (docs/environments.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import load_config
from rally.demo.training_stages import small_model
from rally.envs import EnvSpec, EnvTurn
from rally.envs.registry import find_environment
from rally.envs.session import EnvSession
from rally.models import attention
from rally.runs.train import train
from rally.sft.training import SftSettings, conversation_row, sft_step
from rally.track import RunConsole, RunFolder
from rally.train.policy import OptimizerSettings, Policy
from rally.types import Message, ToolCall

SFT_STEPS = 40


@dataclass(frozen=True)
class Case:
    """An environment, and the replies that the model may give at first: texts, or tool calls as JSON."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    replies: tuple[str, ...] = ()  # none: at random one of the moves that the game has just listed
    turns: int = 3
    tokens: int = 512  # of a response
    lr: float = 1e-3
    val_size: int = 0  # with validation, its reward before and after training is shown


CASES = {
    "reasoning_gym": Case(
        "reasoning_gym/syllogism",
        {"scoring": "strict", "answer": "reply", "instruction": ""},
        ("Yes", "No", "A", "B", "C", "D", "E", "F"),
        turns=1,
        tokens=16,
    ),
    "gymnasium": Case(
        "gymnasium/FrozenLake-v1",
        {"desc": ["SF", "FG"], "is_slippery": False},
        ("[left]", "[down]", "[right]", "[up]"),
        4,
    ),
    "textarena": Case("textarena/KuhnPoker-v0", {}, ("[check]", "[bet]", "[call]", "[fold]"), 4, 1024),
    "legal_start": Case("textarena/KuhnPoker-v0", turns=4, tokens=1024, lr=3e-4),
    "legal_reward": Case(
        "textarena/KuhnPoker-v0", {"legal_reward": 0.1}, ("[check]", "[bet]", "[call]", "[fold]"), 4, 1024
    ),
    "self_play": Case(
        "textarena/KuhnPoker-v0",
        {"opponent": "self", "seat": "random"},
        ("[check]", "[bet]", "[call]", "[fold]"),
        4,
        1024,
        val_size=100,
    ),
    "aviary": Case(
        "aviary/aviary.core.DummyEnv",
        {"end_immediately": True},
        (
            '{"name": "print_story", "arguments": {"story": "a"}}',
            '{"name": "get_random_int", "arguments": {}}',
            '{"name": "cast_int", "arguments": {"x": 1}}',
            '{"name": "cast_float", "arguments": {"x": "1"}}',
        ),
        2,
    ),
}


def listed_moves(observation: str) -> list[str]:
    """The moves that a game of TextArena says are available."""
    *_, said = [line for line in observation.splitlines() if "available actions" in line]
    return re.findall(r"\[\w+\]", said)


async def conversation(case: Case, seed: int) -> tuple[list[Message], list[dict[str, Any]]]:
    """One episode with random replies, and the tools of the environment."""
    rng = random.Random(seed)
    spec = EnvSpec(label=case.name, make=find_environment(case.name), args=case.args)
    session = EnvSession(spec, {"env": case.name, "id": str(seed), "seed": seed}, seed, 60.0)
    try:
        messages, tools = await session.reset()
        for turn in range(case.turns):
            reply = rng.choice(case.replies or listed_moves(messages[-1]["content"]))
            calls: tuple[ToolCall, ...] = ()
            said: Message = {"role": "assistant", "content": reply}
            if tools:
                function = json.loads(reply)
                calls = (ToolCall(name=function["name"], arguments=function["arguments"], id=f"call_{turn}"),)
                called = [{"id": calls[0].id, "type": "function", "function": function}]
                said = {"role": "assistant", "content": "", "tool_calls": called}
            messages.append(said)
            step = await session.step(EnvTurn(text=reply, calls=calls))
            if step.done or turn == case.turns - 1:
                return messages, tools
            messages += step.messages
        raise AssertionError("an episode has a turn")
    finally:
        await session.close()


def taught(case: Case, folder: Path, seed: int) -> None:
    """Write a small model that gives the replies at random."""
    tokenizer = tiny_tokenizer()
    model = small_model(tokenizer, seed)
    attention.install(model)
    codec, settings = ChatCodec(tokenizer, "hermes"), SftSettings(batch_size=16, max_length=2048)
    optimizer = OptimizerSettings(lr=3e-3, weight_decay=0.0, schedule="linear", warmup_steps=5)
    policy = Policy(model, optimizer, SFT_STEPS)
    for step in range(SFT_STEPS):
        seeds = range(10_000 + step * settings.batch_size, 10_000 + (step + 1) * settings.batch_size)
        talks = [asyncio.run(conversation(case, seed)) for seed in seeds]
        sft_step(policy, [conversation_row(codec.with_tools(tools), talk, settings) for talk, tools in talks], settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Measured(NamedTuple):
    """The mean reward of each training step, or of each validation, and the share of the games of each training step
    that were lost by an invalid move (of TextArena)."""

    rewards: list[float]
    invalid: list[float]


def measured(case: Case, steps: int, seed: int) -> Measured:
    with tempfile.TemporaryDirectory() as home:
        model, out = Path(home) / "model", Path(home) / "run"
        taught(case, model, seed)
        entry = json.dumps([{"name": case.name, "args": case.args}])
        overrides: Sequence[str] = [
            f"env.mixture={entry}",
            *("env.train_size=256", f"env.val_size={case.val_size}", "env.unfinished_reward=0"),
            *(f"trainer.seed={seed}", f"trainer.test_freq={steps if case.val_size else -1}"),
            *(f"actor_rollout_ref.rollout.val_kwargs.{one}" for one in ("do_sample=true", "temperature=1.0")),
            *(
                "data.train_batch_size=8",
                f"data.max_prompt_length={2048 - case.tokens}",
                f"data.max_response_length={case.tokens}",
            ),
            *(f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.actor.optim.lr={case.lr}"),
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            *("actor_rollout_ref.rollout.n=8", f"actor_rollout_ref.rollout.max_turns={2 * case.turns}"),
            *(f"trainer.default_local_dir={out}", f"trainer.total_training_steps={steps}", "trainer.save_freq=-1"),
            "trainer.startup_check=false",
        ]
        train(load_config(overrides=list(overrides), note=lambda text: None), RunConsole())
        key = f"val-core/{case.name}/reward/mean@1" if case.val_size else "critic/rewards/mean"
        folder = RunFolder(out)
        rewards = [row.metrics[key] for row in folder.read_metrics() if key in row.metrics]
        games = [[e.reward_info.get("invalid_move", 0.0) for e in folder.read_episodes(n + 1)] for n in range(steps)]
        return Measured(rewards, [fmean(map(float, step)) for step in games])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=sorted(CASES), default=None)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for adapter, case in CASES.items():
        for seed in range(options.seeds if options.only in (None, adapter) else 0):
            began = time.perf_counter()
            rewards, invalid = measured(case, options.steps, seed)
            some = 1 if case.val_size else 3
            first, last = fmean(rewards[:some]), fmean(rewards[-some:])
            kind = "validations" if case.val_size else "steps"
            seconds = time.perf_counter() - began
            told = f"{adapter} {case.name} seed {seed}: first {some} {kind} {first:.2f}, last {last:.2f}"
            if any(invalid):
                told += f"; lost by an invalid move {fmean(invalid[:3]):.2f}, {fmean(invalid[-3:]):.2f}"
            print(f"{told} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
