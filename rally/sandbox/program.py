"""Guarantees: programs and outcomes cross the isolation as plain messages, and come out as they went in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rally.types import RallyError

CommandStatus = Literal["Finished", "TimeLimitExceeded"]


class SandboxError(RallyError):
    """The sandbox itself cannot do this, through no fault of the program. One sentence says what to do."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one execution, all its processes together. Disk is memory too: a tmpfs under /tmp, /mnt and /dev/shm."""

    memory_mb: int = 1024
    disk_mb: int = 128
    files: int = 10_000
    output_bytes: int = 1 << 20  # kept of each stream; the rest is counted
    processes: int = 64  # and threads
    open_files: int = 256  # of each process
    cpu_seconds: float | None = None  # of each step; without it as much as the step may take of wall time

    def __post_init__(self) -> None:
        for name in ("memory_mb", "disk_mb", "files", "output_bytes", "processes", "open_files"):
            if getattr(self, name) < 1:
                raise RallyError(f"the sandbox limit {name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Code and all it is given: `files` are written into its folder first, `fetch_files` are read back at the end."""

    code: str
    language: str = "python"
    timeout: float = 10.0
    compile_timeout: float = 10.0
    stdin: str | None = None
    args: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()
    memory_mb: int | None = None
    echo: bool = False  # hand back the value of a last line that is an expression, when nothing was printed

    def __post_init__(self) -> None:
        for name in ("timeout", "compile_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise RallyError(f"a program's {name} must be a number of seconds above 0, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How one command ended. `reason`: timeout, cpu, memory, processes or disk ended it; empty when it did itself."""

    status: CommandStatus
    return_code: int | None
    seconds: float
    stdout: str
    stderr: str
    stdout_cut: int = 0
    stderr_cut: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.return_code == 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a program; `run` is None when it did not compile. `state_lost` only says something of a session."""

    isolation: str
    run: CommandResult | None
    compile: CommandResult | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    files_left_out: int = 0
    echo: str | None = None
    peak_memory: int = 0
    state_lost: bool = False

    @property
    def ok(self) -> bool:
        return self.run is not None and self.run.ok

    @property
    def last(self) -> CommandResult:
        """The command that decided."""
        result = self.run or self.compile
        assert result is not None, "a program has at least one command"
        return result

    def metrics(self) -> dict[str, float | str]:
        """What is worth logging of any execution."""
        return {
            "isolation": self.isolation,
            "seconds": sum(r.seconds for r in (self.compile, self.run) if r is not None),
            "peak_memory_mb": self.peak_memory / (1 << 20),
            "output_cut_bytes": self.last.stdout_cut + self.last.stderr_cut,
            "files_left_out": self.files_left_out,
            "ended_by": self.last.reason or "itself",
        }
