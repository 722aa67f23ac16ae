"""Finds the token with which assistant turns end, from the chat template and the stop tokens of the model.

Most templates print one token after every turn. Others print another one once messages follow, print none because the
next message begins with it, or print none at all, and the policy then ends its turns with the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Literal, NamedTuple

from rally.chat.templates import QUESTION, SENTINEL, Template, TemplateError, common_prefix
from rally.types import Message

Kind = Literal["content", "call"]
KINDS: tuple[Kind, ...] = ("content", "call")


class EndOfTurn(NamedTuple):
    """The special token that ends an assistant turn, as the policy samples it.

    `printed`: the template prints it after the last turn. `later` is the token that stands there once messages follow.
    It is another one in gpt-oss's template, and empty if the following message begins with it, as GLM's do. `extra` is
    what the template prints after the end of a last turn. `written` is the token that it prints in place of this one,
    if it prints another. `silent`: it never prints an end, and the policy ends its turns with the end-of-text token.
    """

    id: int
    text: str
    printed: bool
    later: str
    extra: str = ""
    written: str = ""
    silent: bool = False


class TurnEnds:
    """The ends of turns of one template. `stops` are the stop tokens of the model's generation config and tokenizer."""

    def __init__(self, template: Template, stops: Sequence[int]) -> None:
        self.template = template
        self.stops = frozenset(stops)

    @cached_property
    def by_kind(self) -> Mapping[Kind, EndOfTurn]:
        """The end of a turn of text, and of a turn with calls."""
        reply: Message = {"role": "assistant", "content": SENTINEL}
        content = self._end(reply, {"role": "user", "content": "next"})
        if content is None:
            text = self.template.raw_text([QUESTION, reply], False)
            if SENTINEL not in text:
                raise TemplateError("the chat template does not render assistant messages; use another template")
            raise TemplateError(
                "the chat template does not end assistant turns with a special token; use one that does"
            )
        return {"content": content, "call": self._end_of_calls() or content}

    def _end_of_calls(self) -> EndOfTurn | None:
        call_id = self.template.format.call_id("lookup", 0)
        function = {"name": "lookup", "arguments": {"value": SENTINEL}}
        call = {"id": call_id, "type": "function", "function": function}
        reply = self.template.normal({"role": "assistant", "content": "", "tool_calls": [call]})
        return self._end(reply, {"role": "tool", "name": "lookup", "tool_call_id": call_id, "content": "42"})

    def _end(self, reply: Message, follower: Message) -> EndOfTurn | None:
        """The end of `reply`: the token that follows it both at the end of a conversation and before `follower`. Of
        several, one that the model stops at. None if there is none, or if the template leaves the reply out."""
        try:
            last = self.template.raw_text([QUESTION, reply], False)
        except TemplateError:
            return None
        try:
            later: str | None = self.template.raw_text([QUESTION, reply, follower], True)
        except TemplateError:
            later = None
        syntax = self.rest_of_call(last) if follower["role"] == "tool" else ""
        if syntax is None or SENTINEL not in last:
            return None
        last_tail = last.partition(SENTINEL)[2].removeprefix(syntax)
        later_tail = last_tail if later is None else later.partition(SENTINEL)[2].removeprefix(syntax)
        shared = self.specials(common_prefix(last_tail, later_tail))
        stops_there = any(i in self.stops for i in shared)
        if shared and (stops_there or not self._opens_a_message(shared[0])):
            token_id = next((i for i in shared if i in self.stops), shared[0])
            text = self.token(token_id)
            extra = last_tail.partition(text)[2]
            if not stops_there and self._end_of_text is not None and self._inside_a_turn(text):
                stop = self.token(self._end_of_text)
                return EndOfTurn(self._end_of_text, stop, True, text, extra, written=text)
            return EndOfTurn(token_id, text, True, text, extra)
        if shared and self._end_of_text is not None:
            return self._silent_end(last_tail)
        at_end, following = self.specials(last_tail), self.specials(later_tail)
        begins = following[0] if following and later_tail.lstrip().startswith(self.token(following[0])) else None
        closer = begins is not None and self._asked_only.rstrip().endswith(self.token(begins))
        if begins is not None and (begins in self.stops or not (at_end and closer)):
            return EndOfTurn(begins, self.token(begins), False, "", last_tail)
        if at_end:
            token_id = next((i for i in at_end if i in self.stops), at_end[0])
            text = self.token(token_id)
            return EndOfTurn(token_id, text, True, text if begins is None else self.token(begins))
        inside = self.specials(syntax)  # a turn that ends with the mark that closes its calls
        if inside and syntax.rstrip().endswith(self.token(inside[-1])):
            return EndOfTurn(inside[-1], self.token(inside[-1]), True, self.token(inside[-1]))
        return None if self._end_of_text is None else self._silent_end(last_tail)

    @property
    def _end_of_text(self) -> int | None:
        """The token with which the model ends a text, whatever the template prints."""
        eos = self.template.tokenizer.eos_token_id
        return eos if isinstance(eos, int) else min(self.stops, default=None)

    def _silent_end(self, extra: str) -> EndOfTurn:
        assert self._end_of_text is not None
        text = self.token(self._end_of_text)
        return EndOfTurn(self._end_of_text, text, False, text, extra, silent=True)

    def _opens_a_message(self, token_id: int) -> bool:
        """Whether the token begins messages and does not end them, as <|START_OF_TURN_TOKEN|>."""
        before, _, after = self._asked_only.partition(str(QUESTION["content"]))
        closing = self.specials(after)[:1]
        return token_id not in closing and token_id in self.specials(before)[-2:]

    def _inside_a_turn(self, token: str) -> bool:
        """Whether the template prints the token before a call or after thinking, within one turn of the model."""
        call_id = self.template.format.call_id("lookup", 0)
        function = {"name": "lookup", "arguments": {"value": "x"}}
        call = {"id": call_id, "type": "function", "function": function}
        thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), SENTINEL)
        turns: tuple[tuple[Message, str], ...] = (
            ({"role": "assistant", "content": SENTINEL, "tool_calls": [call]}, "lookup"),
            ({"role": "assistant", "content": "rallyanswer", **thought}, "rallyanswer"),
        )
        for turn, last in turns:
            with suppress(TemplateError):
                text = self.template.raw_text([QUESTION, self.template.normal(turn)], False)
                if token in text.partition(SENTINEL)[2].rpartition(last)[0]:
                    return True
        return False

    def rest_of_call(self, text: str, calls: int = 1) -> str | None:
        """What the syntax of a turn's calls puts after the first argument; None if the format does not read it."""
        place = text.find(SENTINEL)
        try:
            asked = self.template.text([QUESTION], True)
            asked = asked if text.startswith(asked) else common_prefix(self._asked_only, text)
            before = len(asked)
            found = self.template.format.find(text[before:], {})
        except NotImplementedError:
            return None
        ends = [one.end + before for one in found if one.call.error is None and one.end + before > place]
        return text[place + len(SENTINEL) : ends[calls - 1]] if place >= 0 and len(ends) >= calls else None

    @cached_property
    def _asked_only(self) -> str:
        return self.template.raw_text([QUESTION], False)

    def specials(self, text: str) -> list[int]:
        """The special tokens of the text, in order."""
        tokenizer = self.template.tokenizer
        added = tokenizer.added_tokens_decoder
        known = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids) | self.stops
        return [i for i in self.template.tokens(text) if i in known]

    def token(self, token_id: int) -> str:
        return str(self.template.tokenizer.convert_ids_to_tokens(token_id))
