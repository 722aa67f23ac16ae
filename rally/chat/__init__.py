"""Messages become ids and back; what follows a sampled turn is what the template puts there; no tool call is lost."""

from rally.chat.codec import ChatCodec, EncodedConversation, Parsed
from rally.chat.errors import TemplateError
from rally.chat.escape import Escaped
from rally.chat.formats import FORMATS, ToolFormat, get_format
from rally.chat.pictures import Encoded
from rally.chat.probe import Difference, SanityMode, TemplateReport
from rally.chat.tiny import tiny_tokenizer

__all__ = [
    "FORMATS",
    "ChatCodec",
    "Difference",
    "Encoded",
    "EncodedConversation",
    "Escaped",
    "Parsed",
    "SanityMode",
    "TemplateError",
    "TemplateReport",
    "ToolFormat",
    "get_format",
    "tiny_tokenizer",
]
