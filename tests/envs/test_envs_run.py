"""Whole runs on environments: the reward rises, a resumed run is identical, and checks at the start.

The task is to name one digit. A small model is fine-tuned on the form of an answer, with random digits.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from train_cases import Paper

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import Config, load_config
from rally.data import DataError
from rally.demo.training_stages import small_model
from rally.doctor.check_context import DoctorCase
from rally.doctor.reward_function import reward
from rally.doctor.rows import lengths, loops, rows
from rally.envs import EnvError, Environment, EnvTurn, MatchEnd, SeatTurn
from rally.models import attention
from rally.runs.dry_run import dry_run
from rally.runs.evaluate import evaluate
from rally.runs.train import train
from rally.sft.training import SftSettings, conversation_row, sft_step
from rally.track import RunFolder
from rally.train.policy import OptimizerSettings, Policy

pytestmark = pytest.mark.slow
NAME = f"{__name__}.Digit"


class Digit(Environment):
    """The policy names a digit; it has two tries."""

    def __init__(self, digit: int = 7, drifts: bool = False) -> None:
        self.digit, self.drifts, self.tries = digit, drifts, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, list[Any]]:
        return f"Which{random.random() if self.drifts else '?'}", []

    def step(self, turn: EnvTurn) -> tuple[str, float, bool, dict[str, Any]]:
        self.tries += 1
        right = turn.reply == f"#### {self.digit}"
        return "No.", float(right), right or self.tries == 2, {"tries": self.tries}


class HigherDigit(Environment):
    """Each of two seats names a digit; the higher one wins. Alone, a digit above 4 wins."""

    def seats(self) -> int:
        return 2

    def start(self, row: Mapping[str, Any], seed: int) -> SeatTurn:
        self.named: list[int] = []
        return SeatTurn(seat=0, observation="Which?")

    def play(self, turn: EnvTurn) -> SeatTurn | MatchEnd:
        self.named.append(digit_of(turn))
        if len(self.named) == 1:
            return SeatTurn(seat=1, observation="Which?")
        won = float((self.named[0] > self.named[1]) - (self.named[0] < self.named[1]))
        return MatchEnd(rewards={0: won, 1: -won}, info={s: {"digit": self.named[s]} for s in (0, 1)})

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, list[Any]]:
        return "Which?", []

    def step(self, turn: EnvTurn) -> tuple[str, float, bool, dict[str, Any]]:
        return "", float(digit_of(turn) > 4), True, {}


def digit_of(turn: EnvTurn) -> int:
    named = turn.reply.removeprefix("#### ")
    return int(named) if named.isdigit() and len(named) == 1 else -1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("digits"), random.Random(0)
    tokenizer = tiny_tokenizer()
    made = small_model(tokenizer, 0)
    attention.install(made)
    codec, settings = ChatCodec(tokenizer, "hermes"), SftSettings(batch_size=16, max_length=96)
    policy = Policy(made, OptimizerSettings(lr=3e-3, weight_decay=0.0, schedule="linear", warmup_steps=5), 30)
    for _ in range(30):
        talks = [
            [
                {"role": "user", "content": "Which?"},
                {"role": "assistant", "content": f"#### {rng.randrange(10)}"},
                {"role": "user", "content": "No."},
                {"role": "assistant", "content": f"#### {rng.randrange(10)}"},
            ]
            for _ in range(settings.batch_size)
        ]
        sft_step(policy, [conversation_row(codec, talk, settings) for talk in talks], settings)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(model: Path, out: Path, steps: int, *overrides: str) -> Config:
    rollout = ["n=6", "deterministic=true"]
    return load_config(
        overrides=[
            *(f"actor_rollout_ref.rollout.{one}" for one in rollout),
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            *("data.train_batch_size=4", "data.max_prompt_length=32", "data.max_response_length=64"),
            *(f"trainer.default_local_dir={out}", f"trainer.total_training_steps={steps}", "trainer.save_freq=2"),
            *(f"env.name={NAME}", "env.train_size=16", "env.val_size=4", "reward.num_workers=1"),
            "trainer.startup_check=false",
            *overrides,
        ]
    )


def test_the_reward_rises_and_a_resumed_run_is_identical(model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    outcome = train(config_of(model, whole, 6), Paper().console)
    steps = [row.metrics["critic/rewards/mean"] for row in RunFolder(whole).read_metrics() if row.step]
    assert fmean(steps[-2:]) > fmean(steps[:2]) + 0.2, steps
    assert outcome.metrics[f"val-core/{NAME}/reward/mean@1"] >= 0.0
    train(config_of(model, parts, 2), Paper().console)
    train(config_of(model, parts, 6), Paper().console)
    for step in (1, 2, 3, 6):
        first, second = (
            [(e.id, e.reward, e.segments) for e in RunFolder(f).read_episodes(step)] for f in (whole, parts)
        )
        assert first == second, f"step {step}"
    episode = next(iter(RunFolder(whole).read_episodes(1)))
    assert episode.task.row == {"env": NAME, "id": episode.task.id, "seed": int(episode.task.id.rpartition(":")[2])}
    assert episode.task.prompt == ({"role": "user", "content": "Which?"},)


def test_a_mixture_validates_each_environment_by_its_label(model: Path, tmp_path: Path) -> None:
    entries = f"[{{name: {NAME}, label: seven}}, {{name: {NAME}, label: three, weight: 0, args: {{digit: 3}}}}]"
    outcome = evaluate(config_of(model, tmp_path, 1, f"env.mixture={entries}", "env.name=null"), Paper().console)
    assert {key.split("/")[1] for key in outcome.metrics if key.startswith("val-core/")} == {"seven", "three"}


def test_the_start_of_a_run_checks_its_environments(model: Path, tmp_path: Path) -> None:
    paper = Paper()
    dry_run(config_of(model, tmp_path, 1), paper.console)
    assert NAME in paper.text and "env_agent" in paper.text and "Which?" in paper.text
    for overrides, words in {
        ("env.args.digits=3",): "unexpected keyword argument",
        ("env.args.drifts=true",): "two different prompts",
        ("env.name=no_such_module.Env",): "cannot be imported",
    }.items():
        with pytest.raises(EnvError, match=words):
            train(config_of(model, tmp_path, 1, *overrides), paper.console)
    with pytest.raises(DataError, match="16 of 16 checked training prompts"):
        train(config_of(model, tmp_path, 1, "data.max_prompt_length=2"), paper.console)


def test_the_doctor_reads_the_rows_of_environments(model: Path, tmp_path: Path) -> None:
    case = DoctorCase(config_of(model, tmp_path, 1))
    found = [finding for check in (rows, loops, lengths, reward) for finding in check(case)]
    assert {finding.status for finding in found} == {"ok"}
    assert any("asks 'Which?'" in finding.text for finding in found)


def test_self_play_learns_in_lockstep_with_a_group_for_each_seat(model: Path, tmp_path: Path) -> None:
    name = f"{__name__}.HigherDigit"
    train(config_of(model, tmp_path, 6, f"env.name={name}", "trainer.val_before_train=true"), Paper().console)
    folder = RunFolder(tmp_path)
    first, last = (list(folder.read_episodes(step)) for step in (1, 6))
    assert len(first) == 4 * 6 * 2 and len({e.group for e in first}) == 4 * 2
    assert all(len({e.task.row["seat"] for e in first if e.group == g}) == 1 for g in {e.group for e in first})
    assert sum(e.reward or 0.0 for e in first) == 0.0, "what one seat wins the other loses"
    digits = [fmean(e.extra["environment"]["info"][-1]["digit"] for e in some) for some in (first, last)]
    assert digits[1] > digits[0] + 1.5, digits
    apart = ("trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.rollout.deterministic=false")
    for keys in (apart, ("algorithm.filter_groups.enable=true",)):
        with pytest.raises(EnvError, match="several trained seats"):
            train(config_of(model, tmp_path / "x", 1, f"env.name={name}", *keys), Paper().console)
