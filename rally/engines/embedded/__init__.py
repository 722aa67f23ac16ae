"""The embedded engine: runs in the trainer's process on the trainer's own module."""

from rally.engines.embedded.core import EngineCore
from rally.engines.embedded.engine import EmbeddedEngine
from rally.engines.embedded.settings import EngineSettings, NgramSpeculation, RolloutDemand

__all__ = ["EmbeddedEngine", "EngineCore", "EngineSettings", "NgramSpeculation", "RolloutDemand"]
