"""Rollout engines behind one protocol: embedded in the trainer's process, or remote servers behind a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rally.engines.base import Engine, EngineError, LockstepEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rally.engines.embedded import EmbeddedEngine, EngineSettings

__all__ = ["EmbeddedEngine", "Engine", "EngineError", "EngineSettings", "LockstepEngine", "build_engine"]


def build_engine(
    name: str,
    model: PreTrainedModel,
    settings: EngineSettings | None = None,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> EmbeddedEngine:
    """The embedded engine over the trainer's module. Its only `name` is "embedded"; `decode` is needed for stop
    strings."""
    if name != "embedded":
        raise EngineError(f"{name!r} is not an embedded engine; use rally.engines.remote.RemoteEngine for servers")
    from rally.engines import embedded

    return embedded.EmbeddedEngine(model, settings, decode=decode)


def __getattr__(name: str) -> object:
    """Import the embedded engine, which needs torch, on first use."""
    if name in ("EmbeddedEngine", "EngineSettings"):
        from rally.engines import embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
