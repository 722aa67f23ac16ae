"""A gradient over the limits changes no weight, and its batch can be read back."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import make_model
from train_cases import Paper, run_config, same, small_policy, uneven_episodes, weights

from rally.runs.train import train
from rally.train import update
from rally.train.batch import build_batch
from rally.train.divergence import ENOUGH, DivergedError, GradientLimits, gradient_problem, keeping_diverged
from rally.train.policy import Policy
from rally.train.update import UpdateSettings, update_policy

USUAL = [0.5] * ENOUGH


@pytest.mark.parametrize(
    ("norm", "earlier", "limits", "problem"),
    [
        (math.nan, [], GradientLimits(), "the gradient norm is nan"),
        (math.inf, [], GradientLimits(factor=None), "the gradient norm is inf"),
        (1e9, USUAL[1:], GradientLimits(), None),  # too few steps for a median
        (
            1001.0,
            USUAL,
            GradientLimits(),
            "times both its median in the last 8 steps (0.5) and the clipping norm (1)",
        ),
        (999.0, USUAL, GradientLimits(), None),
        (90.0, USUAL, GradientLimits(factor=100), None),  # 180 times the median, but only 90 times the clip
        (5000.0, [20.0] * 9, GradientLimits(), None),  # large norms are normal here
        (5.0, [], GradientLimits(highest=4.0), "over trainer.guards.max_grad_norm=4"),
        (1e9, USUAL, GradientLimits(factor=None), None),
    ],
)
def test_which_gradients_stop_a_run(
    norm: float, earlier: list[float], limits: GradientLimits, problem: str | None
) -> None:
    found = gradient_problem(norm, earlier, 1.0, limits)
    assert found is None if problem is None else problem in str(found)


@given(st.lists(st.floats(0, 1000), max_size=64), st.floats(0, 1000))
def test_norms_up_to_a_thousand_times_the_clip_never_stop_a_run(earlier: list[float], norm: float) -> None:
    assert gradient_problem(norm, earlier, 1.0, GradientLimits()) is None


def spoil(policy: Policy, factor: float) -> None:
    policy.model.lm_head.weight.register_hook(lambda gradient: gradient * factor)


def test_a_batch_that_the_disk_refuses_does_not_hide_why_the_step_was_not_taken(tmp_path: Path) -> None:
    (tmp_path / "diverged").write_text("a file where the folder should be")
    with (
        pytest.raises(
            DivergedError, match=r"^too steep, so the step .* batch could not be saved \(.*\); lower the learning"
        ),
        keeping_diverged(tmp_path, 9, []),
    ):
        raise DivergedError("too steep")


@pytest.mark.drill("reliability", "A gradient that is not finite or explodes", "No step is taken and the batch is kept")
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e8])
def test_the_batch_is_kept_and_the_weights_are_not_changed(tmp_path: Path, factor: float) -> None:
    policy, batch = small_policy(make_model(), lr=1e-6), build_batch(uneven_episodes())
    cut = UpdateSettings(mini_batch_groups=100, max_tokens=30)
    for _ in range(ENOUGH):
        update_policy(policy, batch, cut)
    before, moments = weights(policy.model), policy.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    spoil(policy, factor)
    sources = [{"id": e.id} for e in uneven_episodes()]
    with (
        pytest.raises(
            DivergedError, match=r"so the step was not applied; its batch is in .*/diverged/step_000009\.saf"
        ),
        keeping_diverged(tmp_path, 9, sources),
    ):
        update_policy(policy, batch, cut)
    assert same(before, weights(policy.model))
    assert torch.equal(moments, policy.optimizer.state_dict()["state"][0]["exp_avg"])
    check_saved(tmp_path / "diverged" / "step_000009.safetensors")
    names = {path.name for path in (tmp_path / "diverged").iterdir()}
    assert names == {"step_000009.safetensors", "step_000009.json"}, "nothing half-written is left"


def check_saved(path: Path) -> None:
    """Every row with an advantage is saved with its values."""
    saved, told = load_file(path), json.loads(path.with_suffix(".json").read_text())
    lengths = saved["lengths_R"].tolist()
    expected = {tuple(row.ids.tolist()): row for row in build_batch(uneven_episodes()).rows if row.advantages.any()}
    assert len(lengths) == len(expected)
    cut = (saved[name].split(lengths) for name in ("ids_T", "sampled_T"))
    counts = [int(mask.sum()) for mask in saved["sampled_T"].split(lengths)]
    per_token = (saved[name].split(counts) for name in ("advantages_M", "old_logprobs_M", "losses_M"))
    for number, ids, mask, advantages, old, losses in zip(saved["episode_R"].tolist(), *cut, *per_token, strict=True):
        row = expected[tuple(ids.tolist())]
        assert row.episode == number and told["sources"][str(number)] == {"id": uneven_episodes()[number].id}
        assert mask.nonzero()[:, 0].tolist() == row.sampled.tolist()
        assert advantages.tolist() == pytest.approx(row.advantages) and old.tolist() == pytest.approx(row.logprobs)
        assert losses.isfinite().all() and losses.abs().sum() > 0
    assert told["not_finite"]["losses_M"] == 0 and "the gradient norm is" in told["problem"]


def test_the_norms_that_were_usual_are_in_the_checkpoint(tmp_path: Path) -> None:
    """A resumed run stops at the same step as the first one."""
    policy, batch = small_policy(make_model(), lr=1e-6), build_batch(uneven_episodes())
    for _ in range(ENOUGH):
        update_policy(policy, batch, UpdateSettings(mini_batch_groups=100))
    torch.save(policy.state(), tmp_path / "trainer.pt")
    resumed = small_policy(make_model())
    resumed.load_state(torch.load(tmp_path / "trainer.pt", weights_only=True))
    spoil(resumed, 1e8)
    with pytest.raises(DivergedError, match=f"median in the last {ENOUGH} steps"):
        update_policy(resumed, batch, UpdateSettings(mini_batch_groups=100))


@pytest.mark.drill("reliability", "A loss that is not a number", "The run stops and names the saved batch")
def test_a_run_whose_loss_is_not_a_number_stops_and_names_the_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paper: Paper
) -> None:
    honest = update.policy_loss

    def poisoned(tokens: Any, settings: Any) -> Any:
        loss = honest(tokens, settings)
        return loss._replace(loss_M=loss.loss_M * torch.where(torch.arange(len(loss.loss_M)) == 2, math.nan, 1.0))

    config = run_config(home, tmp_path / "run", "data.val_files=null", "trainer.total_training_steps=2")
    monkeypatch.setattr(update, "policy_loss", poisoned)
    with pytest.raises(
        DivergedError, match=r"norm is nan, .* is in .*run/diverged/step_000001\.safetensors and the \.json"
    ):
        train(config, paper.console)
    told = json.loads((tmp_path / "run" / "diverged" / "step_000001.json").read_text())
    assert told["not_finite"]["losses_M"] == 1 and told["not_finite"]["advantages_M"] == 0
    assert {"id", "group", "task", "reward"} == set(next(iter(told["sources"].values())))
    assert not list((tmp_path / "run" / "checkpoints").glob("global_step_*"))


def test_the_limits_are_keys(home: Path, tmp_path: Path) -> None:
    keys = ["trainer.guards.max_grad_norm=1e-9", "trainer.guards.grad_norm_factor=null", "data.val_files=null"]
    with pytest.raises(DivergedError, match=r"over trainer\.guards\.max_grad_norm=1e-09"):
        train(run_config(home, tmp_path / "run", *keys), Paper().console)
