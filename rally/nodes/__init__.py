"""The machines of a run, and the processes that are started on them.

`LOCAL` is this machine. `RayCluster` reserves nodes by Ray. The code that starts ranks, loop workers and servers is the
same for both. Ray places and watches; it carries no batches and no weights.
"""

from rally.nodes.base import LOCAL, THIS_MACHINE, LocalNode, Node, NodeError, NodeProcess, RunNodes
from rally.nodes.ray_cluster import NodeRequest, RayCluster, RaySettings

__all__ = [
    "LOCAL",
    "THIS_MACHINE",
    "LocalNode",
    "Node",
    "NodeError",
    "NodeProcess",
    "NodeRequest",
    "RayCluster",
    "RaySettings",
    "RunNodes",
]
