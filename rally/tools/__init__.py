"""Guarantees: a tool call always comes back, within its deadline, as text (or image) and a status."""

from rally.tools.arguments import BadArguments
from rally.tools.base import BaseTool
from rally.tools.function import FunctionTool, function_tool
from rally.tools.loader import load_function_tools, load_tools
from rally.tools.schema import ToolConfigError
from rally.tools.session import ToolBox, ToolLimits, ToolSession
from rally.types import ToolResponse

__all__ = [
    "BadArguments",
    "BaseTool",
    "FunctionTool",
    "ToolBox",
    "ToolConfigError",
    "ToolLimits",
    "ToolResponse",
    "ToolSession",
    "function_tool",
    "load_function_tools",
    "load_tools",
]
