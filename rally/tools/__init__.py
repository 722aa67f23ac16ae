"""Guarantees: a tool call always comes back, within its deadline, as text (or image) and a status."""

from rally.tools.arguments import BadArguments
from rally.tools.base import BaseTool
from rally.tools.function import FunctionTool, function_tool
from rally.tools.limits import CallLimits, ToolLimits
from rally.tools.loader import load_function_tools, load_tools
from rally.tools.process import Ran, run_process
from rally.tools.schema import ToolConfigError
from rally.tools.session import ToolBox, ToolSession
from rally.types import ToolResponse

__all__ = [
    "BadArguments",
    "BaseTool",
    "CallLimits",
    "FunctionTool",
    "Ran",
    "ToolBox",
    "ToolConfigError",
    "ToolLimits",
    "ToolResponse",
    "ToolSession",
    "function_tool",
    "load_function_tools",
    "load_tools",
    "run_process",
]
