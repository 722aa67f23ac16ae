"""The engine that runs inside the trainer's process, over the trainer's own module."""

from rally.engines.embedded.core import EngineCore, EngineSettings
from rally.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine", "EngineCore", "EngineSettings"]
