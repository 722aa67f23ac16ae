"""A reserved node of a Ray cluster, and its processes, as the process that reserved it sees them.

Commands go to the agent of the node. Whether its processes live is what `RayCluster` last heard from the agent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rally.nodes.base import NodeError

POLL_SECONDS = 0.5
CALL_SECONDS = 60.0  # for an agent to answer a command
STOP_SECONDS = 15.0
MEMORY_MONITOR = (
    "Ray's memory monitor killed a process because the memory of its node was almost full; use less memory on that "
    "node, or start Ray there with RAY_memory_monitor_refresh_ms=0"
)


class RayNode:
    """A reserved node of the cluster."""

    def __init__(self, actor: Any, address: str, name: str, gpus: tuple[str, ...]) -> None:
        self.name, self.address, self.gpus = name, address, gpus
        self.loss: str | None = None
        self.living: list[bool] = []
        self._actor = actor
        self._lock = threading.Lock()

    def launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> RayProcess:
        with self._lock:
            number = self.ask("launch", list(command), dict(environment), str(log))
            self.living += [True] * (number + 1 - len(self.living))
        return RayProcess(self, number, log)

    def free_port(self) -> int:
        return int(self.ask("free_port"))

    def ask(self, method: str, *args: Any, seconds: float = CALL_SECONDS) -> Any:
        """The agent's answer; NodeError if the node is lost."""
        import ray

        if self.loss is not None:
            raise NodeError(self.loss)
        deadline, reference = time.monotonic() + seconds, getattr(self._actor, method).remote(*args)
        while True:
            try:
                return ray.get(reference, timeout=POLL_SECONDS)
            except ray.exceptions.RayTaskError as problem:
                raise NodeError(f"node {self.name} failed: {problem.cause}") from None
            except ray.exceptions.RayError as problem:
                late = isinstance(problem, ray.exceptions.GetTimeoutError)
                if late and self.loss is None and time.monotonic() < deadline:
                    continue
                raise NodeError(self.loss or loss_of(self.name, problem)) from None


class RayProcess:
    """A process that the agent of a node started."""

    def __init__(self, node: RayNode, number: int, log: Path) -> None:
        self.node, self.number, self.log = node, number, log

    @property
    def alive(self) -> bool:
        return self.node.loss is None and self.node.living[self.number]

    async def ended(self) -> None:
        while self.alive:
            await asyncio.sleep(POLL_SECONDS)

    def log_tail(self) -> str:
        if self.node.loss is not None:
            return f"{self.node.loss}; its log is {self.log}"
        try:
            return str(self.node.ask("log_tail", self.number, seconds=STOP_SECONDS))
        except NodeError as problem:
            return f"{problem}; its log is {self.log}"

    async def stop(self) -> None:
        if self.node.loss is None:
            try:
                await asyncio.to_thread(self.node.ask, "stop", [self.number])
                async with asyncio.timeout(STOP_SECONDS):
                    await self.ended()
            except (NodeError, TimeoutError):
                return  # it ends with its node


def loss_of(name: str, problem: BaseException) -> str:
    import ray

    if isinstance(problem, ray.exceptions.OutOfMemoryError) or "running low on memory" in str(problem):
        return f"node {name} is lost: {MEMORY_MONITOR}"
    if isinstance(problem, ray.exceptions.GetTimeoutError):
        return f"node {name} did not answer in time"
    return f"node {name}, or Rally's agent on it, has died"
