"""Encodes chat messages as token ids by the model's chat template, and parses sampled turns into tool calls."""

from rally.chat.codec import ChatCodec, EncodedConversation, Parsed
from rally.chat.formats import FORMATS, ToolFormat, get_format, register_format
from rally.chat.image_tokens import EncodedMessages
from rally.chat.template_probe import SanityMode, TemplateDifference, TemplateReport
from rally.chat.templates import Escaped, MessageLost, TemplateError
from rally.chat.tiny_tokenizer import tiny_tokenizer

__all__ = [
    "FORMATS",
    "ChatCodec",
    "TemplateDifference",
    "EncodedMessages",
    "EncodedConversation",
    "Escaped",
    "MessageLost",
    "Parsed",
    "SanityMode",
    "TemplateError",
    "TemplateReport",
    "ToolFormat",
    "get_format",
    "register_format",
    "tiny_tokenizer",
]
