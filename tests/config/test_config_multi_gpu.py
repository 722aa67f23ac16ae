"""Who samples from a policy on several GPUs."""

import pytest

from rally.config import load_config

FOUR = "trainer.n_gpus_per_node=4"
R = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("lines", "in_ranks", "loop_workers"),
    [
        (["trainer.n_gpus_per_node=1"], False, False),
        (["trainer.n_gpus_per_node=1", f"{R}.agent.num_workers=2"], False, False),
        ([FOUR], True, False),
        ([FOUR, f"{R}.agent.num_workers=2"], True, True),
        ([FOUR, f"{R}.name=vllm"], False, False),
        ([FOUR, f"{R}.name=rally", f"{R}.agent.num_workers=2"], False, True),
        (["trainer.n_gpus_per_node=2", "trainer.device=cpu"], True, False),
    ],
)
def test_every_rank_samples_unless_servers_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], in_ranks: bool, loop_workers: bool
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = load_config(overrides=lines)
    assert (config.samples_in_ranks, config.uses_loop_workers) == (in_ranks, loop_workers)
