"""The execution request that a supervisor receives, as typed values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Limits of one execution; sizes in bytes. `cpu_seconds` is for all its processes together, per step."""

    memory: int
    disk: int
    files: int
    output: int
    processes: int
    open_files: int
    cpu_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command; without `argv`, the Python code itself in the warm interpreter."""

    name: str
    timeout: float
    argv: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ExecutionRequest:
    """One execution: files and code are written into `folder`, then the steps run until one fails."""

    folder: str
    main: str
    code: str
    steps: tuple[Step, ...]
    caps: Caps
    stdin: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    echo: bool = False
    session: bool = False
    readable: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: dict[str, Any]) -> ExecutionRequest:
        steps = tuple(Step(**{**s, "argv": None if s["argv"] is None else tuple(s["argv"])}) for s in message["steps"])
        fields = {**message, "steps": steps, "caps": Caps(**message["caps"])}
        return cls(**{**fields, "fetch": tuple(message["fetch"]), "readable": tuple(message["readable"])})
