"""Formats generations as OpenAI's JSON, whole or streamed in pieces.

The pieces of a stream add up to the whole response. Token ids and log-probabilities are exactly the engine's.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rally.chat import ChatCodec
from rally.chat.codec import partial_suffix
from rally.chat.grammars import Constraint, answer_prefix
from rally.engines.base import SampledTokens
from rally.services.admission import SamplingAsk
from rally.types import Generation, SamplingParams

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # the decoder's replacement for incomplete or invalid bytes


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class TextStream:
    """Decodes a growing choice. Only the last few tokens are decoded again for each new one. `settled` gives the part
    of an unfinished text that will not change: the beginning of what `finish` gets."""

    def __init__(self, decode: Decode, stops: Sequence[str], settled: Callable[[str], str] | None = None) -> None:
        self._decode, self._stops, self._settled = decode, tuple(stops), settled
        self._ids: list[int] = []
        self._anchor = self._read = 0  # text up to token `_read` is decoded; decoding begins at `_anchor`, for context
        self._text = self._sent = ""

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that can be sent now."""
        self._ids += ids
        before = self._decode(self._ids[self._anchor : self._read])
        text = self._decode(self._ids[self._anchor :])
        if not text.endswith(UNFINISHED):
            self._text += text[len(before) :]
            self._anchor, self._read = self._read, len(self._ids)
        text = self._settled(self._text) if self._settled is not None else self._text
        return self._send(before_stop(text, self._stops), hold=True)

    def finish(self, whole: str) -> str:
        """The part of the whole text that was not sent yet."""
        return self._send(whole, hold=False)

    def _send(self, text: str, *, hold: bool) -> str:
        text = text[: len(text) - partial_suffix(text, self._stops)] if hold else text
        if hold and len(text) < len(self._sent):
            return ""
        assert text.startswith(self._sent), "what was sent is the beginning of the text"
        piece, self._sent = text[len(self._sent) :], text
        return piece


Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """What a response contains beside its text."""

    model: str
    logprobs: bool
    token_ids: bool
    usage_in_stream: bool
    choices: int  # per prompt


class StreamBegin(NamedTuple):
    """What is known of a chat completion when its first token was sampled."""

    id: str
    created: int
    model: str
    prompt_tokens: int


class PromptFields(NamedTuple):
    """Fields about the prompt: of the response, and of each choice."""

    response: Json
    choice: Json


class Shape(Protocol):
    """The differences between text completions and chat completions."""

    prefix: str
    kind: str
    piece_kind: str

    def stream(self, params: SamplingParams) -> TextStream:
        """The decoder of a streamed choice."""
        ...

    def text(self, generation: Generation, params: SamplingParams) -> str: ...

    def prompt(self, ids: list[int]) -> PromptFields:
        """The fields with the ids of the prompt."""
        ...

    def whole(self, generation: Generation, params: SamplingParams) -> Json:
        """The fields of a finished choice."""
        ...

    def piece(self, text: str, *, first: bool) -> Json: ...

    def ending(self, generation: Generation, params: SamplingParams, stream: TextStream, *, first: bool) -> list[Json]:
        """The fields of the last pieces; `stream` has sent a part of the text. The first piece has the last tokens."""
        ...

    def logprobs(self, sampled: SampledTokens) -> Json: ...


class CompletionResponse:
    """The response to several requests, `options.choices` for each prompt in turn."""

    def __init__(self, shape: Shape, options: ResponseOptions, asks: Sequence[SamplingAsk]) -> None:
        self._shape, self._options, self._asks = shape, options, asks
        self._id, self._created = f"{shape.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._streams = [shape.stream(ask.params) for ask in asks]
        self._sent = [0] * len(asks)
        self._opened = [False] * len(asks)
        self._begun = False

    def opening(self) -> Iterator[StreamBegin]:
        """The begin of a stream, once."""
        if not self._begun:
            self._begun = True
            yield StreamBegin(self._id, self._created, self._options.model, len(self._asks[0].prompt_ids))

    def whole(self, generations: Sequence[Generation]) -> Json:
        """The response of all finished generations."""
        response, choices = self._head(self._shape.kind), []
        for index, (ask, generation) in enumerate(zip(self._asks, generations, strict=True)):
            prompt = self._prompt(index)
            response |= prompt.response
            own = self._shape.whole(generation, ask.params)
            sampled = SampledTokens(list(generation.ids), list(generation.logprobs))
            choices.append({"index": index, **own, **prompt.choice, **self._extras(sampled)})
        return response | {"choices": choices, "usage": self._usage(generations)}

    def pieces(self, index: int, sampled: SampledTokens) -> Iterator[Json]:
        """The pieces for new tokens of the `index`-th choice."""
        text = self._streams[index].push(sampled.ids)
        if text or self._options.token_ids or self._options.logprobs:
            self._sent[index] += len(sampled.ids)
            yield self._chunk(index, self._shape.piece(text, first=not self._opened[index]), sampled)

    def ending(self, index: int, generation: Generation) -> Iterator[Json]:
        """The last pieces of the `index`-th choice."""
        ask, stream, sent = self._asks[index], self._streams[index], self._sent[index]
        sampled = SampledTokens(list(generation.ids[sent:]), list(generation.logprobs[sent:]))
        for fields in self._shape.ending(generation, ask.params, stream, first=not self._opened[index]):
            yield self._chunk(index, fields, sampled)
            sampled = SampledTokens([], [])

    def usage_piece(self, generations: Sequence[Generation]) -> Iterator[Json]:
        """The usage, as the last piece of a stream that includes it."""
        if self._options.usage_in_stream:
            yield self._head(self._shape.piece_kind) | {"choices": [], "usage": self._usage(generations)}

    def _chunk(self, index: int, fields: Json, sampled: SampledTokens) -> Json:
        first, self._opened[index] = not self._opened[index], True
        prompt = self._prompt(index) if first else PromptFields({}, {})
        choice = {"index": index, "finish_reason": None, **fields, **prompt.choice, **self._extras(sampled)}
        return self._head(self._shape.piece_kind) | prompt.response | {"choices": [choice]}

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._options.model}

    def _prompt(self, index: int) -> PromptFields:
        wanted = self._options.token_ids
        return self._shape.prompt(list(self._asks[index].prompt_ids)) if wanted else PromptFields({}, {})

    def _extras(self, sampled: SampledTokens) -> Json:
        ids = {"token_ids": sampled.ids} if self._options.token_ids else {}
        wanted = self._options.logprobs and bool(sampled.ids)
        return {"logprobs": self._shape.logprobs(sampled) if wanted else None, **ids}

    def _usage(self, generations: Sequence[Generation]) -> Json:
        prompt = sum(len(ask.prompt_ids) for ask in self._asks[:: self._options.choices])
        sampled = sum(len(generation.ids) for generation in generations)
        cached = sum(generation.cached_tokens for generation in generations[:: self._options.choices])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class CompletionShape:
    """Text completions; special tokens are left out of the text."""

    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def stream(self, params: SamplingParams) -> TextStream:
        return TextStream(self._decode, params.stop)

    def text(self, generation: Generation, params: SamplingParams) -> str:
        return before_stop(self._decode(_without_end(generation, params)), params.stop)

    def prompt(self, ids: list[int]) -> PromptFields:
        return PromptFields({}, {"prompt_token_ids": ids})

    def whole(self, generation: Generation, params: SamplingParams) -> Json:
        return {"text": self.text(generation, params), "finish_reason": generation.finish}

    def piece(self, text: str, *, first: bool) -> Json:
        return {"text": text}

    def ending(self, generation: Generation, params: SamplingParams, stream: TextStream, *, first: bool) -> list[Json]:
        return [{"text": stream.finish(self.text(generation, params)), "finish_reason": generation.finish}]

    def logprobs(self, sampled: SampledTokens) -> Json:
        return {"tokens": [self._decode([i]) for i in sampled.ids], "token_logprobs": sampled.logprobs}


class ChatShape:
    """Chat completions. Calls are sent when the turn is complete, because only then they are known, and the text
    before them as it is sampled. `prefix` is what the chat template writes before an answer; it is no part of a JSON
    answer."""

    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: ChatCodec, tools: bool, prefix: str = "") -> None:
        self._codec, self._tools, self._prefix = codec, tools, prefix
        self._made: tuple[Generation, Json, str] | None = None  # the last message: its calls have ids of their own

    def stream(self, params: SamplingParams) -> TextStream:
        return TextStream(self._codec.decode, params.stop, self._settled if self._tools or self._prefix else None)

    def _settled(self, text: str) -> str:
        """The part of an unfinished text that the message begins with."""
        if self._prefix.startswith(text):
            return ""
        text = text.removeprefix(self._prefix)
        return self._codec.settled(text) if self._tools else text

    def text(self, generation: Generation, params: SamplingParams) -> str:
        text = before_stop(self._codec.decode(_without_end(generation, params)), params.stop)
        return text.removeprefix(self._prefix)

    def prompt(self, ids: list[int]) -> PromptFields:
        return PromptFields({"prompt_token_ids": ids}, {})

    def whole(self, generation: Generation, params: SamplingParams) -> Json:
        message, finish = self._message(generation, params)
        return {"message": message, "finish_reason": finish, **self._stop_reason(generation, params)}

    def _stop_reason(self, generation: Generation, params: SamplingParams) -> Json:
        """The stop string that ended the turn, under vLLM's name for it."""
        if not params.stop or generation.finish != "stop":
            return {}
        text = self._codec.decode(_without_end(generation, params))
        at, stop = min(((at, stop) for stop in params.stop if (at := text.find(stop)) >= 0), default=(-1, ""))
        return {"stop_reason": stop} if at >= 0 else {}

    def piece(self, text: str, *, first: bool) -> Json:
        return {"delta": {**({"role": "assistant"} if first else {}), "content": text}}

    def ending(self, generation: Generation, params: SamplingParams, stream: TextStream, *, first: bool) -> list[Json]:
        message, finish = self._message(generation, params)
        fields = self.piece(stream.finish(message["content"] or ""), first=first)
        if "tool_calls" in message:
            calls = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            fields["delta"] |= {**message, "content": fields["delta"]["content"] or None, "tool_calls": calls}
        return [fields, {"delta": {}, "finish_reason": finish, **self._stop_reason(generation, params)}]

    def logprobs(self, sampled: SampledTokens) -> Json:
        entries = []
        for token_id, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
            token = self._codec.decode([token_id])
            raw = None if "\ufffd" in token else list(token.encode())
            entries.append({"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": []})
        return {"content": entries, "refusal": None}

    def _message(self, generation: Generation, params: SamplingParams) -> tuple[Json, str]:
        """The message of a turn, and its finish reason, which is tool_calls if calls were parsed and
        nothing was cut."""
        if self._made is None or self._made[0] is not generation:
            self._made = (generation, *self._new_message(generation, params))
        return self._made[1:]

    def _new_message(self, generation: Generation, params: SamplingParams) -> tuple[Json, str]:
        if self._tools:
            message = self._codec.message(self._codec.parse(generation.ids))
            if "tool_calls" in message:
                calls = [_openai_call(call["function"]) for call in message["tool_calls"]]
                content = before_stop(message["content"], params.stop) or None
                # A reply that was cut may lack further calls, so the client must see that.
                finish = "length" if generation.finish == "length" else "tool_calls"
                return {**message, "content": content, "tool_calls": calls}, finish
        return {"role": "assistant", "content": self.text(generation, params)}, generation.finish


def chat_shape(codec: ChatCodec, constraint: Constraint) -> ChatShape:
    """The shape of replies under a constraint."""
    return ChatShape(codec, bool(codec.tools), answer_prefix(codec) if constraint.schema is not None else "")


def _openai_call(function: Json) -> Json:
    """A tool call in OpenAI's form, with a new id and the arguments as JSON text."""
    call = {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}


def _without_end(generation: Generation, params: SamplingParams) -> tuple[int, ...]:
    """The ids without the stop token that ended them."""
    ids = generation.ids
    return ids[:-1] if generation.finish == "stop" and ids and ids[-1] in params.stop_ids else ids


def call_key(name: str) -> str:
    """What the ids of one call have in common: chatcmpl-KEY, resp_KEY and msg_KEY."""
    return name.replace("_", "-").rpartition("-")[2]
