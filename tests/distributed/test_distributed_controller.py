"""Whatever rank 0 is doing when another rank is lost, it ends in words and in time."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rally import distributed
from rally.config import load_config
from rally.distributed import controller as controller_module
from rally.distributed import process_group
from rally.distributed.controller import Controller, ControllerSettings, LostRank
from rally.distributed.process_group import Rendezvous
from rally.nodes import LOCAL
from rally.runs.build.models import RunPlan
from rally.train.rank_messages import GatherWeights, Shutdown
from rally.types import RallyError
from rally.util.subprocesses import ServerProcess

RAY = ["trainer.nnodes=2", "trainer.node_heartbeat_timeout=30"]
PLAN = RunPlan(load_config(overrides=["trainer.n_gpus_per_node=2", "trainer.device=cpu"]), None, 1)


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    """Its other rank says something and ends after a moment, before it has joined."""

    def launch(self: Controller, rank: int) -> ServerProcess:
        words = "import time; time.sleep(0.3); print('no room', flush=True); raise SystemExit(3)"
        return ServerProcess([sys.executable, "-Ic", words], {}, tmp_path / f"rank-{rank}.log")

    monkeypatch.setattr(Controller, "_launch", launch)
    with Controller(ControllerSettings(world_size=2, device="cpu", logs=tmp_path)) as made:
        yield made


def test_gpus_open_no_port_to_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")  # so that what is set here is taken back
    monkeypatch.setattr(process_group.torch.cuda, "set_device", lambda rank: None)
    monkeypatch.setattr(process_group.ProcessGroup, "_whole_mesh", lambda self: None)
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(process_group.dist, name, lambda *given, **named: None)
    process_group.ProcessGroup(0, 1, Rendezvous(place=str(tmp_path / "rendezvous"), secret="none"), "cuda", 1.0)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.drill("security", "A foreign process joins the ranks of a run", "The run stops: it lacks the secret")
def test_a_process_without_the_secret_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two is another process, which answers with what it saw on the wire, or with anything else."""
    group = process_group.ProcessGroup.__new__(process_group.ProcessGroup)
    group.rank, group.world_size, group.device = 0, 2, "cpu"
    secret = process_group.new_secret().encode()
    group._secret, group._proved = secret, 0
    monkeypatch.setattr(process_group.dist, "get_process_group_ranks", lambda group: [0, 1])
    assert len(secret) > 40 and "secret=" not in repr(Rendezvous(place="/r", secret=secret.decode()))
    asked: list[int] = []

    def answering(proof: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        asked.clear()

        def all_to_all(got: torch.Tensor, mine: torch.Tensor, group: object) -> None:
            got.copy_(torch.cat([mine[:32], proof(len(asked), mine)]))
            asked.append(1)

        monkeypatch.setattr(process_group.dist, "all_to_all_single", all_to_all)

    answering(lambda number, _: process_group.membership_proofs(secret, number, 1, [0, 1])[0][:32])
    group._check_members(["world", "numbers", "messages"])
    assert len(asked) == 3
    for wrong in (lambda number, mine: mine[32:], lambda number, mine: torch.zeros(32, dtype=torch.uint8)):
        answering(wrong)
        with pytest.raises(RallyError, match="not a rank of this run"):
            group._check_members(["numbers", "messages"])


class Joined:
    """A group that records the messages it is given and when it is left."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def send(self, message: object) -> None:
        self.seen.append(message)

    def reshard(self) -> None:
        self.seen.append("resharded")

    def during(self, message: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close_engine(self) -> None:
        """It has none."""

    def leave(self) -> None:
        self.seen.append("left")


@pytest.mark.parametrize(("device", "left"), [("cpu", ["left"]), ("cuda", [])])
def test_nobody_leaves_a_group_of_gpus_alone(tmp_path: Path, device: str, left: list[str]) -> None:
    """NCCL waits, in the leaving, for those that are gone."""
    well, broken = Joined(), Joined()
    for joined in (well, broken):
        with (
            contextlib.suppress(KeyError),
            Controller(ControllerSettings(world_size=2, device=device, logs=tmp_path)) as controller,
        ):
            controller._joined_group = joined  # type: ignore[assignment]
            with controller.broadcast(GatherWeights()):
                if joined is broken:
                    raise KeyError
    assert well.seen == [GatherWeights(), "resharded", Shutdown(), "left"]
    assert broken.seen == [GatherWeights(), *left]


def watched(controller: Controller) -> threading.Thread:
    controller.workers = [controller._launch(1)]
    thread = threading.Thread(target=controller._watch_workers, daemon=True)
    thread.start()
    return thread


def test_a_rank_that_ends_before_it_joins_is_told_with_its_log(controller: Controller, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(LostRank, match="rank 1 of 2, which held a shard of the policy, has ended") as caught:
        controller.start(PLAN)
    assert time.monotonic() - began < 120, "not after start_seconds"
    assert f"its log is {tmp_path / 'rank-1.log'} and ends with" in str(caught.value)
    assert "no room" in str(caught.value) and "exit status 3" in str(caught.value)
    with pytest.raises(LostRank, match="rank 1 of 2"), controller._computation():
        pytest.fail("a computation began without all ranks")


async def test_a_rollout_does_not_go_on_without_a_rank(controller: Controller) -> None:
    watched(controller)
    with pytest.raises(LostRank, match="rank 1 of 2"):
        async with asyncio.timeout(60), controller.watch():
            await asyncio.sleep(100)


async def test_an_error_of_rank_0_is_not_replaced_by_the_loss_that_follows_it(controller: Controller) -> None:
    """All ranks raise it if a gradient diverges, and the others end first: rank 0 still closes its episodes."""

    async def update() -> None:
        try:
            with controller._computation():
                raise RallyError("the gradient is not finite")
        finally:
            await asyncio.sleep(2)

    watched(controller)
    with pytest.raises(RallyError, match="the gradient is not finite"):
        async with asyncio.timeout(10), controller.watch():
            await update()
    assert controller._loss is not None


async def test_what_is_cancelled_for_another_reason_is_cancelled(controller: Controller) -> None:
    async def rollout() -> None:
        async with controller.watch():
            await asyncio.sleep(30)

    task = asyncio.create_task(rollout())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("stuck", [True, False])
def test_a_computation_that_hangs_without_a_rank_ends_the_program(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stuck: bool
) -> None:
    left: list[int] = []
    monkeypatch.setattr(controller_module.os, "_exit", left.append)
    monkeypatch.setattr(controller_module, "GRACE_SECONDS", 0.3)
    thread = watched(controller)
    if stuck:
        with controller._computation():
            thread.join(10)
    else:
        thread.join(10)
    assert not thread.is_alive() and left == ([75] if stuck else [])
    assert ("rally: rank 1 of 2" in capfd.readouterr().err) == stuck


def test_a_broken_connection_is_a_lost_rank_as_soon_as_that_is_known(controller: Controller) -> None:
    """Its process ends after 0.3 s. A node that hangs or is cut off is known to be lost after its heartbeats only."""
    watched(controller)
    controller.settings = replace(controller.settings, notice_seconds=60.0)
    with pytest.raises(LostRank, match="rank 1 of 2"), controller._computation():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4242")
    several, one = (
        load_config(overrides=["trainer.device=cpu", *keys]) for keys in (RAY, ["trainer.n_gpus_per_node=2"])
    )
    seconds = [
        distributed._settings(config, config.actor.fsdp_config, 600.0, nodes).notice_seconds
        for config, nodes in ((several, [LOCAL, LOCAL]), (one, [LOCAL]))
    ]
    assert seconds[0] > 30 > seconds[1]


def test_memory_that_runs_out_is_told_at_once(controller: Controller) -> None:
    controller.settings = replace(controller.settings, notice_seconds=1e9)
    with pytest.raises(torch.OutOfMemoryError), controller._computation():
        raise torch.OutOfMemoryError


def test_a_rank_that_hangs_is_not_waited_for_forever(controller: Controller) -> None:
    controller.settings = replace(controller.settings, notice_seconds=0.1)
    with pytest.raises(LostRank, match="a collective timed out after 600 s; see the logs"), controller._computation():
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation")


def test_a_mistake_of_our_own_is_no_lost_rank(controller: Controller) -> None:
    controller.settings = replace(controller.settings, notice_seconds=0.1)
    with pytest.raises(RuntimeError, match="shapes differ"), controller._computation():
        raise RuntimeError("shapes differ")
