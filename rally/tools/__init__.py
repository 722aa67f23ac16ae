"""Tools: how they are written, loaded from YAML, limited and called. Every call returns within its deadline."""

from rally.tools.base import BaseTool
from rally.tools.function_tool import FunctionTool, function_tool
from rally.tools.invoke import ToolUnavailable
from rally.tools.limits import CallLimits, ToolLimits
from rally.tools.loader import load_function_tools, load_tools
from rally.tools.schema import BadArguments, ToolConfigError
from rally.tools.session import ToolBox, ToolSession
from rally.types import ToolResponse
from rally.util.subprocesses import ProcessResult, run_process

__all__ = [
    "BadArguments",
    "BaseTool",
    "CallLimits",
    "FunctionTool",
    "ProcessResult",
    "ToolBox",
    "ToolConfigError",
    "ToolLimits",
    "ToolResponse",
    "ToolSession",
    "ToolUnavailable",
    "function_tool",
    "load_function_tools",
    "load_tools",
    "run_process",
]
