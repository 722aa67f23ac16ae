"""Trains a tiny model on one environment of each adapter, on the CPU: the reward of the first and the last steps.

python -m benchmarks.environments [--steps 20] [--only gymnasium]

The model is first fine-tuned on games with random replies, so that it knows the form of a reply and nothing about the
task. Each adapter needs its package (docs/environments.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

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
    replies: tuple[str, ...] = ()
    turns: int = 3
    tokens: int = 512  # of a response


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


async def conversation(case: Case, seed: int) -> tuple[list[Message], list[dict[str, Any]]]:
    """One episode with random replies, and the tools of the environment."""
    rng = random.Random(seed)
    spec = EnvSpec(label=case.name, make=find_environment(case.name), args=case.args)
    session = EnvSession(spec, {"env": case.name, "id": str(seed), "seed": seed}, seed, 60.0)
    try:
        messages, tools = await session.reset()
        for turn in range(case.turns):
            reply = rng.choice(case.replies)
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


def taught(case: Case, folder: Path) -> None:
    """Write a small model that gives the replies at random."""
    tokenizer = tiny_tokenizer()
    model = small_model(tokenizer, 0)
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


def rewards(case: Case, steps: int) -> list[float]:
    """The mean reward of each training step."""
    with tempfile.TemporaryDirectory() as home:
        model, out = Path(home) / "model", Path(home) / "run"
        taught(case, model)
        entry = json.dumps([{"name": case.name, "args": case.args}])
        overrides: Sequence[str] = [
            f"env.mixture={entry}",
            *("env.train_size=256", "env.val_size=0", "env.unfinished_reward=0"),
            *("data.train_batch_size=8", "data.max_prompt_length=1536", f"data.max_response_length={case.tokens}"),
            *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.actor.optim.lr=1e-3"),
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            *("actor_rollout_ref.rollout.n=8", f"actor_rollout_ref.rollout.max_turns={2 * case.turns}"),
            *(f"trainer.default_local_dir={out}", f"trainer.total_training_steps={steps}", "trainer.save_freq=-1"),
            "trainer.startup_check=false",
        ]
        train(load_config(overrides=list(overrides), note=lambda text: None), RunConsole())
        return [row.metrics["critic/rewards/mean"] for row in RunFolder(out).read_metrics() if row.step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=sorted(CASES), default=None)
    options = parser.parse_args()
    for adapter, case in CASES.items():
        if options.only in (None, adapter):
            began = time.perf_counter()
            found = rewards(case, options.steps)
            first, last = fmean(found[:3]), fmean(found[-3:])
            seconds = time.perf_counter() - began
            print(f"{case.name}: reward {first:.2f} in the first 3 steps, {last:.2f} in the last 3 ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
