"""Asynchronous training over servers: the staleness of every token is bounded, whatever servers do, and no group is
lost."""

import asyncio
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from async_cases import LOOP_KEY, metrics, versions, write_loop
from served_cases import TOKEN, EngineProcess
from train_cases import Paper, run_config, weights
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rally import distributed
from rally.cli.main import app
from rally.config import Config
from rally.distributed.controller import Controller, LostRank
from rally.engines.base import EngineError
from rally.engines.remote import BroadcastWeights, RemoteEngine, ServerAnnouncement, announce
from rally.models.sharding import Message
from rally.runs.build import engines
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.rank_messages import UpdatePolicy

R = "actor_rollout_ref.rollout"
MODE = "trainer.v1.trainer_mode=separate_async"
LAG = (MODE, "trainer.v1.separate_async.fixed_lag=true")
QUIET = ("data.val_files=null", "trainer.val_before_train=false", "trainer.startup_check=false")


@pytest.fixture(scope="module")
def servers(home: Path) -> Iterator[list[EngineProcess]]:
    """Two `rally serve engine`, and one to be killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RALLY_ENGINE_TOKEN", TOKEN)
        started = [EngineProcess(home / "model", "--accept-weights", "--dtype", "float32") for _ in range(3)]
        try:
            for process in started:
                process.wait_ready()
            yield started
        finally:
            for process in started:
                process.kill()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("RALLY_ENGINE_TOKEN", TOKEN)
    loops = write_loop(tmp_path_factory.mktemp("loops"))
    monkeypatch.syspath_prepend(loops)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{loops}")


def config_of(home: Path, out: Path, servers: list[EngineProcess], *keys: str) -> Config:
    urls = ",".join(server.url for server in servers)
    return run_config(home, out, f"{R}.name=rally", f"{R}.mode=server", f"{R}.server.urls=[{urls}]", *keys)


def check_bound(folder: Path, steps: int, bound: int) -> None:
    """Every group is trained in its own step, in order, and no token of it is older than the bound."""
    run = RunFolder(folder)
    assert [row.step for row in run.read_consumed()] == list(range(1, steps + 1))
    for row in run.read_consumed():
        assert row.version == row.step - 1
        assert row.groups == tuple(f"t{row.step:06d}-{place:05d}" for place in range(3)), "slow groups are not put off"
        episodes = run.read_episodes(row.step)
        assert len(episodes) == 12
        for episode in episodes:
            ages = [row.version - version for version in versions(episode)]
            assert min(ages) >= 0 and max(ages) <= bound


@pytest.mark.parametrize(("mode", "ahead"), [("separate_async", 1), ("separate_async", 0.5), ("colocate_async", 1)])
def test_a_run_over_two_servers_keeps_the_bound_of_every_token(
    home: Path, tmp_path: Path, servers: list[EngineProcess], mode: str, ahead: float
) -> None:
    chosen = (f"trainer.v1.trainer_mode={mode}", f"trainer.v1.{mode}.num_warmup_batches={ahead}")
    keys = (*chosen, "trainer.total_training_steps=4", LOOP_KEY)
    more = ("trainer.test_freq=2", "trainer.val_before_train=false", "trainer.startup_check=false")
    train(config_of(home, tmp_path, servers[:2], *keys, *more), Paper().console)
    check_bound(tmp_path, 4, math.ceil(ahead))
    rows = metrics(tmp_path)
    assert max(row["training/off_policy/trajectory_staleness_worst/max"] for row in rows) == 1
    assert any(row["training/off_policy/trajectory_spans/max"] > 1 for row in rows), "episodes go on across updates"
    assert rows[0]["actor/rollout_mismatch_kl"] < 1e-6 and rows[-1]["engine/servers"] == 2
    assert all(row["failures/loop"] == 0 == row["router/void_tries"] for row in rows)
    for step in (2, 4):
        validated = RunFolder(tmp_path).read_episodes(step, validate=True)
        assert {version for episode in validated for version in versions(episode)} == {step}, "one version validates"
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path), "--update", "3"])
    assert replayed.exit_code == 0 and "all bits are the same" in replayed.output


def test_weights_reach_servers_by_broadcast_during_the_run(
    home: Path, tmp_path: Path, servers: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    close = BroadcastWeights.close
    monkeypatch.setattr(BroadcastWeights, "close", lambda self: (sent.append(self.sent), close(self)))
    keys = (MODE, f"{R}.checkpoint_engine.backend=nccl", "trainer.total_training_steps=3", LOOP_KEY)
    train(config_of(home, tmp_path, servers[:2], *keys, *QUIET), Paper().console)
    check_bound(tmp_path, 3, 1)
    rows = metrics(tmp_path)
    assert sent == [3] and all(row["engine/servers"] == 2 for row in rows)
    assert rows[0]["actor/rollout_mismatch_kl"] < 1e-6


@pytest.mark.drill(
    "reliability",
    "Asynchronous training: a rollout server is killed and another one joins",
    "No group is lost, and no token is older than the bound",
)
def test_servers_die_and_join_during_the_run(
    home: Path, tmp_path: Path, servers: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, send, (first, second, mortal) = RemoteEngine.publish, engines.WeightFiles.send, servers
    loads: list[tuple[str, int | None]] = []
    killing: list[asyncio.Task[None]] = []

    async def recorded(self: engines.WeightFiles, server: object, in_flight: object) -> None:
        await send(self, server, in_flight)  # type: ignore[arg-type]
        loads.append((server.url, server.version))  # type: ignore[attr-defined]

    async def kill_while_it_samples(self: RemoteEngine) -> None:
        while not self.router._policy.servers[mortal.url].in_flight:
            await asyncio.sleep(0)
        mortal.kill()

    async def eventful(self: RemoteEngine) -> dict[str, float]:
        if killing:
            await asyncio.wait_for(killing[0], 60)
        told = await publish(self)
        if self.weight_version == 2:
            killing.append(asyncio.create_task(kill_while_it_samples(self)))
        elif self.weight_version == 3:
            announce(tmp_path, ServerAnnouncement(second.url, TOKEN))
        elif self.weight_version == 4:
            async with asyncio.timeout(60):
                while not self.joined:
                    await asyncio.sleep(0.02)
        return told

    monkeypatch.setattr(RemoteEngine, "publish", eventful)
    monkeypatch.setattr(engines.WeightFiles, "send", recorded)
    keys = (f"{R}.server.health_every=0.1", "trainer.total_training_steps=6", "trainer.save_freq=-1", LOOP_KEY)
    train(config_of(home, tmp_path, [first, mortal], MODE, *keys, *QUIET), Paper().console)
    check_bound(tmp_path, 6, 1)
    rows = metrics(tmp_path)
    assert [row["engine/servers"] for row in rows[:3]] == [2, 2, 1] and rows[-1]["engine/servers"] == 2
    assert all(row["failures/loop"] == 0 == row["router/given_up"] for row in rows)
    joined_with = next(version for url, version in loads if url == second.url)
    assert joined_with is not None and joined_with >= 3, "it had other weights, and loads the published ones first"
    assert [version for url, version in loads if url == first.url] == list(range(7))


def test_without_batches_ahead_it_is_synchronous_training(
    home: Path, tmp_path: Path, servers: list[EngineProcess]
) -> None:
    """Servers compute requests together as they arrive, which changes the last bits of log-probabilities."""
    keys = ("trainer.v1.separate_async.num_warmup_batches=0", "trainer.total_training_steps=2")
    train(config_of(home, tmp_path / "async", servers[:1], MODE, *keys, *QUIET), Paper().console)
    train(config_of(home, tmp_path / "sync", servers[:1], "trainer.total_training_steps=2", *QUIET), Paper().console)
    for step in (1, 2):
        ours, theirs = (RunFolder(tmp_path / name).read_episodes(step) for name in ("async", "sync"))
        assert [[s.ids for s in e.segments] for e in ours] == [[s.ids for s in e.segments] for e in theirs]
        assert {version for episode in ours for version in versions(episode)} == {step - 1}
    close(tmp_path / "async", tmp_path / "sync", 2)


def close(one: Path, other: Path, step: int, within: float = 1e-4) -> None:
    """The weights of two runs differ by no more than rounding."""
    folders = [run / "checkpoints" / f"global_step_{step}" / "actor" for run in (one, other)]
    mine, theirs = (weights(AutoModelForCausalLM.from_pretrained(folder)) for folder in folders)
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) <= within


def test_a_fixed_lag_over_a_server_samples_each_batch_with_one_version_and_resumes(
    home: Path, tmp_path: Path, servers: list[EngineProcess]
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(config_of(home, whole, servers[:1], *LAG, *QUIET), Paper().console)
    for step, version in ((1, 0), (2, 0), (3, 1)):
        episodes = RunFolder(whole).read_episodes(step)
        assert {one for episode in episodes for one in versions(episode)} == {version}
    shutil.copytree(whole, resumed)
    for step in (2, 3):
        shutil.rmtree(resumed / "checkpoints" / f"global_step_{step}")
    train(config_of(home, resumed, servers[:1], *LAG, *QUIET), Paper().console)
    close(whole, resumed, 2, within=0.0)  # it trains on the batch that the checkpoint of step 1 holds
    ours, theirs = (RunFolder(run).read_episodes(3) for run in (whole, resumed))
    assert [[s.ids for s in e.segments] for e in ours] == [[s.ids for s in e.segments] for e in theirs]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_loop_workers_keep_the_bound(home: Path, tmp_path: Path, servers: list[EngineProcess]) -> None:
    keys = (f"{R}.agent.num_workers=2", "trainer.total_training_steps=4", "trainer.save_freq=-1", LOOP_KEY)
    train(config_of(home, tmp_path, servers[:2], MODE, *keys, *QUIET), Paper().console)
    check_bound(tmp_path, 4, 1)
    rows = metrics(tmp_path)
    assert rows[-1]["rollout/loop_workers"] >= 1  # under load the second one may not have connected yet
    assert sum(row["failures/loop"] for row in rows) == 0
    assert any(row["training/off_policy/trajectory_spans/max"] > 1 for row in rows), "episodes go on across updates"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_ranks_train_while_a_server_samples(home: Path, tmp_path: Path, servers: list[EngineProcess]) -> None:
    ranks = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", "trainer.save_freq=-1", LOOP_KEY)
    config = config_of(home, tmp_path, servers[:1], MODE, *ranks, "trainer.total_training_steps=3", *QUIET)
    distributed.train(config, Paper().console)
    check_bound(tmp_path, 3, 1)
    rows = metrics(tmp_path)
    assert [row["engine/weight_version"] for row in rows] == [1, 2, 3] and rows[-1]["actor/grad_norm"] > 0
    assert rows[0]["actor/rollout_mismatch_kl"] < 1e-6 and rows[-1]["engine/canary_difference"] < 1e-4
    assert any(row["training/off_policy/trajectory_spans/max"] > 1 for row in rows), "episodes go on across updates"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.drill("reliability", "`kill -9` of a rank while servers sample ahead", "The run ends with a sentence")
def test_a_rank_lost_in_an_update_ends_the_rollouts_beside_it(
    home: Path, tmp_path: Path, servers: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[float] = []
    real = Controller.broadcast

    @contextmanager
    def broadcast(self: Controller, message: Message) -> Iterator[None]:
        with real(self, message):
            if isinstance(message, UpdatePolicy) and message.step == 2:
                guard = self.workers[0].pid
                [worker] = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
                os.kill(int(worker), signal.SIGKILL)
                killed.append(time.monotonic())
            yield

    monkeypatch.setattr(Controller, "broadcast", broadcast)
    ranks = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", "trainer.save_freq=-1", LOOP_KEY)
    config = config_of(home, tmp_path, servers[:1], MODE, *ranks, "trainer.total_training_steps=40", *QUIET)
    with pytest.raises(LostRank, match="start the same command again"):
        distributed.train(config, Paper().console)
    assert time.monotonic() - killed[0] < 55, "not after the minute that an error of rank 0 itself has to be told"


def test_servers_on_the_trainers_gpu_are_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "shares_gpu", lambda *_: True)
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    config = run_config(home, tmp_path, f"{R}.name=rally", MODE)
    with pytest.raises(EngineError, match="needs GPUs for the servers that the trainer does not use"):
        engines.remote_engine_of(config, model, engines.SamplingParams())
