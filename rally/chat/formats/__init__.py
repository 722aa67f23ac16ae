"""The tool-call formats, by name."""

from rally.chat.formats.base import FormatResult, FoundCall, ToolFormat, schemas_of
from rally.chat.formats.hermes import HERMES
from rally.chat.formats.llama3_json import LLAMA3_JSON
from rally.chat.formats.plain_call import PLAIN
from rally.chat.formats.qwen3_coder import QWEN3_CODER
from rally.types import RallyError

FORMATS = {f.name: f for f in (HERMES, QWEN3_CODER, LLAMA3_JSON, PLAIN)}
ALIASES = {"qwen": "hermes", "qwen2_5": "hermes", "qwen3": "hermes"}


def get_format(name: str) -> ToolFormat:
    """The format called `name`. Raises RallyError with the known names."""
    tool_format = FORMATS.get(ALIASES.get(name, name))
    if tool_format is None:
        known = ", ".join(sorted([*FORMATS, *ALIASES]))
        raise RallyError(f"unknown tool-call format {name!r}; choose one of {known}")
    return tool_format


__all__ = ["ALIASES", "FORMATS", "FormatResult", "FoundCall", "ToolFormat", "get_format", "schemas_of"]
