"""Nodes of a Ray cluster: a placement group reserves them, an agent on each starts processes and answers heartbeats.

Nothing waits forever: the reservation has a timeout, and its error names what each node lacks. A node whose agent does
not answer in time is lost; Ray alone takes a minute to notice a node that hangs.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rally.nodes.agent import NodeAgent, NodeDescription, own_versions
from rally.nodes.base import NodeError
from rally.nodes.ray_node import POLL_SECONDS, STOP_SECONDS, RayNode, loss_of
from rally.platforms import CUDA, Platform

LONGEST_LOOK = 4 * POLL_SECONDS  # counted as silence between two looks at all nodes, if the limit is short
CONNECT_SECONDS = 10.0
NOTE_SECONDS = 30.0
NODE_LABEL = "ray.io/node-id"
FORWARDED = ("PYTHONPATH", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")
FORWARDED_PREFIXES = ("HF_", "RALLY_", "TORCH_", "NCCL_", "HCCL_", "GLOO_", "CUDA_LAUNCH")
# Parts of names of credentials: Ray shows a runtime environment in its logs.
NOT_FORWARDED = ("TOKEN", "SECRET", "KEY", "PASSW", "CREDENTIAL")
INSTALL = "several nodes need Ray; run: pip install 'rally-rl[ray]'"
START = (
    "start one with `ray start --head` here and `ray start --address=HERE:6379` on the other nodes, "
    "or set ray_kwargs.ray_init.address"
)


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """How the cluster is found, and how long to wait."""

    address: str | None = None  # None: RAY_ADDRESS, a cluster of this machine, or a new one if `may_start`
    may_start: bool = False
    num_cpus: int | None = None  # of a cluster that the run starts
    init: Mapping[str, Any] = field(default_factory=dict)  # further arguments of ray.init
    wait_seconds: float = 300.0  # for the resources
    heartbeat_seconds: float = 20.0  # without an answer, after which a node is lost


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """One node of the run. `here`: the one that this process runs on."""

    cpus: float
    gpus: int = 0
    here: bool = False
    platform: Platform = CUDA

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({self.platform.ray_resource: float(self.gpus)} if self.gpus else {})}


class RayCluster:
    """Reserved nodes, in the order of the requests. A context manager that gives them back.

    `needed` are folders and files that every node must see; the first is the working directory."""

    def __init__(
        self,
        settings: RaySettings,
        requests: Sequence[NodeRequest],
        needed: Sequence[Path],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings, self.requests, self.needed = settings, tuple(requests), tuple(map(str, needed))
        self.nodes: list[RayNode] = []
        self._note = note
        self._group: Any = None
        self._actors: list[Any] = []
        self._joins = False  # whether it joins the cluster; otherwise the session of Ray is the caller's
        self._stopping = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="rally-nodes", daemon=True)

    def open(self) -> RayCluster:
        """Reserve the nodes and start their agents."""
        ray = sys.modules.get("ray")
        self._joins = ray is None or not ray.is_initialized()
        try:
            if self._joins:
                _connect(self.settings, self._note)
            self._reserve()
            self._start_agents()
        except BaseException:
            self.close()
            raise
        self._monitor.start()
        return self

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the run and give the nodes back."""
        self._stopping.set()
        if self._monitor.is_alive():
            self._monitor.join(STOP_SECONDS)
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        with suppress(Exception):  # a cluster that is gone must not hide why the run ends
            self._end_processes()
            for actor in self._actors:
                ray.kill(actor)  # Ray or their guards end what is left of its processes, whichever comes first
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        if self._joins:
            with suppress(Exception):
                ray.shutdown()

    def _end_processes(self) -> None:
        """Ask all processes to end, and wait a moment: one that is killed cannot close its connections and files."""
        import ray

        deadline = time.monotonic() + STOP_SECONDS
        asked = [actor for actor, node in zip(self._actors, self.nodes, strict=False) if node.loss is None]
        for actor in asked:
            actor.stop.remote()
        for actor in asked:
            with suppress(ray.exceptions.RayError):  # it is gone, or late
                while (left := deadline - time.monotonic()) > 0 and any(ray.get(actor.alive.remote(), timeout=left)):
                    time.sleep(POLL_SECONDS / 5)

    def _reserve(self) -> None:
        """Reserve all nodes together, or raise with what is missing on which node."""
        import ray

        mine = ray.get_runtime_context().get_node_id()
        self._group = ray.util.placement_group(
            [request.resources for request in self.requests],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{NODE_LABEL: mine} if request.here else {} for request in self.requests],
        )
        deadline, told = time.monotonic() + self.settings.wait_seconds, 0.0
        while not self._group.wait(timeout_seconds=min(2.0, self.settings.wait_seconds)):
            missing = self._missing(mine)
            if time.monotonic() > deadline:
                raise NodeError(
                    f"{missing} after {self.settings.wait_seconds:g} s (trainer.ray_wait_register_center_timeout); "
                    "start Ray on more nodes, end other jobs, or lower trainer.nnodes or n_gpus_per_node"
                )
            if time.monotonic() - told > NOTE_SECONDS:
                told = time.monotonic()
                self._note(f"waiting for Ray: {missing}")

    def _missing(self, mine: str) -> str:
        """A sentence about the resources of every node that does not fit the requests."""
        import ray

        free = ray._private.state.available_resources_per_node()
        nodes = [
            _NodeState(node, free.get(node["NodeID"], {}), node["NodeID"] == mine)
            for node in ray.nodes()
            if node["Alive"]
        ]
        names = list(dict.fromkeys(name for request in self.requests for name in request.resources))
        rows = "; ".join(node.row(names) for node in nodes)
        kinds = Counter(_resources(request.resources) for request in self.requests)
        needed = " and ".join(
            f"{count} nodes with {kind} each" if count > 1 else f"1 node with {kind}" for kind, count in kinds.items()
        )
        fitting = {_resources(r.resources): sum(node.fits(r) for node in nodes) for r in self.requests}
        have = " and ".join(f"{count} have {kind} free" for kind, count in fitting.items())
        here = next((request for request in self.requests if request.here), None)
        lacking = here is not None and not any(node.mine and node.fits(here) for node in nodes)
        hint = ", and this node, where the run was started, must be one of them" if lacking else ""
        return f"the run needs {needed}{hint}; of the {len(nodes)} nodes of the Ray cluster {have} ({rows})"

    def _start_agents(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        python, folder = sys.executable, self.needed[0]
        for index, request in enumerate(self.requests):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            amounts = {name: amount for name, amount in request.resources.items() if name not in ("CPU", "GPU")}
            gpus = request.resources.get("GPU", 0.0)
            remote = ray.remote(num_cpus=request.cpus, num_gpus=gpus, resources=amounts, max_restarts=0)(NodeAgent)
            options = remote.options(scheduling_strategy=where, runtime_env={"env_vars": _forwarded()})
            address = addresses[places[index]]
            self._actors.append(options.remote(address, folder, python))
        deadline = time.monotonic() + self.settings.wait_seconds
        for index, actor in enumerate(self._actors):
            address = addresses[places[index]]
            try:
                seconds = max(1.0, deadline - time.monotonic())
                variable = self.requests[index].platform.visible_devices
                found: NodeDescription = ray.get(actor.describe.remote(list(self.needed), variable), timeout=seconds)
            except ray.exceptions.RayError as problem:
                raise NodeError(_start_problem(address, problem)) from None
            name = f"{found.hostname} ({address})" if found.hostname != address else address
            self._check(name, found, self.requests[index])
            self.nodes.append(RayNode(actor, address, name, found.gpus))

    def _check(self, name: str, found: NodeDescription, request: NodeRequest) -> None:
        """Raise unless the node can take part."""
        mine = own_versions()
        different = [
            f"{package} {found.versions.get(package)} instead of {version}"
            for package, version in mine.items()
            if found.versions.get(package) != version
        ]
        if different:
            raise NodeError(f"node {name} has {', '.join(different)}; install the same versions on all nodes")
        if found.missing:
            raise NodeError(
                f"node {name} does not see {', '.join(found.missing)}; put them on storage that all nodes share, "
                "under the same path"
            )
        if len(found.gpus) < request.gpus:
            raise NodeError(f"node {name} shows {len(found.gpus)} of {request.gpus} reserved GPUs; check its driver")

    def _watch(self) -> None:
        """Runs in a thread. Without it no loss would be noticed, so its own failure is the loss of all nodes."""
        try:
            self._ask_for_living()
        except Exception as problem:  # noqa: BLE001 - whatever it is, nobody may wait for a node forever
            for node in self.nodes:
                node.loss = node.loss or f"node {node.name} is no longer watched ({type(problem).__name__}: {problem})"

    def _ask_for_living(self) -> None:
        """Ask every agent which processes live, and mark nodes that do not answer as lost."""
        import ray

        asked: dict[int, Any] = {}
        silent, looked, limit = [0.0] * len(self.nodes), time.monotonic(), self.settings.heartbeat_seconds
        while not self._stopping.wait(POLL_SECONDS):
            before, looked = looked, time.monotonic()
            passed = min(looked - before, max(LONGEST_LOOK, limit / 4))  # a stop of this process is nobody's silence
            for index, node in enumerate(self.nodes):
                if node.loss is None and index not in asked:
                    asked[index] = self._actors[index].alive.remote()
            if asked:
                ray.wait(list(asked.values()), num_returns=len(asked), timeout=POLL_SECONDS)
            for index, reference in list(asked.items()):
                node = self.nodes[index]
                try:
                    living = ray.get(reference, timeout=0)
                except ray.exceptions.GetTimeoutError:
                    silent[index] += passed
                    if silent[index] > limit:
                        node.loss = f"node {node.name} has not responded for {silent[index]:.0f} s"
                        del asked[index]
                    continue
                except ray.exceptions.RayError as problem:
                    node.loss = loss_of(node.name, problem)
                    del asked[index]
                    continue
                del asked[index]
                silent[index] = 0.0
                node.living[: len(living)] = living


@dataclass(frozen=True)
class _NodeState:
    """A living node of the cluster, as Ray describes it, and what it has free."""

    node: Mapping[str, Any]
    free: Mapping[str, float]
    mine: bool

    def fits(self, request: NodeRequest) -> bool:
        return all(self.free.get(name, 0.0) >= need for name, need in request.resources.items())

    def row(self, names: Sequence[str]) -> str:
        total = self.node["Resources"]
        shown = ", ".join(f"{self.free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in names)
        name = f"{self.node['NodeManagerHostname']} {self.node['NodeManagerAddress']}"
        return f"{name}{', this node' * self.mine}: {shown} free"


def _resources(wanted: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in wanted.items())


def _start_problem(name: str, problem: BaseException) -> str:
    """Why the agent of a node did not start, in one sentence."""
    if "creation task" not in str(problem):
        return loss_of(name, problem)
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"node {name} cannot start Rally's agent ({lines[-1]}); install the same packages on all nodes"


def _connect(settings: RaySettings, note: Callable[[str], None]) -> None:
    """Join the running cluster, or start one of this machine if that suffices."""
    try:
        import ray
    except ImportError:
        raise NodeError(INSTALL) from None
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # for a cluster that this process starts
    options = {"log_to_driver": False, "logging_level": "warning", "configure_logging": True, **settings.init}
    address = settings.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _check_port(address)
        ray.init(address=address, **options)
    except ConnectionError:
        if address != "auto" or not settings.may_start:
            where = "on this machine" if address == "auto" else f"at {address}"
            raise NodeError(f"no Ray cluster answers {where}; {START}") from None
        ray.init(include_dashboard=False, num_cpus=settings.num_cpus, **options)
        return
    if settings.num_cpus is not None:
        note(f"ray_kwargs.ray_init.num_cpus={settings.num_cpus} has no effect: the Ray cluster runs already")


def _check_port(address: str) -> None:
    """Raise ConnectionError if nothing listens at host:port; ray.init would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as problem:
            raise ConnectionError(str(problem)) from None


def _forwarded() -> dict[str, str]:
    """Variables of this process that the processes on all nodes get, without credentials."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in FORWARDED
        or (name.startswith(FORWARDED_PREFIXES) and not any(part in name.upper() for part in NOT_FORWARDED))
    }
