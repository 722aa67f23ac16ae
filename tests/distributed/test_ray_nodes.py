"""Nodes of a real Ray cluster: processes on them, and every way in which a node can be missing or lost."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from ray_nodes import RayletCluster, ray_cluster

from rally.nodes import NodeError, NodeRequest, RayCluster, RaySettings
from rally.nodes import ray_cluster as module
from rally.nodes.ray_node import RayNode, loss_of

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (rally-rl[ray])")
ENDS = """
import signal, sys, time
def end(number, frame):
    time.sleep(1)
    sys.exit("it could say " + "goodbye")  # the log also holds the command
signal.signal(signal.SIGTERM, end)
"""
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
        command, words = [sys.executable, "-c", f"{ENDS}\n{SLEEP}"], {"WORD": "given"}
        first, second = (cluster.nodes[1].launch(command, words, log) for log in logs)
        assert until(lambda: all("given" in log.read_text() for log in logs)) and first.alive and second.alive
        assert f"{Path.cwd()} given" in first.log_tail()
        second_pid = int(logs[1].read_text().splitlines()[-1].split()[0])
        asyncio.run(first.stop())
        assert until(lambda: not first.alive) and second.alive
        broken = cluster.nodes[1].launch([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], {}, logs[0])
        assert until(lambda: not broken.alive) and "no room" in broken.log_tail()
        assert cluster.nodes[1].free_port() > 0
    assert len(goodbyes) == 2 and all("it could say goodbye" in text for text in goodbyes), "before Ray kills it"
    assert until(lambda: not Path(f"/proc/{second_pid}").exists())


def test_a_command_to_a_lost_node_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Silent:
        """An agent that never answers."""

        class stop:
            remote = staticmethod(lambda *args: "reference")

    node = RayNode(Silent(), "10.0.0.1", "ten", ())

    def get(reference: str, timeout: float) -> None:
        node.loss = "node ten has not responded for 20 s"
        raise ray.exceptions.GetTimeoutError("late")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(NodeError, match="node ten has not responded for 20 s"):
        node.ask("stop", seconds=1e9)


def test_nodes_that_are_no_longer_watched_are_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = RayCluster(RaySettings(), [HERE], [tmp_path])
    cluster.nodes = [RayNode(None, "10.0.0.1", "ten", ())]
    monkeypatch.setattr(cluster._stopping, "wait", lambda seconds: False)
    cluster._watch()  # there is no agent to ask
    assert cluster.nodes[0].loss == "node ten is no longer watched (IndexError: list index out of range)"


def test_the_memory_monitor_of_ray_is_named() -> None:
    import ray

    killed = ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    for problem in (killed, ray.exceptions.RayError("The actor died: its node was running low on memory.")):
        assert "start Ray there with RAY_memory_monitor_refresh_ms=0" in loss_of("ten", problem)
    assert loss_of("ten", ray.exceptions.RayError("SYSTEM_ERROR")) == "node ten, or Rally's agent on it, has died"


def test_a_stop_of_this_process_is_no_silence_of_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    class Agent:
        class alive:
            remote = staticmethod(lambda: "reference")

    clock, late = [0.0], [0]
    cluster = RayCluster(RaySettings(heartbeat_seconds=20.0), [HERE], [tmp_path])
    cluster.nodes, cluster._actors = [RayNode(Agent(), "10.0.0.1", "ten", ())], [Agent()]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    monkeypatch.setattr(ray, "wait", lambda *given, **named: None)

    def get(reference: str, timeout: float) -> list[bool]:
        late[0] -= 1
        if late[0]:
            raise ray.exceptions.GetTimeoutError("late")
        return [True]

    def waits(seconds: list[float]) -> Callable[[float], bool]:
        def wait(_: float) -> bool:
            if not seconds:
                return True
            clock[0] += seconds.pop(0)
            return False

        return wait

    monkeypatch.setattr(ray, "get", get)
    late[0] = 3
    monkeypatch.setattr(cluster._stopping, "wait", waits([1.0, 500.0, 1.0]))
    cluster._ask_for_living()
    assert cluster.nodes[0].loss is None and cluster.nodes[0].living == [True]
    late[0] = 100
    monkeypatch.setattr(cluster._stopping, "wait", waits([1.0] * 22))
    cluster._ask_for_living()
    assert cluster.nodes[0].loss == "node ten has not responded for 21 s"


def test_an_agent_that_cannot_start_is_told_with_its_reason_and_the_session_of_the_caller_stays(
    raylets: RayletCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    absent = ModuleType("only_here")  # as Rally is on a node where it is not installed
    exec("class NodeAgent:\n def __init__(self, *a): ...\n def describe(self, *a): ...", absent.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", absent)
    monkeypatch.setattr(module, "NodeAgent", absent.NodeAgent)
    ray.init(address="auto", _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        reason = r"cannot start Rally's agent \(ModuleNotFoundError: No module named 'only_here'\); install the same"
        with pytest.raises(NodeError, match=reason):
            nodes(tmp_path, HERE).open()
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_variables_reach_the_nodes_and_credentials_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO", "HF_TOKEN": "t", "RALLY_PROXY_PASSWORD": "p"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    forwarded = module._forwarded()
    assert [name in forwarded for name in given] == [True, True, False, False]


@pytest.mark.drill("reliability", "A Ray cluster is too small for the run", "One sentence says what each node lacks")
def test_a_cluster_that_is_too_small_is_one_sentence(raylets: RayletCluster, tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        nodes(tmp_path, NodeRequest(cpus=2, here=True), NodeRequest(cpus=2), wait=1.0).open()
    sentence = str(caught.value)
    assert "needs 2 nodes with 2 CPU each; of the 2 nodes of the Ray cluster 1 have 2 CPU free" in sentence
    assert "this node: 2 of 2 CPU free" in sentence and "1 of 1 CPU free" in sentence
    assert "trainer.ray_wait_register_center_timeout" in sentence


def test_what_is_missing_is_counted_for_each_kind_of_node(raylets: RayletCluster, tmp_path: Path) -> None:
    servers = [NodeRequest(cpus=1), NodeRequest(cpus=1)]
    with pytest.raises(NodeError, match=r"1 node with 2 CPU and 2 nodes with 1 CPU each; of the 2 nodes") as caught:
        nodes(tmp_path, NodeRequest(cpus=2, here=True), *servers, wait=0.5).open()
    assert "1 have 2 CPU free and 2 have 1 CPU free" in str(caught.value)


def test_a_run_started_on_a_node_that_is_too_small_says_so(raylets: RayletCluster, tmp_path: Path) -> None:
    number = raylets.add(8)
    try:
        with pytest.raises(NodeError, match=r"1 node with 8 CPU, and this node, where the run was started"):
            nodes(tmp_path, NodeRequest(cpus=8, here=True), wait=0.5).open()
    finally:
        raylets.kill(number)


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
    with nodes(tmp_path, HERE, NodeRequest(cpus=3), heartbeat=5.0).open() as cluster:
        process = cluster.nodes[1].launch([sys.executable, "-c", SLEEP], {"WORD": "x"}, tmp_path / "log")
        stopped, began = raylets.stop(number), time.monotonic()
        try:
            assert until(lambda: not process.alive)
            assert 4 < time.monotonic() - began < 60, "soon after its limit of 5 s"
            assert cluster.nodes[0].loss is None
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
