"""A short kill drill: three kills of a deterministic run, one of them during a save, change no result."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.drill("reliability", "A run is killed again and again", "It ends bit-identical to an undisturbed one")
@pytest.mark.long
def test_a_run_killed_again_and_again_ends_where_an_undisturbed_one_does(home: Path, tmp_path: Path) -> None:
    # A random model earns no reward, so only the entropy term changes the weights.
    keys = ["actor_rollout_ref.actor.entropy_coeff=0.01", "data.max_response_length=24"]
    command = [sys.executable, "-m", "benchmarks.kill_drill", "--out", str(tmp_path), "--model", str(home / "model")]
    done = subprocess.run(
        [*command, "--steps", "4", "--kills", "3", *keys],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nSIGKILL ") == 3 and "while saving" in done.stdout
    assert "weights, optimizer, sampler and metrics are bit-identical" in done.stdout
    start, end = (
        load_file(folder / "model.safetensors")
        for folder in (home / "model", tmp_path / "broken" / "checkpoints" / "global_step_4" / "actor")
    )
    assert not all(torch.equal(start[name], value) for name, value in end.items()), "something must have been learned"
