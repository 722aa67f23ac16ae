"""If a rank is lost, rank 0 ends in time with a clear error, whatever it is doing."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rally.config import load_config
from rally.distributed import controller as room
from rally.distributed import process_group
from rally.distributed.controller import Controller, ControllerSettings, LostRank
from rally.runs.build.models import RunPlan
from rally.train.messages import GatherWeights, Shutdown
from rally.util.subprocesses import ServerProcess

PLAN = RunPlan(load_config(overrides=["trainer.n_gpus_per_node=2", "trainer.device=cpu"]), None, 1)


@pytest.fixture
def captain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    """A controller whose other rank prints a line and exits before it has joined."""

    def start(self: Controller, number: int) -> ServerProcess:
        words = "import time; time.sleep(0.3); print('no room', flush=True); raise SystemExit(3)"
        return ServerProcess([sys.executable, "-Ic", words], {}, tmp_path / f"rank-{number}.log")

    monkeypatch.setattr(Controller, "_start", start)
    with Controller(ControllerSettings(count=2, device="cpu", logs=tmp_path)) as made:
        yield made


def test_gpus_open_no_port_to_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")  # so that the value set here is removed afterwards
    monkeypatch.setattr(process_group.torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(process_group, "init_device_mesh", lambda device, shape: None)
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(process_group.dist, name, lambda *given, **named: None)
    process_group.ProcessGroup(0, 1, tmp_path / "meeting", "cuda", 1.0)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


class Joined:
    """A process group that records its messages and when it is left."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def tell(self, message: object) -> None:
        self.seen.append(message)

    def rest(self) -> None:
        self.seen.append("rested")

    def leave(self) -> None:
        self.seen.append("left")


@pytest.mark.parametrize(("device", "left"), [("cpu", ["left"]), ("cuda", [])])
def test_nobody_leaves_a_group_of_gpus_alone(tmp_path: Path, device: str, left: list[str]) -> None:
    """On leaving a group, NCCL waits for ranks that are gone."""
    well, broken = Joined(), Joined()
    for joined in (well, broken):
        with (
            contextlib.suppress(KeyError),
            Controller(ControllerSettings(count=2, device=device, logs=tmp_path)) as captain,
        ):
            captain._joined = joined  # type: ignore[assignment]
            with captain.doing(GatherWeights()):
                if joined is broken:
                    raise KeyError
    assert well.seen == [GatherWeights(), "rested", Shutdown(), "left"]
    assert broken.seen == [GatherWeights(), *left]


def watched(captain: Controller) -> threading.Thread:
    captain.members = [captain._start(1)]
    thread = threading.Thread(target=captain._watch, daemon=True)
    thread.start()
    return thread


def test_a_rank_that_ends_before_it_joins_is_told_with_its_log(captain: Controller, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(LostRank, match="rank 1 of 2, which held a part of the policy, has ended") as caught:
        captain.begin(PLAN)
    assert time.monotonic() - began < 10
    assert f"its log is {tmp_path / 'rank-1.log'} and ends with" in str(caught.value)
    assert "no room" in str(caught.value) and "exit status 3" in str(caught.value)
    with pytest.raises(LostRank, match="rank 1 of 2"), captain._order():
        pytest.fail("an order began without all ranks")


async def test_a_rollout_does_not_go_on_without_a_rank(captain: Controller) -> None:
    watched(captain)
    with pytest.raises(LostRank, match="rank 1 of 2"):
        async with asyncio.timeout(10), captain.watching():
            await asyncio.sleep(30)


async def test_what_is_cancelled_for_another_reason_is_cancelled(captain: Controller) -> None:
    async def rollout() -> None:
        async with captain.watching():
            await asyncio.sleep(30)

    task = asyncio.create_task(rollout())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("stuck", [True, False])
def test_an_order_that_hangs_without_a_rank_ends_the_program(
    captain: Controller, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stuck: bool
) -> None:
    left: list[int] = []
    monkeypatch.setattr(room.os, "_exit", left.append)
    monkeypatch.setattr(room, "GRACE_SECONDS", 0.3)
    thread = watched(captain)
    if stuck:
        with captain._order():
            thread.join(10)
    else:
        thread.join(10)
    assert not thread.is_alive() and left == ([1] if stuck else [])
    assert ("rally: rank 1 of 2" in capfd.readouterr().err) == stuck


def test_a_rank_that_hangs_is_not_waited_for_forever(captain: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "NOTICE_SECONDS", 0.1)
    with pytest.raises(LostRank, match="did not hear from the others for 600 s; look into the logs"), captain._order():
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation")


def test_a_mistake_of_our_own_is_no_lost_rank(captain: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "NOTICE_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="shapes differ"), captain._order():
        raise RuntimeError("shapes differ")
