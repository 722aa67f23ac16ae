"""A Ray cluster of several raylets on this machine, for tests."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise 127.0.0.1 is replaced by the address of the machine
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
os.environ.update(ENVIRONMENT)  # Ray reads it when it is imported


class RayletCluster:
    """Raylets that share 127.0.0.1. The first is the head, which is this process's node."""

    def __init__(self, *cpus: int) -> None:
        from ray.cluster_utils import Cluster

        head, *others = cpus
        self._cluster = Cluster(initialize_head=True, head_node_args={**self._args(head), "include_dashboard": False})
        self.nodes: list[Any] = [self._cluster.head_node]
        for count in others:
            self.add(count)

    @staticmethod
    def _args(cpus: int) -> dict[str, Any]:
        return {"num_cpus": cpus, "node_ip_address": "127.0.0.1", "object_store_memory": 80_000_000}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int) -> int:
        """Start another raylet; returns its number."""
        self.nodes.append(self._cluster.add_node(**self._args(cpus)))
        return len(self.nodes) - 1

    def kill(self, number: int) -> None:
        """kill -9 of a raylet; its workers end with it."""
        self._cluster.remove_node(self.nodes[number], allow_graceful=False)

    def stop(self, number: int) -> list[int]:
        """SIGSTOP for a raylet and everything it started, as on a machine that hangs."""
        stopped = family(self.nodes[number].all_processes["raylet"][0].process.pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        return stopped

    def close(self) -> None:
        self._cluster.shutdown()


def family(pid: int) -> list[int]:
    """A process and everything it started."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in family(child))]


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[RayletCluster]:
    cluster = RayletCluster(*cpus)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.close()
