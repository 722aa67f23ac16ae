"""After kill -9 in the middle of a step, the same command resumes from its checkpoint and ends with the same result."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from train_cases import Paper, run_tree, weights
from transformers import AutoModelForCausalLM

from rally.config import load_config
from rally.runs.train import train

STEPS, EPISODES = 7, 12  # a step's episodes: 3 prompts x 4
HELD = 5 * EPISODES + EPISODES // 2  # the episode in the middle of step 6, at which the first run is stopped

REWARD = """
import os, pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    hold = pathlib.Path(os.environ["RALLY_TEST_HOLD"])
    if hold.exists():
        with hold.open("a") as file:
            file.write(".")
        while hold.exists() and hold.stat().st_size > {held}:
            time.sleep(0.05)
    return (sum(map(ord, solution_str)) % 7) / 7
"""


def write_config(home: Path, folder: Path) -> Path:
    """Seven steps, a checkpoint after every second, into folder/run; rows are chosen by what was learned of them."""
    reward = folder / "reward.py"
    reward.write_text(REWARD.format(held=HELD), encoding="utf-8")
    tree = run_tree(home, folder / "run")
    tree["data"].pop("val_files")
    tree["data"]["curriculum"] = {"by": "success"}
    tree["custom_reward_function"] = {"path": str(reward)}
    tree["trainer"] |= {"total_training_steps": STEPS, "save_freq": 2, "seed": 3}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "rally.cli", "train", str(config)]


@pytest.fixture(scope="module", autouse=True)
def hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """While this file exists, rewards are counted in it and the one after `HELD` does not return."""
    path = tmp_path_factory.mktemp("hold") / "hold"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RALLY_TEST_HOLD", str(path))
        yield path
        path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def killed(home: Path, tmp_path_factory: pytest.TempPathFactory, hold: Path) -> Path:
    """A run that was killed in step 6: checkpoints of steps 2 and 4, metrics up to step 5."""
    folder = tmp_path_factory.mktemp("killed")
    # Checkpoints are written in the background, so the rewards of step 6 do not say that step 4 is on disk.
    written = folder / "run" / "checkpoints" / "global_step_4"
    hold.touch()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command(write_config(home, folder)), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 280
        while hold.stat().st_size <= HELD or not written.exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        hold.unlink()  # releases whatever still waits
    return folder


@pytest.fixture
def resumable(killed: Path, home: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed / "run", tmp_path / "run")
    write_config(home, tmp_path)
    return tmp_path


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def actor(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "checkpoints" / f"global_step_{STEPS}" / "actor"
    return weights(AutoModelForCausalLM.from_pretrained(path))


def learned(folder: Path) -> dict[str, list[float]]:
    """The sampler's final state of each row."""
    path = folder / "checkpoints" / f"global_step_{STEPS}" / "sampler.json"
    state: dict[str, list[float]] = json.loads(path.read_text())["state"]
    return state


def test_the_kill_was_in_the_middle_of_a_step(killed: Path) -> None:
    assert steps(killed / "run") == [1, 2, 3, 4, 5]
    assert sorted(p.name for p in (killed / "run" / "checkpoints").glob("*_step_*")) == [
        "global_step_2",
        "global_step_4",
    ]


@pytest.mark.drill(
    "reliability", "`kill -9` in the middle of a step", "The same command resumes and ends bit-identical"
)
def test_the_same_command_goes_on_to_the_same_end(
    resumable: Path, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    paper, run = Paper(), resumable / "run"
    train(load_config(resumable / "config.yaml"), paper.console)
    assert f"resuming from {run / 'checkpoints' / 'global_step_4'}, step 4" in paper.text
    assert steps(run) == list(range(1, STEPS + 1)), "each step exactly once"
    assert steps(run / "rewound-1") == [5], "what the first run did after its checkpoint is set aside"

    whole = tmp_path_factory.mktemp("whole")
    train(load_config(write_config(home, whole)), Paper().console)
    assert learned(run) == learned(whole / "run") and len(learned(run)) > 3
    ours, theirs, start = actor(run), actor(whole / "run"), AutoModelForCausalLM.from_pretrained(home / "model")
    apart = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    moved = max(float((ours[name] - value).abs().max()) for name, value in weights(start).items())
    # Timing decides which requests share a forward, and so the last bits of log-probabilities. Adam turns
    # them into at most a small part of a step.
    assert moved > 1e-3 and apart <= 0.02 * moved, f"{apart} apart after moving by {moved}"


@pytest.mark.drill("reliability", "A kill while a checkpoint is written", "The torn one is passed over with a warning")
def test_a_torn_checkpoint_is_passed_over_with_a_warning(resumable: Path) -> None:
    run, paper = resumable / "run", Paper()
    torn = run / "checkpoints" / "global_step_4"
    os.truncate(torn / "actor" / "model.safetensors", 100)
    train(load_config(resumable / "config.yaml"), paper.console)
    assert f"warning: the checkpoint {torn} is damaged (actor/model.safetensors has 100 bytes" in paper.text
    assert f"resuming from {run / 'checkpoints' / 'global_step_2'}, step 2" in paper.text
    assert steps(run) == list(range(1, STEPS + 1)) and steps(run / "rewound-1") == [3, 4, 5]
    assert actor(run)
