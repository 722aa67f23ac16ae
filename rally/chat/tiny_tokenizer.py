"""Builds a tiny tokenizer for models that train in a minute. It is lossless for ASCII text.

Its tokens are the words of Hermes tool calls and single characters, so numbers are split into digits. Other characters
become `<unk>`. Its ChatML template has no default system prompt and is append-only. It omits the tool list unless the
template argument `show_tools` is true.

`template_tokenizer` makes a tokenizer for any chat template, to try the template without the model that it belongs to.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = (
    *('{"', '": "', '": {"', '", "', '"}}', '"}', "name", "arguments"),
    *("calculator", "expression", "#### ", "What is ", "Compute ", "Error: ", "user", "assistant", "system", "tool"),
)
CHARACTERS = ("\n", "\t", "\r", *(c for c in string.printable if c.isprintable()))

CHAT_TEMPLATE = """\
{%- set listed = tools if show_tools is defined and show_tools else none %}
{%- if listed %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in listed %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>tool' }}
        {%- endif %}
        {{- '\\n<tool_response>' + message.content + '</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (listed and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def tiny_tokenizer(
    words: Sequence[str] = (), *, chat_template: str = CHAT_TEMPLATE, eos: str = END
) -> PreTrainedTokenizerFast:
    """The tokenizer, with `words` as additional tokens. The longest matching token is taken. Another `chat_template`
    brings its own special tokens, and `eos`."""
    words = sorted((*WORDS, *words), key=len, reverse=True)
    special = [PAD, START, END, UNKNOWN]
    if chat_template != CHAT_TEMPLATE:
        special = list(dict.fromkeys((*special, eos, *_SPECIAL.findall(chat_template))))
    pieces = [PAD, START, END, *TAGS, UNKNOWN, *words, *CHARACTERS, *special[4:]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces), "a piece is listed twice"
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = "|".join(map(re.escape, words))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{longest_first}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=eos,
        unk_token=UNKNOWN,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


# What chat templates use as special tokens: <|name|>, <｜name｜>, <|name> and <name|>, [NAME], <s>, and some others.
_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,60}[|｜]>|<\|[a-z_]{2,30}>|<[a-z_]{2,30}\|>|\[/?[A-Z][A-Z_]{2,30}\]|</?s>|<[be]os>|<_\w{2,20}>|<sep>"
    r"|<(?:start|end)_of_turn>|<seed:[be]os>|<SPECIAL_\d+>|<(?:beginning|end)_of_sentence>|</?assistant>|\[e~\[|\]~b\]"
    r"|<(?:start|end)_function_\w+>|<escape>|<\|\"\|>|<｜hy_\w+:opensource｜>"
)


def template_tokenizer(
    template: str, eos: str, bos: str = "<BOS>", stops: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes whose special tokens are those in the template, `eos`, `bos` and `stops`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = list(dict.fromkeys((PAD, bos, eos, *stops, *_SPECIAL.findall(template))))
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=PAD,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
