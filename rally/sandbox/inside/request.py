"""Guarantees: what a sandbox is asked to do arrives as typed values; anything else is our own bug."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Limits of one execution; sizes in bytes. `cpu_seconds` is of all its processes together, for each step."""

    memory: int
    disk: int
    files: int
    output: int
    processes: int
    open_files: int
    cpu_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command; without `argv` it is the code itself, in the warm interpreter."""

    name: str
    timeout: float
    argv: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """One execution: files and code are placed in `folder`, then the steps run until one fails."""

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
    def of(cls, message: dict[str, Any]) -> Order:
        steps = tuple(Step(**{**s, "argv": None if s["argv"] is None else tuple(s["argv"])}) for s in message["steps"])
        plain = {**message, "steps": steps, "caps": Caps(**message["caps"])}
        return cls(**{**plain, "fetch": tuple(message["fetch"]), "readable": tuple(message["readable"])})
