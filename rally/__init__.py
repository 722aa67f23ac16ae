"""Rally trains language-model agents that talk over several turns and use tools."""

import importlib

from rally import module_aliases
from rally.types import (
    Episode,
    Generation,
    RallyError,
    SamplingParams,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResponse,
    ToolResult,
    ToolStatus,
    Turn,
)

__version__ = "0.1.0"
module_aliases.install()


def __getattr__(name: str) -> object:
    if name == "AgentTrainer":  # imported when it is asked for, because it imports everything
        return importlib.import_module("rally.api").AgentTrainer
    raise AttributeError(f"module 'rally' has no attribute {name!r}")


__all__ = [
    "AgentTrainer",
    "Episode",
    "Generation",
    "RallyError",
    "SamplingParams",
    "Segment",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolResponse",
    "ToolResult",
    "ToolStatus",
    "Turn",
    "__version__",
]
