"""The types of the sandbox: programs, limits, and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rally.types import RallyError

CommandStatus = Literal["Finished", "TimeLimitExceeded"]


class SandboxError(RallyError):
    """The sandbox failed or does not support a request; not an error of the program."""

    outage = True


class UnsupportedProgram(SandboxError):
    """The sandbox works and cannot run this program, such as one in an unknown language."""

    outage = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one execution, for all its processes together. Disk is a tmpfs under /tmp, /mnt and /dev/shm, so it is
    memory too."""

    memory_mb: int = 1024
    disk_mb: int = 128
    files: int = 10_000
    output_bytes: int = 1 << 20  # kept of each stream; the rest is only counted
    processes: int = 64  # and threads
    open_files: int = 256  # of each process
    cpu_seconds: float | None = None  # per step; by default the timeout of the step

    def __post_init__(self) -> None:
        for name in ("memory_mb", "disk_mb", "files", "output_bytes", "processes", "open_files"):
            if getattr(self, name) < 1:
                raise RallyError(f"the sandbox limit {name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Code and its inputs: `files` are written into its folder first, `fetch_files` are read back at the end."""

    code: str
    language: str = "python"
    timeout: float = 10.0
    compile_timeout: float = 10.0
    stdin: str | None = None
    args: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()
    memory_mb: int | None = None
    echo: bool = False  # return the value of a final expression if nothing was printed

    def __post_init__(self) -> None:
        for name in ("timeout", "compile_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise RallyError(f"a program's {name} must be a number of seconds above 0, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How one command ended. `reason` is the limit that ended it (timeout, cpu, memory, processes, disk), or empty."""

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
    """The result of a program; `run` is None if it did not compile. `state_lost`: a session lost its variables."""

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
        """The result of the last command that ran."""
        result = self.run or self.compile
        assert result is not None, "a program has at least one command"
        return result

    def metrics(self) -> dict[str, float | str]:
        """Metrics of the execution, for logs."""
        return {
            "isolation": self.isolation,
            "seconds": sum(r.seconds for r in (self.compile, self.run) if r is not None),
            "peak_memory_mb": self.peak_memory / (1 << 20),
            "output_cut_bytes": self.last.stdout_cut + self.last.stderr_cut,
            "files_left_out": self.files_left_out,
            "ended_by": self.last.reason or "itself",
        }
