"""The tool-call formats: how models write calls, by name."""

from rally.chat.formats.base import FormatResult, FoundCall, Schemas, ToolFormat, convert, malformed, schemas_of
from rally.chat.formats.registry import ALIASES, AUTO, FORMATS, get_format, load_formats, register_format

__all__ = [
    "ALIASES",
    "AUTO",
    "FORMATS",
    "FormatResult",
    "FoundCall",
    "Schemas",
    "ToolFormat",
    "convert",
    "get_format",
    "load_formats",
    "malformed",
    "register_format",
    "schemas_of",
]
