"""The engine that runs inside the trainer's process, over the trainer's own module."""

from rally.engines.embedded.core import EngineCore
from rally.engines.embedded.engine import EmbeddedEngine
from rally.engines.embedded.settings import EngineSettings

__all__ = ["EmbeddedEngine", "EngineCore", "EngineSettings"]
