"""Training raises the reward for every seed; with rewards shuffled within each group it does not.

A small model is fine-tuned to call the calculator, then deliberately degraded so that it guesses in two cases of three.
"""

import asyncio
import itertools
import random
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from train_cases import EASY, Paper
from transformers import PreTrainedModel

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import load_config
from rally.data import load_tasks, write_rows
from rally.demo.demo import CALCULATOR
from rally.demo.training_stages import small_model, success
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.models import attention
from rally.recipes.arithmetic import data as arithmetic
from rally.recipes.arithmetic.data import Habit, conversation
from rally.runs.train import train
from rally.sft.training import SftSettings, conversation_row, sft_step
from rally.track import RunFolder
from rally.train import trainer
from rally.train.batch import TrainBatch, build_batch
from rally.train.policy import OptimizerSettings, Policy
from rally.types import Episode

pytestmark = pytest.mark.slow

STEPS = 8
SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3)))


def teach(model: PreTrainedModel, codec: ChatCodec, mix: Mapping[Habit, float], steps: int, lr: float) -> None:
    rng = random.Random(f"{steps}")
    problems = arithmetic.draws(rng, "train", EASY)
    settings = SftSettings(batch_size=24, max_length=256)
    optimizer = OptimizerSettings(
        lr=lr, betas=(0.9, 0.98), weight_decay=0.0, schedule="linear", warmup_steps=10, min_lr_ratio=0.05
    )
    policy = Policy(model, optimizer, steps)
    for _ in range(steps):
        habits = rng.choices(list(mix), list(mix.values()), k=settings.batch_size)
        rows = [conversation_row(codec, conversation(next(problems), habit, rng), settings) for habit in habits]
        sft_step(policy, rows, settings)


@pytest.fixture(scope="session")
def pupil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, and a model that can use the calculator but mostly does not."""
    folder = tmp_path_factory.mktemp("pupil")
    write_rows(arithmetic.rows(400, 0, "train", EASY), folder / "train.parquet")
    write_rows(arithmetic.rows(32, 0, "test", EASY), folder / "test.parquet")
    tokenizer = tiny_tokenizer()
    codec = ChatCodec(tokenizer, "hermes", CALCULATOR.toolbox().schemas())
    model = small_model(tokenizer, 0)
    attention.install(model)
    teach(model, codec, {"good": 1.0}, 80, 2e-3)
    engine = EmbeddedEngine(model, EngineSettings(max_model_len=320, max_num_seqs=64))
    assert success(CALCULATOR, engine, codec, load_tasks(folder / "test.parquet")) > 0.9, "the format was not learned"
    asyncio.run(engine.close())
    teach(model, codec, {"good": 0.3, "guess": 0.7}, 30, 1e-3)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def learn(pupil: Path, out: Path, seed: int, *overrides: str) -> list[float]:
    """Train; the mean reward of each step."""
    tree: dict[str, Any] = {
        "data": {
            "train_files": str(pupil / "train.parquet"),
            "train_batch_size": 8,
            "max_prompt_length": 32,
            "max_response_length": 96,
        },
        "actor_rollout_ref": {
            "model": {"path": str(pupil / "model"), "enable_gradient_checkpointing": False},
            "actor": {"clip_ratio_high": 0.28, "optim": {"lr": 5e-4, "weight_decay": 0.0}},
            "rollout": {"n": 8, "agent_loop_config": {"tools": ["calculator"]}, "max_turns": 3},
        },
        "reward": {"num_workers": 1},
        "trainer": {"default_local_dir": str(out), "total_training_steps": STEPS, "seed": seed},
    }
    train(load_config(base=tree, overrides=list(overrides)), Paper().console)
    return [row.metrics["critic/rewards/mean"] for row in RunFolder(out).read_metrics()]


def rise(pupil: Path, out: Path, seed: int, *overrides: str) -> float:
    """Mean reward of the last three steps less that of the first two."""
    rewards = learn(pupil, out, seed, *overrides)
    assert len(rewards) == STEPS and 0.05 < rewards[0] < 0.6, f"the start must leave room: {rewards}"
    return fmean(rewards[-3:]) - fmean(rewards[:2])


@pytest.mark.parametrize("seed", SEEDS)
def test_training_raises_the_reward(pupil: Path, tmp_path: Path, seed: int) -> None:
    assert rise(pupil, tmp_path, seed) > 0.25


ROLLOUT = "actor_rollout_ref.rollout"
GATEWAY = (
    f"{ROLLOUT}.agent_loop_config.tools=[]",
    f"{ROLLOUT}.agent_loop_class=rally.gateway.BlackBoxAgentLoop",
    f"{ROLLOUT}.agent_loop_config.agent={Path(__file__).with_name('calculator_agent.py')}:run",
)


def check_gateway(run: Path) -> None:
    last = RunFolder(run).read_metrics()[-1].metrics
    assert last["agent/tool_calls/mean"] > 0 and last["agent/segments/max"] == 1
    assert last["actor/rollout_mismatch_kl"] < 1e-6 and last["failures/loop"] == 0


def test_training_through_the_gateway_trains_on_what_was_sampled(pupil: Path, tmp_path: Path) -> None:
    less = ("trainer.total_training_steps=2", "data.train_batch_size=2")
    assert len(learn(pupil, tmp_path, 1, *GATEWAY, *less)) == 2
    check_gateway(tmp_path)


@pytest.mark.long
def test_training_through_the_gateway_raises_the_reward(pupil: Path, tmp_path: Path) -> None:
    assert rise(pupil, tmp_path, 1, *GATEWAY) > 0.25
    check_gateway(tmp_path)
    assert RunFolder(tmp_path).read_metrics()[-1].metrics["agent/tool_calls/mean"] > 0.5


MODE, WEIGHTS = "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.loss_agg_mode"


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=rloo", f"{MODE}=cispo"),
        ("algorithm.adv_estimator=gae", "critic={optim: {lr: 1e-3}, ppo_mini_batch_size: 2}", "algorithm.lam=0.95"),
        *(
            pytest.param(overrides, marks=pytest.mark.long)
            for overrides in (
                ("algorithm.adv_estimator=reinforce_plus_plus", f"{MODE}=sapo"),
                (
                    "algorithm.turn_rewards=returns",
                    "algorithm.gamma=0.9",
                    "algorithm.rollout_correction.rollout_is=token",
                ),
                ("algorithm.adv_estimator=gigpo", f"{MODE}=gspo", f"{WEIGHTS}=seq-mean-token-mean"),
            )
        ),
    ],
    ids=lambda overrides: overrides[0].rpartition("=")[2],
)
def test_other_methods_raise_the_reward_too(pupil: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert rise(pupil, tmp_path, 1, *overrides) > 0.2


def shuffled_batch(episodes: Sequence[Episode], *options: Any) -> TrainBatch:
    """The same rewards in each group, assigned to other episodes of it."""
    rng, mixed = random.Random(len(episodes)), []
    for _, group in itertools.groupby(episodes, key=lambda e: e.group):
        members = list(group)
        rewards = rng.sample([e.reward for e in members], len(members))
        mixed += [replace(e, reward=reward) for e, reward in zip(members, rewards, strict=True)]
    return build_batch(mixed, *options)


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffled_rewards_teach_nothing(
    pupil: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "build_batch", shuffled_batch)
    assert rise(pupil, tmp_path, seed) < 0.12


def test_the_algorithm_in_one_file_raises_the_reward(pupil: Path) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    one_file = runpy.run_path(str(examples / "grpo_in_one_file.py"))
    agent, tasks = one_file["load_agent"](pupil / "model"), list(load_tasks(pupil / "train.parquet"))
    rewards = asyncio.run(one_file["train"](agent, tasks, steps=STEPS, prompts=8, seed=1))
    assert len(rewards) == STEPS and fmean(rewards[-3:]) - fmean(rewards[:2]) > 0.25
