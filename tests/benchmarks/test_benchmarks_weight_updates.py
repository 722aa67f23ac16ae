"""The check of weight updates under load passes if the engine drops stale KV, and fails if it does not."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from benchmarks import weight_updates
from benchmarks.rollout_engines import shape_named
from benchmarks.weight_updates import Check, Trial
from rally.engines.embedded import EmbeddedEngine


def test_every_policy_samples_from_the_new_weights_while_requests_run(capsys: pytest.CaptureFixture[str]) -> None:
    trials = weight_updates.run(shape_named("tiny"), torch.float32, weight_updates.POLICIES, 2)
    assert [trial.policy for trial in trials] == ["keep", "recompute", "abort"]
    for trial in trials:
        assert all(check.passes(torch.float32) for check in trial.checks), trial.text()
        assert min(trial.busy) > 0 and trial.reused == 3
        assert len(trial.checks) >= 3 and min(trial.moved) > 100 * weight_updates.FP32_TOLERANCE
    assert trials[2].ended["abort"] and trials[0].ended["length over versions"] and capsys.readouterr().out


def test_an_engine_that_keeps_stale_kv_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def unaware(engine: EmbeddedEngine) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(EmbeddedEngine, "updating", unaware)
    (trial,) = weight_updates.run(shape_named("tiny"), torch.float32, ["keep"], 2)
    assert not trial.passed and max(check.most for check in trial.checks) > 100 * weight_updates.FP32_TOLERANCE


def test_growing_memory_fails() -> None:
    gibibyte = 2**30
    steady = Trial("keep", torch.float32, memory=dict.fromkeys(range(9), (gibibyte, 2 * gibibyte)))
    growing = Trial("keep", torch.float32, memory={n: (gibibyte, (2 + n) * gibibyte) for n in range(9)})
    assert steady.flat and not growing.flat


def test_the_tolerance_depends_on_the_type() -> None:
    rounded = Check(tokens=8, most=0.03, k3=7e-5)
    assert rounded.passes(torch.bfloat16) and not rounded.passes(torch.float32)


def test_an_unknown_policy_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        weight_updates.main(["--policies", "keep,drop"])
    assert exit_.value.code == 2 and "drop" in capsys.readouterr().err
