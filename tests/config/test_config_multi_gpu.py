"""Effects of several GPUs on a configuration."""

import pytest

from rally.config import load_config
from rally.config.checks.multi_gpu import served

SERVERS = "actor_rollout_ref.rollout.data_parallel_size"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["trainer.n_gpus_per_node=1"], ("embedded", 1)),
        (["trainer.n_gpus_per_node=4"], ("rally", 4)),
        (["trainer.n_gpus_per_node=4", f"{SERVERS}=1"], ("rally", 1)),
        (["trainer.n_gpus_per_node=4", f"{SERVERS}=2"], ("rally", 2)),
        (["trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.name=vllm"], ("vllm", 1)),
        (["trainer.n_gpus_per_node=2", "trainer.device=cpu"], ("rally", 1)),
    ],
)
def test_who_samples_for_a_policy_in_parts(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], expected: tuple[str, int]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    rollout = served(load_config(overrides=lines)).rollout
    assert (rollout.name, rollout.data_parallel_size) == expected
