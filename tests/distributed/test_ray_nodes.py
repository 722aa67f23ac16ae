"""Nodes of a real Ray cluster: processes on them, and every way in which a node can be missing or lost."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_nodes import RayletCluster, ray_cluster

from rally.nodes import NodeError, NodeRequest, RayCluster, RaySettings
from rally.nodes import ray_cluster as module

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (rally-rl[ray])")
SLEEP = "import os, time; print(os.getpid(), os.getcwd(), os.environ['WORD'], flush=True); time.sleep(600)"
HERE, THERE = NodeRequest(cpus=1, here=True), NodeRequest(cpus=1)


@pytest.fixture(scope="module")
def raylets() -> Iterator[RayletCluster]:
    with ray_cluster(2, 1) as cluster:
        yield cluster


def nodes(folder: Path, *requests: NodeRequest, wait: float = 60.0, heartbeat: float = 20.0) -> RayCluster:
    settings = RaySettings(wait_seconds=wait, heartbeat_seconds=heartbeat, init={"_node_ip_address": "127.0.0.1"})
    return RayCluster(settings, requests, [Path.cwd(), folder])


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_processes_run_on_nodes_and_end_with_the_run(
    raylets: RayletCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    kill, goodbyes = ray.kill, []
    monkeypatch.setattr(ray, "kill", lambda actor: (goodbyes.append(logs[1].read_text()), kill(actor)))
    with nodes(tmp_path, HERE, THERE).open() as cluster:
        assert [node.address for node in cluster.nodes] == ["127.0.0.1", "127.0.0.1"] and cluster.nodes[1].gpus == ()
        logs = [tmp_path / f"{i}.log" for i in range(2)]
        command, words = [sys.executable, "-c", SLEEP], {"WORD": "given"}
        first, second = (cluster.nodes[1].launch(command, words, log) for log in logs)
        assert until(lambda: all("given" in log.read_text() for log in logs)) and first.alive and second.alive
        assert f"{Path.cwd()} given" in first.log_tail()
        second_pid = int(logs[1].read_text().splitlines()[-1].split()[0])
        asyncio.run(first.stop())
        assert until(lambda: not first.alive) and second.alive
        broken = cluster.nodes[1].launch([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], {}, logs[0])
        assert until(lambda: not broken.alive) and "no room" in broken.log_tail()
        assert cluster.nodes[1].free_port() > 0
    # Ray kills what an actor started, often before the process guard writes how it ended.
    assert until(lambda: not Path(f"/proc/{second_pid}").exists())


@pytest.mark.drill("reliability", "A Ray cluster is too small for the run", "One sentence says what each node lacks")
def test_a_cluster_that_is_too_small_is_one_sentence(raylets: RayletCluster, tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        nodes(tmp_path, NodeRequest(cpus=2, here=True), NodeRequest(cpus=2), wait=1.0).open()
    sentence = str(caught.value)
    assert "needs 2 nodes with 2 CPU each, and of the 2 nodes of the Ray cluster 1 have it free" in sentence
    assert "this node: 2 of 2 CPU free" in sentence and "1 of 1 CPU free" in sentence
    assert "trainer.ray_wait_register_center_timeout" in sentence


def test_the_size_of_a_running_cluster_cannot_be_set(raylets: RayletCluster, tmp_path: Path) -> None:
    notes: list[str] = []
    settings = RaySettings(num_cpus=7, wait_seconds=60.0, init={"_node_ip_address": "127.0.0.1"})
    with RayCluster(settings, [HERE], [tmp_path], notes.append).open():
        assert notes == ["ray_kwargs.ray_init.num_cpus=7 has no effect: the Ray cluster runs already"]


def test_a_node_without_the_run_folder_is_refused(raylets: RayletCluster, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"does not see .*nowhere; put them on storage that all nodes share"):
        nodes(tmp_path / "nowhere", HERE, THERE).open()


def test_a_node_with_other_versions_is_refused(
    raylets: RayletCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = module.own_versions()
    monkeypatch.setattr(module, "own_versions", lambda: {**mine, "torch": "9.9"})
    with pytest.raises(NodeError, match=r"has torch \S+ instead of 9.9; install the same versions on all nodes"):
        nodes(tmp_path, HERE).open()


@pytest.mark.drill("reliability", "A node hangs", "It is lost after trainer.node_heartbeat_timeout seconds")
def test_a_node_that_hangs_is_lost(raylets: RayletCluster, tmp_path: Path) -> None:
    number = raylets.add(3)
    with nodes(tmp_path, HERE, NodeRequest(cpus=3), heartbeat=2.0).open() as cluster:
        process = cluster.nodes[1].launch([sys.executable, "-c", SLEEP], {"WORD": "x"}, tmp_path / "log")
        began, stopped = time.monotonic(), raylets.stop(number)
        try:
            assert until(lambda: not process.alive)
            assert time.monotonic() - began < 30 and cluster.nodes[0].loss is None
            assert "has not responded for" in process.log_tail() and str(tmp_path / "log") in process.log_tail()
            with pytest.raises(NodeError, match="has not responded"):
                cluster.nodes[1].free_port()
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.drill("reliability", "`kill -9` of a node's Ray process", "Its processes are lost within seconds")
def test_a_node_that_dies_is_lost(raylets: RayletCluster, tmp_path: Path) -> None:
    number = raylets.add(4)
    with nodes(tmp_path, HERE, NodeRequest(cpus=4)).open() as cluster:
        log = tmp_path / "log"
        process = cluster.nodes[1].launch([sys.executable, "-c", SLEEP], {"WORD": "given"}, log)
        assert until(lambda: "given" in log.read_text())
        pid = int(log.read_text().splitlines()[-1].split()[0])
        raylets.kill(number)
        assert until(lambda: not process.alive) and "has died" in process.log_tail()
        assert until(lambda: not Path(f"/proc/{pid}").exists())


def test_no_cluster_is_one_sentence(tmp_path: Path) -> None:
    settings = RaySettings(address="127.0.0.1:9", wait_seconds=1.0)
    with pytest.raises(NodeError, match=r"no Ray cluster answers at 127.0.0.1:9; start one with `ray start --head`"):
        RayCluster(settings, [HERE], [tmp_path]).open()
