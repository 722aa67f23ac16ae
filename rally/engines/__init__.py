"""Rollout engines behind one protocol."""

from rally.engines.base import Engine, EngineError

__all__ = ["EmbeddedEngine", "Engine", "EngineError", "EngineSettings"]


def __getattr__(name: str) -> object:
    """The embedded engine needs torch; it is imported when it is asked for."""
    if name in ("EmbeddedEngine", "EngineSettings"):
        from rally.engines import embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
