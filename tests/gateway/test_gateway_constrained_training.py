"""A policy is trained on constrained replies, and its reward rises; the trainer sees what was sampled."""

import json
from pathlib import Path
from typing import Any

import pytest
from train_cases import Paper, run_tree

from rally.config import load_config
from rally.gateway import AgentClient
from rally.runs.train import train
from rally.track import RunFolder

pytest.importorskip("llguidance")
DIGIT = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
    "additionalProperties": False,
}


async def digits(row: dict[str, Any], client: AgentClient) -> float:
    """Asks for a digit, and earns it."""
    wanted = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT}}
    completion = await client.openai().chat.completions.create(
        model=client.model, messages=[{"role": "user", "content": "Go"}], response_format=wanted
    )
    return json.loads(completion.choices[0].message.content)["digit"] / 9.0  # type: ignore[no-any-return]


def test_the_reward_of_constrained_replies_rises(home: Path, tmp_path: Path) -> None:
    tree = run_tree(home, tmp_path / "run")
    tree["actor_rollout_ref"]["rollout"] = {
        "n": 8,
        "agent_loop_class": "black_box",
        "agent_loop_config": {"agent": f"{__file__}:digits"},
    }
    tree["actor_rollout_ref"]["actor"]["optim"]["lr"] = 1e-2
    del tree["custom_reward_function"]
    tree["trainer"] |= {"total_training_steps": 8, "save_freq": -1, "val_before_train": False, "test_freq": -1}
    train(load_config(base=tree), Paper().console)
    rows = [row.metrics for row in RunFolder(tmp_path / "run").read_metrics() if row.step]
    rewards = [metrics["critic/score/mean"] for metrics in rows]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.15, rewards
    assert max(metrics["actor/rollout_mismatch_max"] for metrics in rows) < 1e-4
    assert all(metrics["agent/constrained"] == 24 for metrics in rows)
