"""A run over two trainer nodes, two rollout nodes and two loop workers of a real Ray cluster, while parts of it die."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import pytest
import torch
from forked import path_that_forks
from ray_nodes import RayletCluster, ray_cluster
from train_cases import Paper, run_config
from transformers import AutoModelForCausalLM

from rally.distributed import train
from rally.distributed.controller import LostRank
from rally.track import RunFolder

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (rally-rl[ray])"),
]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = (f"{R}.name=rally", f"{R}.gpu_memory_utilization=0.02", "data.val_files=null", "trainer.val_before_train=false")
LEARNS = (f"{A}.optim.lr=2e-2", f"{R}.n=8")  # so that six steps do
DIGITS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))
"""
LOSS = (f"{A}.ppo_mini_batch_size=2", "trainer.device=cpu", "trainer.save_freq=1")
STEPS = 12  # so many that the run goes on until the last part of it was killed
TOLD_SECONDS = 20.0  # 5 on a machine with much other work
AGAIN_SECONDS = 120.0  # with a step; 20 to 40 there
MARK = "RALLY_TEST_FOLDER"  # variables with this prefix reach the processes on all nodes


@pytest.fixture(scope="module")
def raylets() -> Iterator[RayletCluster]:
    """Two nodes for ranks and two for servers."""
    with ray_cluster(2, 2, 1, 1) as cluster:
        yield cluster


def until(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes(module: str, folder: Path) -> list[int]:
    """Processes of the test with this folder that stand for a module of Rally, which is forked."""
    chosen = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[3:6] == ["run", "-m", module] and f"{MARK}={folder}" in variables:
            chosen.append(int(process.name))
    return chosen


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(run / f"checkpoints/global_step_{step}/actor").state_dict()


def check_equal_update(run: Path, alone: Path) -> None:
    """The first update of both runs is the same to 1e-6.

    A few weights are excepted, up to a hundredth of the learning rate: served rollouts on a CPU repeat to the last bits
    only, and Adam's first step divides by gradients that are almost 0. Of 26,656 weights, one process differs from
    itself by up to 1.15e-6 in three."""
    both, one = weights(run, 1), weights(alone, 1)
    assert both.keys() == one.keys()
    apart = torch.cat([(both[name] - one[name]).abs().flatten() for name in one])
    largest, share = float(apart.max()), float((apart > 1e-6).double().mean())
    assert largest < 1e-5 and share < 1e-3, f"the update of four ranks differs by {largest}, {share:.2%} by over 1e-6"
    mine, expected = (next(iter(RunFolder(folder).read_metrics())).metrics for folder in (run, alone))
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        # the loss is a sum of terms of size 1 that cancel
        assert mine[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name


@pytest.mark.timeout(900)
@pytest.mark.drill("reliability", "`kill -9` of a loop worker or a rollout node", "The run goes on; no group is lost")
@pytest.mark.drill("reliability", "`kill -9` of a rank with `--restart`", "The run resumes by itself")
@pytest.mark.drill("reliability", "`kill -9` of a node with ranks, with `--restart`", "The run resumes on another node")
def test_a_run_over_nodes_equals_one_process_and_survives_its_parts(
    raylets: RayletCluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path_that_forks(tmp_path))
    monkeypatch.setenv(MARK, str(tmp_path))
    alone, run = tmp_path / "alone", tmp_path / "run"
    train(run_config(home, alone, *SMALL, *LOSS, "trainer.total_training_steps=1"), Paper().console)

    keys = ("trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{R}.nnodes=2", f"{R}.data_parallel_size=2")
    more = (f"{R}.agent.num_workers=2", f"trainer.total_training_steps={STEPS}")
    config = tmp_path / "config.yaml"
    config.write_text(run_config(home, run, *SMALL, *LOSS, *keys, *more).to_yaml())
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-m", "rally.cli", "train", "--restart", str(config)]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)

    def text() -> str:
        return (tmp_path / "log").read_text(errors="replace")

    def last() -> int:
        return max((row.step for row in RunFolder(run).read_metrics()), default=0) if run.exists() else 0

    def reached(step: int) -> Callable[[], bool]:
        def check() -> bool:
            assert child.poll() is None or step == STEPS, text()
            return last() >= step

        return check

    try:
        until(lambda: reached(1)() and (run / "checkpoints/global_step_1/actor").exists(), 400)
        check_equal_update(run, alone)

        [first, *_] = processes("rally.distributed.loop_worker", tmp_path)
        os.kill(first, signal.SIGKILL)
        until(reached(2))
        raylets.kill(3)
        until(lambda: any(row.metrics["engine/servers"] == 1 for row in RunFolder(run).read_metrics()))
        raylets.add(1)

        def kill_rank() -> None:
            os.kill(processes("rally.distributed.worker", tmp_path)[0], signal.SIGKILL)

        for losses, kill in enumerate((kill_rank, lambda: raylets.kill(1)), 1):
            kill()
            until(lambda losses=losses: text().count("start the same command again") == losses, TOLD_SECONDS)
            until(lambda losses=losses: text().count("starting the run again from step") == losses)
            before = last()
            if losses == 2:
                raylets.add(2)
            until(reached(before + 1), AGAIN_SECONDS)
        assert child.wait(400) == 0, text()
    finally:
        child.terminate()
        child.wait(60)
        log.close()
    rows = {row.step: row.metrics for row in RunFolder(run).read_metrics()}
    assert set(rows) == set(range(1, STEPS + 1))
    assert max(row["rollout/loop_worker_restarts"] for row in rows.values()) >= 1
    sizes = {step: len(list(RunFolder(run).read_episodes(step))) for step in rows}
    assert len(set(sizes.values())) == 1, f"a step lost groups: {sizes}"


@pytest.mark.timeout(900)
@pytest.mark.drill(
    "reliability", "`kill -9` of a rank of 2 nodes x 2 ranks, deterministic", "The resumed run has the same bits"
)
def test_engines_of_ranks_over_nodes_resume_to_the_same_bits(
    raylets: RayletCluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on two nodes sample for two loop workers, without servers. One process goes on, then four again. They
    learn together."""
    monkeypatch.setenv("PYTHONPATH", path_that_forks(tmp_path))
    monkeypatch.setenv(MARK, str(tmp_path))
    ranks = ("trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{R}.agent.num_workers=2", f"{R}.deterministic=true")
    (tmp_path / "digits.py").write_text(DIGITS)
    small = (*SMALL[1:], *LOSS, *LEARNS, f"custom_reward_function.path={tmp_path}/digits.py")
    keys = (*small, *ranks, "trainer.total_training_steps=4")
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "resumed"

    def kill() -> None:
        until(lambda: resumed.exists() and any(row.step == 1 for row in RunFolder(resumed).read_metrics()))
        os.kill(processes("rally.distributed.worker", tmp_path)[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(LostRank, match="start the same command again"):
        train(run_config(home, resumed, *keys), Paper().console)
    killer.join()
    for folder in (resumed, undisturbed):
        train(run_config(home, folder, *keys), Paper().console)
        assert all(row.metrics["engine/servers"] == 4 for row in RunFolder(folder).read_metrics())
        assert not list(folder.glob("servers/*.log"))
    for step in range(1, 5):
        mine, expected = weights(resumed, step), weights(undisturbed, step)
        assert all(torch.equal(mine[name], weight) for name, weight in expected.items()), step
        told = [
            {e.id: [(s.ids, s.response_logprobs) for s in e.segments] for e in RunFolder(one).read_episodes(step)}
            for one in (resumed, undisturbed)
        ]
        assert told[0] == told[1] and told[0], step

    alone = (*small, f"{R}.deterministic=true", "trainer.total_training_steps=5")
    train(run_config(home, resumed, *alone), Paper().console)
    train(run_config(home, resumed, *keys, "trainer.total_training_steps=6"), Paper().console)
    rows = {row.step: row.metrics for row in RunFolder(resumed).read_metrics()}
    assert set(rows) == set(range(1, 7)) and "engine/servers" not in rows[5] and rows[6]["engine/servers"] == 4
    assert all(row["actor/rollout_mismatch_kl"] < 1e-7 for row in rows.values()), (
        "each resumes with the weights of the other"
    )
    rewards = [rows[step]["critic/rewards/mean"] for step in sorted(rows)]
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.05, f"they did not learn: {rewards}"
