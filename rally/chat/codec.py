"""`ChatCodec`: encodes messages as token ids and parses sampled ids into text and tool calls.

The ids appended after a sampled turn are exactly those that the chat template puts there. Every tool call that the
policy wrote is kept, malformed ones with an error. Sampled ids are never encoded again: a history is prompt ids +
sampled ids + delta ids. The full rendering of all messages (`render`) is the specification that it is compared with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rally.chat.deltas import THINKING, DeltaText, TurnTexts
from rally.chat.format_choice import FormatChoice, choose_format
from rally.chat.formats import AUTO, ToolFormat, get_format
from rally.chat.image_tokens import EncodedMessages, ImageTokens
from rally.chat.template_probe import SanityMode, TemplateReport, compare, probe
from rally.chat.templates import QUESTION, Escaped, Template, TemplateError, content_of, openai_shape
from rally.chat.turn_ends import Kind
from rally.images.patches import Patches
from rally.types import Image, ImageSpan, Message, RallyError, ToolCall

ONE_CALL = "Only one tool call per turn is possible; this one was not run. Make it in your next turn"
MAX_VARIANTS = 256  # codecs to keep, one per tool list and template variables


class EncodedConversation(NamedTuple):
    """A whole conversation. `mask` is 1 exactly on the tokens that the policy would have sampled."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """One parsed turn. `text` is all of it without the stop token, `content` the part outside of the calls. `closed`:
    it ended with the template's end-of-turn token."""

    text: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    closed: bool = True


class ChatCodec:
    """One tokenizer, its chat template, a tool list and a tool-call format.

    The format `auto` is the one that reads calls as the template renders them. If the template omits calls, it is the
    one whose marks the template mentions, else hermes. A format that is named or mentioned then writes the calls into
    the content of replies.
    `stop_ids` are the end-of-text ids of the model's generation config; those of ordinary tokens are ignored. The
    tokenizer's own and the template's ends of turns are added.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_format: str | ToolFormat = AUTO,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        patches: Patches | None = None,
        max_cached: int = 4096,
    ) -> None:
        self.tokenizer = tokenizer
        self.patches = patches  # None for a text model
        self._image_tokens = ImageTokens(tokenizer, patches)
        self._template = Template(tokenizer, tools, chat_template, template_kwargs or {}, self._image_tokens.token)
        self.chosen = tool_format == AUTO  # by the template
        if isinstance(tool_format, ToolFormat):
            self.format = tool_format
        elif self.chosen:
            choice = self._format_choice
            found = [fit.format for fit in choice.fits] or [*choice.described, get_format("hermes")]
            self.format = found[0]
        else:
            self.format = get_format(tool_format)
        self._template.format = self.format
        choice = self._format_choice
        known = not self.chosen or self.format in choice.described
        self._template.writes_calls = known and not (choice.rendered or choice.refusal)
        self._max_cached = max_cached
        # A generation config that was made with a random model may have ids of ordinary tokens.
        added = tokenizer.added_tokens_decoder
        self._model_stops = tuple(i for i in stop_ids if i in added)
        stops = tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *self._model_stops) if i is not None))
        self._turns = TurnTexts(self._template, stops)
        self._variants: dict[str, ChatCodec] = {_key([self._template.tools, self._template.kwargs]): self}
        self._reads: dict[str, bool] = {}
        self._prompt_ids = lru_cache(maxsize=max_cached)(self._encode_prompt_key)
        self._delta_ids = lru_cache(maxsize=max_cached // 4)(self._encode_delta_text)
        ends = self._turns.ends
        self.end_of_turn: int = ends["content"].id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*(end.id for end in ends.values()), *stops)))
        later = {self._template.tokens(end.later)[0] for end in ends.values() if end.later}
        self._closing_ids = {end.id for end in ends.values()} | later
        self._opening_ids = self._template.tokens(self._turns.opening)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool list in OpenAI form, as passed to the template."""
        return self._template.tools

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables that the template is given."""
        return self._template.kwargs

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatCodec:
        """This codec with another tool list. It is cached by the list."""
        return self._variant(openai_shape(tools), self._template.kwargs)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatCodec:
        """This codec with further template variables, cached like those with other tools."""
        return self._variant(self.tools, {**self._template.kwargs, **variables}) if variables else self

    def _variant(self, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> ChatCodec:
        key = _key([tools, variables])
        if key not in self._variants:
            if len(self._variants) >= MAX_VARIANTS:  # an agent may send a different list with each request
                del self._variants[next(iter(self._variants))]
            codec = ChatCodec(
                self.tokenizer,
                self.format,
                tools,
                stop_ids=self._model_stops,
                chat_template=self._template.source,
                template_kwargs=variables,
                patches=self.patches,
                max_cached=self._max_cached,
            )
            codec._variants, codec.chosen, codec._reads = self._variants, self.chosen, self._reads
            self._variants[key] = codec
        return self._variants[key]

    def reads_variable(self, name: str, first: Any, second: Any) -> bool:
        """Whether the template's rendering of a question depends on a variable, tried with two values."""
        if name not in self._reads:
            source = str(self._template.source or self.tokenizer.chat_template)
            prompts = []
            with suppress(TemplateError):
                if re.search(rf"\b{name}\b", source):
                    prompts = [self.with_variables({name: v}).encode_prompt([QUESTION]) for v in (first, second)]
            self._reads[name] = len(set(prompts)) == 2
        return self._reads[name]

    def template_mentions(self, value: str) -> bool:
        """Whether the template has the value as a text in quotes."""
        source = str(self._template.source or self.tokenizer.chat_template)
        return f"'{value}'" in source or f'"{value}"' in source

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of the first messages, with tool list and generation prompt. Cached by content."""
        return self.prompt(messages).ids

    def format_problem(self, key: str = "multi_turn.format") -> str:
        """Why calls cannot be read as the template renders them, in one sentence; empty if they can, or if the template
        shows no calls."""
        return self._format_choice.problem(self.format, key) or self._early_stop

    @cached_property
    def _early_stop(self) -> str:
        """Which stop token a turn has before its end, as a sentence; empty if none. Such a turn would be cut there."""
        call = {"id": self.format.call_id("lookup", 0), "function": {"name": "lookup", "arguments": {"query": "x"}}}
        thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "a thought")
        turns: dict[str, Message] = {"a call": {"content": "", "tool_calls": [call]}}
        turns["an answer after thinking"] = {"content": "text", **thought}
        for what, fields in turns.items():
            with suppress(TemplateError):
                ids = self.encode_assistant({"role": "assistant", **fields})
                if early := [i for i in ids[:-1] if i in self.stop_ids]:
                    token = self.decode(early[:1])
                    return (
                        f"the chat template prints {token} before {what}, and turns end with it, so that the turn "
                        "would end there; use another template (custom_chat_template)"
                    )
        return ""

    @cached_property
    def _format_choice(self) -> FormatChoice:
        return choose_format(self._template, getattr(self, "format", None))

    def encode_delta(
        self, messages: Sequence[Message], closed: bool = True, last_id: int | None = None
    ) -> tuple[int, ...]:
        """The ids to append after a sampled turn when tool or user messages follow, with generation prompt.

        `last_id` is the last token of the turn. Whatever it is, it stays and is not doubled. Without it, `closed` says
        whether the turn ended with its end-of-turn token; if it did not, the delta begins with that token.
        """
        return self.delta(messages, closed, last_id).ids

    def prompt(self, messages: Sequence[Message]) -> EncodedMessages:
        """`encode_prompt` with image spans."""
        return self._image_tokens.expand(self._prompt_ids(_key([_without_images(m) for m in messages])), messages)

    def delta(self, messages: Sequence[Message], closed: bool = True, last_id: int | None = None) -> EncodedMessages:
        """`encode_delta` with image spans."""
        if any(m["role"] == "assistant" for m in messages):
            raise RallyError("a delta may only have tool and user messages; assistant turns are in the history already")
        delta = self._turns.delta(messages)
        ids = self._delta_ids(delta)
        if last_id is not None:
            closed = last_id in self._closing_ids if delta.closing else last_id == ids[0]
        return self._image_tokens.expand(ids[1:] if closed else ids, messages)

    def locate(self, ids: Sequence[int], images: Sequence[Image], mask: Sequence[int]) -> tuple[ImageSpan, ...]:
        """The spans of the images in a history. `mask` is 1 on sampled tokens."""
        return self._image_tokens.locate(ids, images, mask)

    def encode_assistant(self, message: Message) -> tuple[int, ...]:
        """The ids that the policy would have sampled for this message, with the end-of-turn token."""
        message = self._template.with_ids([message])[0]
        text, opening = self._turns.reply(message), self._opening_ids
        joined = self._template.tokens(self._turns.opening + text)
        # A leading newline may merge with that of the generation prompt into one token; a sampled one cannot.
        merged = joined[: len(opening)] != opening
        return tuple(self._template.tokens(text) if merged else joined[len(opening) :])

    def encode_conversation(self, messages: Sequence[Message]) -> EncodedConversation:
        """The conversation for supervised fine-tuning, with the ids and mask that an episode would have."""
        replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not replies or replies[0] == 0 or replies[-1] != len(messages) - 1:
            raise RallyError("a training conversation must not begin with an assistant message, and must end with one")
        messages = self._template.with_ids(messages)
        prompt = self.prompt(messages[: replies[0]])
        ids, images = list(prompt.ids), list(prompt.images)
        mask = [0] * len(ids)
        for before, at in zip([None, *replies], replies, strict=False):
            self._turns.check_reply(messages[at])
            delta = EncodedMessages((), ())
            if before is not None:
                delta = self.delta(messages[before + 1 : at], last_id=ids[-1])
            reply = self.encode_assistant(messages[at])
            images += [span.moved(len(ids)) for span in delta.images]
            ids += [*delta.ids, *reply]
            mask += [0] * len(delta.ids) + [1] * len(reply)
        return EncodedConversation(tuple(ids), tuple(mask), tuple(images))

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> tuple[int, ...]:
        """The template's rendering of the whole conversation: the specification of the methods above."""
        return self._rendered(messages, generation_prompt).ids

    def rerender(self, messages: Sequence[Message]) -> EncodedMessages:
        """The history as the template renders it from scratch (multi_turn.history=rerender)."""
        return self._rendered(messages, generation_prompt=True)

    def _rendered(self, messages: Sequence[Message], generation_prompt: bool) -> EncodedMessages:
        ids = self._template.tokens(self._template.text(messages, generation_prompt))
        return self._image_tokens.expand(tuple(ids), messages)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def form_notes(self) -> list[str]:
        """What the chat template cannot show, and what is done instead, in sentences."""
        forms = self._template.forms
        notes = []
        if forms.one_call and not self._template.writes_calls:
            notes.append("The chat template shows one call per turn; further calls of a turn are refused in words.")
        if self._template.writes_calls and forms.loses_answers:
            notes.append("The chat template shows no tool messages; they are written as user messages.")
        elif not self._template.writes_calls and forms.loses_stray_answers:
            notes.append("The chat template shows tool messages after calls only; others are written as user messages.")
        return notes

    def parse(self, ids: Sequence[int]) -> Parsed:
        """Parse a sampled turn. Never raises: a malformed call becomes a ToolCall with an error."""
        stopped = bool(ids) and ids[-1] in self.stop_ids
        text = self.decode(ids[:-1] if stopped else ids)
        content, calls = self.format.parse(text, self.tools, start=self._calls_start(text))
        if len(calls) > 1 and self._template.forms.one_call and not self._template.writes_calls:
            # The template would drop the others from the history.
            calls = (calls[0], *(call if call.error else replace(call, error=ONE_CALL) for call in calls[1:]))
        return Parsed(
            text=text,
            content=content,
            tool_calls=calls,
            errors=tuple(call.error for call in calls if call.error is not None),
            closed=stopped and ids[-1] in self._closing_ids,
        )

    def settled(self, text: str) -> str:
        """The beginning of an unfinished turn that will be the beginning of its message's content, whatever follows. It
        ends before the first word of a call, and before white space, which a call would remove."""
        begins, thinking = self.format.begins, [marks.opening for marks in THINKING if marks.as_field]
        if not begins or self._turns.thinking_prefilled or any(self._turns.frames["call"]):
            return ""
        if text[:1].isspace() or any(text.startswith(mark) or mark.startswith(text) for mark in thinking):
            return ""
        end = min((at for word in begins if (at := text.find(word)) >= 0), default=len(text))
        return text[: end - partial_suffix(text[:end], begins)].rstrip()

    def message(self, parsed: Parsed) -> Message:
        """The parsed turn as an assistant message. Arguments are objects, as templates expect. The text of a malformed
        call stays in the content, so that it remains in the history."""
        good = [call for call in parsed.tool_calls if call.error is None]
        if not good:
            return {"role": "assistant", **self._spoken(parsed.text, "content")}
        broken = [call.raw for call in parsed.tool_calls if call.error is not None]
        spoken = self._spoken(parsed.content, "call")
        content = "\n".join(part for part in [spoken["content"], *broken] if part)
        functions = [{"name": call.name, "arguments": call.arguments} for call in good]
        calls = [{"id": c.id, "type": "function", "function": f} for c, f in zip(good, functions, strict=True)]
        return {"role": "assistant", **spoken, "content": content, "tool_calls": calls}

    def _spoken(self, text: str, kind: Kind) -> dict[str, str]:
        """The content of a turn and, for families whose templates take it as a field, its thinking. What the template
        itself prints around the content, as a channel name, is not part of it."""
        thought: dict[str, str] = {}
        for marks in (marks for marks in THINKING if marks.as_field):
            prefilled = self._turns.opening.rstrip().endswith(marks.opening)
            if prefilled or text.lstrip().startswith(marks.opening):
                thinking, closed, rest = text.lstrip().removeprefix(marks.opening).partition(marks.closing)
                if closed:
                    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thinking.strip())
                    text = rest.strip().removeprefix(self._turns.opening.strip())
                break
        for marks in (marks for marks in THINKING if not marks.as_field):
            if (
                self._turns.opening.rstrip().endswith(marks.opening)
                and marks.closing in text
                and marks.opening not in text
            ):
                text = f"{marks.opening}\n{text}"  # the generation prompt opened it
        before, after = self._turns.frames[kind]
        inner = text.strip()
        if (
            (before or after)
            and inner.startswith(before)
            and inner.endswith(after)
            and len(inner) >= len(before + after)
        ):
            text = inner[len(before) : len(inner) - len(after)]
        return {"content": text, **thought}

    def thought(self, text: str) -> dict[str, str]:
        """Fields for the thinking of a reply, if the generation prompt opens a thinking block; else none. A made-up
        reply needs them there."""
        names = ("reasoning_content", "reasoning", "thinking")
        return dict.fromkeys(names, text) if self._turns.thinking_prefilled else {}

    def escape(self, text: str) -> Escaped:
        """Tool text with its control tokens escaped, and their number."""
        return self._template.escaper.tool(text)

    def probe(self) -> TemplateReport:
        """Test how the template treats earlier turns."""
        return probe(self._turns)

    def sanity(self, segment_ids: Sequence[int], messages: Sequence[Message], mode: SanityMode) -> str | None:
        """Compare a history that grew turn by turn with the full rendering of its messages. Returns None or a diff.

        Texts are compared, not ids: the policy may sample another tokenization of the same text.
        """
        ends_in_reply = messages[-1]["role"] == "assistant"
        end = self._turns.end

        def without_end(text: str) -> str:
            return text.rpartition(end.text)[0] if ends_in_reply and end.printed else text

        rendered = self._template.text(messages, generation_prompt=not ends_in_reply)
        rendered = self._image_tokens.expand_text(rendered, messages)
        stopped = ends_in_reply and bool(segment_ids) and segment_ids[-1] in self._closing_ids
        got = self.decode(segment_ids[:-1] if stopped else segment_ids)
        expected = without_end(rendered)
        if expected != got:  # encoding and decoding may change a text, as it may have changed the history
            expected = without_end(self.decode(self._template.tokens(rendered)))
        return compare(expected, got, mode)

    def _encode_prompt_key(self, key: str) -> tuple[int, ...]:
        return tuple(self._template.tokens(self._turns.prompt(json.loads(key))))

    def _encode_delta_text(self, delta: DeltaText) -> tuple[int, ...]:
        """The token that ends the turn, and the delta. Cached by content, because the tools of a group often return the
        same text."""
        # Encoded after the token that it follows, so that the tokenizer does not treat it as the start of a text.
        ids = tuple(self._template.tokens(delta.closing + delta.text))
        if not ids or (delta.closing and self.tokenizer.convert_ids_to_tokens(ids[0]) != delta.closing):
            raise TemplateError(f"the tokenizer does not keep the end-of-turn token {delta.closing} whole")
        return ids

    def _calls_start(self, text: str) -> int:
        """Where calls may begin: calls inside a closed thinking block at the start of a turn are ignored."""
        opening, text_start = self._turns.opening.rstrip(), text.lstrip()
        for marks in THINKING:
            if opening.endswith(marks.opening) or text_start.startswith(marks.opening):
                end = text.find(marks.closing)
                return end + len(marks.closing) if end >= 0 else 0
        return 0


def partial_suffix(text: str, words: Sequence[str]) -> int:
    """The length of the longest end of the text with which one of the words may begin."""
    longest = max((len(word) for word in words), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(word.startswith(text[-length:]) for word in words):
            return length
    return 0


def _without_images(message: Message) -> Message:
    """The message with bare image parts: in a key, only the positions of images matter, not their (large) data."""
    content = message.get("content")
    return {**message, "content": content_of(content)} if isinstance(content, list) else message


def _key(value: Any) -> str:
    """A cache key for messages or tools."""
    return json.dumps(value, ensure_ascii=False, default=repr)
