"""Rally trains language-model agents that talk over several turns and use tools."""

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

__all__ = [
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
