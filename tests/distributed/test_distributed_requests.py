"""Whole runs on two ranks with two loop workers, with grammars or images: the episodes are those of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
from train_cases import Paper, run_tree, write_reward
from vision_cases import write_vision_model

from rally.config import load_config
from rally.data import write_rows
from rally.distributed import train
from rally.recipes.geometry import data as geometry
from rally.track import RunFolder
from rally.types import Episode

ROOT = Path(__file__).parents[2]
ROLLOUT: dict[str, Any] = {"n": 4, "gpu_memory_utilization": 0.1}
RANKS: dict[str, Any] = {"deterministic": True, "agent": {"num_workers": 2}}


def episodes_of(tree: dict[str, Any], out: Path) -> dict[str, Episode]:
    """Those of the first step of a run, whose metrics must be sound."""
    tree["trainer"] |= {"default_local_dir": str(out), "total_training_steps": 1, "save_freq": -1, "device": "cpu"}
    tree["trainer"]["val_before_train"] = False
    tree["data"]["val_files"] = None
    train(load_config(base=tree), Paper().console)
    [metrics] = [row.metrics for row in RunFolder(out).read_metrics() if row.step]
    assert metrics["actor/rollout_mismatch_kl"] < 1e-7 and metrics["actor/grad_norm"] > 0
    return {episode.id: episode for episode in RunFolder(out).read_episodes(1)}


def assert_same_episodes(tree: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch) -> list[Episode]:
    helpers = Path(__file__).parents[1] / "helpers"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, helpers))))
    rollout = {**tree["actor_rollout_ref"]["rollout"], **ROLLOUT}
    tree["actor_rollout_ref"]["rollout"] = rollout
    alone = episodes_of(tree, out / "one")
    tree["actor_rollout_ref"]["rollout"] = rollout | RANKS
    tree["trainer"]["n_gpus_per_node"] = 2
    both = episodes_of(tree, out / "two")
    assert alone.keys() == both.keys()
    for name, episode in alone.items():
        for mine, expected in zip(both[name].segments, episode.segments, strict=True):
            assert mine.ids == expected.ids and mine.images == expected.images
            assert mine.constrained == expected.constrained
            assert mine.response_logprobs == pytest.approx(expected.response_logprobs, abs=1e-5)
    return list(both.values())


@pytest.mark.long
def test_grammars(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    tree = run_tree(home, tmp_path)
    agent = ROOT / "tests/gateway/test_gateway_constrained_training.py"
    options = {"agent": f"{agent}:digits"}
    tree["actor_rollout_ref"]["rollout"] = {"agent_loop_class": "black_box", "agent_loop_config": options}
    del tree["custom_reward_function"]
    episodes = assert_same_episodes(tree, tmp_path, monkeypatch)
    assert all(segment.constrained for episode in episodes for segment in episode.segments)


@pytest.mark.long
def test_grammars_over_launched_servers(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tree = run_tree(home, tmp_path)
    agent = ROOT / "tests/gateway/test_gateway_constrained_training.py"
    tree["actor_rollout_ref"]["rollout"] = {
        **ROLLOUT,
        "name": "rally",
        "agent_loop_class": "black_box",
        "agent_loop_config": {"agent": f"{agent}:digits"},
    }
    tree["trainer"]["v1"] = {"trainer_mode": "separate_async"}
    del tree["custom_reward_function"]
    episodes = episodes_of(tree, tmp_path / "run")
    assert all(segment.constrained for episode in episodes.values() for segment in episode.segments)


@pytest.mark.long
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = assert_same_episodes(vision_tree(tmp_path), tmp_path, monkeypatch)
    shown = [span.image for episode in episodes for segment in episode.segments for span in segment.images]
    assert len(shown) == 8 and all(image.read() for image in shown)


@pytest.mark.long
def test_images_over_launched_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tree = vision_tree(tmp_path)
    tree["actor_rollout_ref"]["rollout"] = {**ROLLOUT, "name": "rally"}
    tree["trainer"]["v1"] = {"trainer_mode": "separate_async"}
    episodes = episodes_of(tree, tmp_path / "run")  # compares log-probabilities of rollout and training
    assert len(episodes) == 8 and all(len(one.segments[0].images) == 1 for one in episodes.values())


def vision_tree(tmp_path: Path) -> dict[str, Any]:
    write_vision_model(tmp_path / "model")
    write_reward(tmp_path)
    write_rows(geometry.rows(2, 0, "train"), tmp_path / "train.parquet")
    tree = run_tree(tmp_path, tmp_path)
    tree["data"] |= {"max_prompt_length": 1024, "max_response_length": 12, "train_batch_size": 2}
    tree["data"]["mm_processor_kwargs"] = {"max_pixels": 1024}
    tree["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 2
    return tree
