"""The demo curriculum trains until the gate is passed, gives the same model for the same seed, and never overwrites a
run."""

import random
from pathlib import Path

import pytest
import torch
from train_cases import Paper, same, weights

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import Config
from rally.demo import training_stages
from rally.demo.demo import CALCULATOR
from rally.demo.training_stages import (
    CourseSettings,
    Teacher,
    TeachingMaterial,
    TeachingSettings,
    run_course,
    small_model,
)
from rally.engines.embedded import EmbeddedEngine
from rally.types import RallyError

BRIEF = TeachingSettings(clean_blocks=(2, 1, 1), gate=0.9, habit_steps=1, batch=4, habit_batch=4, rehearsals=2)


def taught(success: list[float], seed: int, paper: Paper) -> dict[str, torch.Tensor]:
    """The weights after a short curriculum whose checks report the given `success`."""
    tokenizer = tiny_tokenizer()
    model = small_model(tokenizer, 0)
    codec = ChatCodec(tokenizer, "hermes", CALCULATOR.toolbox().schemas())
    shares = iter(success)

    def at_the_gate(engine: EmbeddedEngine) -> float:
        return next(shares)

    material = TeachingMaterial(codec, CALCULATOR.tell, CALCULATOR.habits, max_length=320)
    Teacher(model, material, BRIEF, at_the_gate, random.Random(seed), paper.console).teach()
    assert not list(shares), "a gate was left out"
    return weights(model)


def test_lessons_go_on_until_the_gate_is_passed() -> None:
    for success, steps in (([0.95], 2), ([0.5, 0.9], 3)):
        paper = Paper()
        taught(success, 0, paper)
        assert f"sft {steps} steps" in paper.text and f"sft {steps + 1} steps" not in paper.text
        assert "warning" not in paper.text and "sft, bad habits 1/1" in paper.text


def test_a_gate_that_is_never_passed_is_told() -> None:
    paper = Paper()
    taught([0.5, 0.6, 0.7], 0, paper)
    assert "greedy success reached only 70.0%; try another --seed" in paper.text


def test_a_seed_is_a_start() -> None:
    first, again, other = (taught([1.0], seed, Paper()) for seed in (1, 1, 2))
    assert same(first, again) and not same(first, other)


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}", encoding="utf-8")
    with pytest.raises(RallyError, match="already holds a run; remove it or choose another --out"):
        run_course(CALCULATOR, tmp_path, CourseSettings(), Paper().console)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_mistake_in_the_words_is_told_before_anything_is_taught(tmp_path: Path) -> None:
    paper = Paper()
    with pytest.raises(RallyError, match=r"unknown key trainer\.sead; did you mean trainer\.seed"):
        run_course(CALCULATOR, tmp_path, CourseSettings(), paper.console, ["trainer.sead=1"])
    assert "sft" not in paper.text


@pytest.mark.parametrize(
    "override",
    [
        "trainer.val_before_train=false",
        "trainer.val_only=true",
        "trainer.default_local_dir=elsewhere",
        "data.val_files=${data.train_files}",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=false",
    ],
)
def test_what_the_report_compares_stays_as_it_is(tmp_path: Path, override: str) -> None:
    paper = Paper()
    with pytest.raises(RallyError, match=f"validations of the demo itself; leave out {override.partition('=')[0]}"):
        run_course(CALCULATOR, tmp_path, CourseSettings(), paper.console, [override])
    assert "sft" not in paper.text


def test_the_size_of_a_step_is_told_as_it_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(config: Config, console: object) -> None:
        raise RallyError(f"{config.trainer.total_training_steps} steps")

    monkeypatch.setattr(training_stages, "teach", lambda *_: None)
    monkeypatch.setattr(training_stages.run, "train", trained)
    paper = Paper()
    overrides = ["data.train_batch_size=16", "actor_rollout_ref.rollout.n=4"]
    with pytest.raises(RallyError, match="20 steps"):
        run_course(CALCULATOR, tmp_path, CourseSettings(grpo_steps=20), paper.console, overrides)
    assert "GRPO: 16 prompts x 4 episodes a step" in paper.text
