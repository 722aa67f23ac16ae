"""A whole run on two processes resumes a run of one process, can be resumed by one, and fails cleanly."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from train_cases import Paper, run_config
from transformers import AutoModelForCausalLM

from rally.config import Config
from rally.distributed import train
from rally.distributed.controller import Controller, ControllerSettings, LostRank
from rally.models.sharding import Message
from rally.runs.build.models import RunPlan
from rally.track import RunFolder
from rally.train.checkpoint.store import open_checkpoint
from rally.train.rank_messages import UpdatePolicy

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = """
from rally.algos.losses import register_policy_loss, vanilla


@register_policy_loss("mine")
def mine(tokens, settings):
    return vanilla(tokens, settings)._replace(values={"mine": 0 * tokens.old_logp_M + 2})
"""


@pytest.fixture(autouse=True)
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def config_of(home: Path, out: Path, ranks: int, steps: int, *more: str) -> Config:
    small = [f"{R}.gpu_memory_utilization=0.02", "data.val_files=null", "trainer.val_before_train=false"]
    loss = [f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=0.1", f"{A}.ppo_mini_batch_size=2"]
    critic = ["algorithm.adv_estimator=gae"]
    size = [f"trainer.n_gpus_per_node={ranks}", f"trainer.total_training_steps={steps}", "trainer.device=cpu"]
    return run_config(home, out, *small, *loss, *critic, *size, *more)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Kills the second rank during the update of step 3; its process ids and the time of the kill."""
    seen: dict[int, float] = {}
    real = Controller.broadcast

    @contextmanager
    def broadcast(self: Controller, message: Message) -> Iterator[None]:
        with real(self, message):
            if isinstance(message, UpdatePolicy) and message.step == 3:
                [worker] = children(self.workers[0].pid)
                seen.update(dict.fromkeys((worker, self.workers[0].pid), time.monotonic()))
                os.kill(worker, signal.SIGKILL)
            yield

    monkeypatch.setattr(Controller, "broadcast", broadcast)
    return seen


@pytest.mark.drill(
    "reliability", "A rank of several is lost", "The run ends with a sentence and resumes on any number of ranks"
)
@pytest.mark.long
@pytest.mark.usefixtures("own_objectives")
def test_runs_go_on_from_each_other_and_a_lost_rank_ends_one_in_words(
    home: Path, tmp_path: Path, killed: dict[int, float]
) -> None:
    out, paper = tmp_path / "run", Paper()
    (tmp_path / "mine.py").write_text(LOSS)
    own = [f"actor_rollout_ref.model.external_lib={tmp_path / 'mine.py'}", f"{A}.policy_loss.loss_mode=mine"]
    train(config_of(home, out, 1, 1, *own), paper.console)
    with pytest.raises(LostRank) as caught:
        train(config_of(home, out, 2, 4, f"{A}.ulysses_sequence_parallel_size=2", *own), paper.console)
    assert time.monotonic() - min(killed.values()) < 60
    words, log = str(caught.value), out / "ranks" / "rank-1.log"
    assert words.startswith("rank 1 of 2") and str(log) in words and "SIGKILL" in words
    assert "start the same command again" in words and "each of the 2 ranks samples" in paper.text
    assert until(lambda: not any(map(alive, killed)))
    assert not list(Path("/tmp").glob(f"rally-ranks-{os.getpid()}-*"))

    rows = {row.step: row.metrics for row in RunFolder(out).read_metrics()}
    assert set(rows) == {1, 2}, "the step that was cut short is not told as done"
    assert rows[2]["engine/canary_difference"] < 1e-4 and rows[2]["actor/rollout_mismatch_kl"] < 1e-7
    assert rows[2]["actor/kl_loss"] > 0 and rows[2]["critic/vf_loss"] > 0 and rows[2]["actor/grad_norm"] > 0

    assert rows[2]["actor/mine"] == 2.0, "each rank has imported the loss"

    train(config_of(home, out, 1, 3, *own), paper.console)
    rows = {row.step: row.metrics for row in RunFolder(out).read_metrics()}
    assert set(rows) == {1, 2, 3} and rows[3]["actor/rollout_mismatch_kl"] < 1e-7
    states = [open_checkpoint(out / f"checkpoints/global_step_{n}").state() for n in (1, 2)]
    alone, both = (state["optimizer"] for state in states)
    assert alone["param_groups"][0]["params"] == both["param_groups"][0]["params"]
    for number, state in alone["state"].items():
        assert {k: tuple(v.shape) for k, v in state.items()} == {
            k: tuple(v.shape) for k, v in both["state"][number].items()
        }
    before, after = (AutoModelForCausalLM.from_pretrained(out / f"checkpoints/global_step_{n}/actor") for n in (1, 2))
    moved = [float((p - q).detach().abs().max()) for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 0.01 and max(moved[:3]) > 0


def first_rank(config: Config, told: Path) -> None:
    with Controller(ControllerSettings(world_size=2, device="cpu", logs=told.parent)) as controller:
        controller.start(RunPlan(config, None, 1))
        told.write_text(str(controller.workers[0].pid))
        time.sleep(100)


@pytest.mark.drill("reliability", "`kill -9` of rank 0", "No rank is left")
def test_no_rank_outlives_the_first(home: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    first = multiprocessing.get_context("fork").Process(
        target=first_rank, args=(config_of(home, tmp_path / "run", ranks=2, steps=1), told)
    )
    first.start()
    try:
        assert until(lambda: told.exists() and bool(told.read_text()), 60)
        launcher = int(told.read_text())
        ours = [launcher, *children(launcher)]
        assert len(ours) == 2 and all(map(alive, ours))
    finally:
        first.kill()
        first.join()
    assert until(lambda: not any(map(alive, ours)))
