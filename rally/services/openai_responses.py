"""What was sampled becomes the JSON that OpenAI's clients read, whole or in pieces: put together, the pieces are the
whole, and token ids and log-probabilities are exactly the engine's."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rally.chat import ChatCodec
from rally.engines.embedded.request_slots import SampledTokens
from rally.services.admission import SamplingAsk
from rally.types import Generation, SamplingParams

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class TextStream:
    """The text of one answer as it grows. Only the last few tokens are decoded again for each new one."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._anchor = self._read = 0  # text up to token `_read` is out; decoding begins at `_anchor`, for its context
        self._text = ""
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        """What can be sent now that these tokens have come."""
        self._ids += ids
        before = self._decode(self._ids[self._anchor : self._read])
        text = self._decode(self._ids[self._anchor :])
        if not text.endswith(UNFINISHED):
            self._text += text[len(before) :]
            self._anchor, self._read = self._read, len(self._ids)
        return self._send(before_stop(self._text, self._stops), hold=True)

    def finish(self, whole: str) -> str:
        """What is left of the whole text."""
        return self._send(whole, hold=False)

    def _send(self, text: str, *, hold: bool) -> str:
        end = len(text) - self._held_back(text) if hold else len(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _held_back(self, text: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """What an answer shall hold beside its text."""

    model: str
    logprobs: bool
    token_ids: bool
    usage_in_stream: bool
    choices: int  # for each prompt


class PromptFields(NamedTuple):
    """What the answer says of its prompt beside the choices, and in each of them."""

    answer: Json
    choice: Json


class Shape(Protocol):
    """What differs between a text completion and a chat."""

    prefix: str
    kind: str
    piece_kind: str

    def stream(self, params: SamplingParams) -> TextStream | None:
        """None where a turn can only be told when it is whole."""
        ...

    def text(self, generation: Generation, params: SamplingParams) -> str: ...

    def prompt(self, ids: list[int]) -> PromptFields:
        """Where the ids of the prompt stand."""
        ...

    def whole(self, generation: Generation, params: SamplingParams) -> Json:
        """The choice's own fields, and its finish_reason."""
        ...

    def piece(self, text: str, *, first: bool) -> Json: ...

    def ending(self, generation: Generation, params: SamplingParams, rest: str, *, first: bool) -> Json:
        """`rest` is the text that no piece has told yet."""
        ...

    def logprobs(self, sampled: SampledTokens) -> Json: ...


class CompletionResponse:
    """One answer to several asks, `wishes.choices` of them for each prompt in turn."""

    def __init__(self, shape: Shape, wishes: ResponseOptions, asks: Sequence[SamplingAsk]) -> None:
        self._shape, self._wishes, self._asks = shape, wishes, asks
        self._id, self._created = f"{shape.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._streams = [shape.stream(ask.params) for ask in asks]
        self._told = [0] * len(asks)
        self._opened = [False] * len(asks)

    def whole(self, generations: Sequence[Generation]) -> Json:
        answer, choices = self._head(self._shape.kind), []
        for index, (ask, generation) in enumerate(zip(self._asks, generations, strict=True)):
            prompt = self._prompt(index)
            answer |= prompt.answer
            own = self._shape.whole(generation, ask.params)
            sampled = SampledTokens(list(generation.ids), list(generation.logprobs))
            choices.append({"index": index, **own, **prompt.choice, **self._extras(sampled)})
        return answer | {"choices": choices, "usage": self._usage(generations)}

    def pieces(self, index: int, sampled: SampledTokens) -> Iterator[Json]:
        """The `index`-th choice has grown."""
        stream = self._streams[index]
        if stream is None:
            return
        text = stream.push(sampled.ids)
        if text or self._wishes.token_ids or self._wishes.logprobs:
            self._told[index] += len(sampled.ids)
            yield self._chunk(index, self._shape.piece(text, first=not self._opened[index]), sampled)

    def ending(self, index: int, generation: Generation) -> Iterator[Json]:
        """The `index`-th choice has ended."""
        ask, stream, told = self._asks[index], self._streams[index], self._told[index]
        text = self._shape.text(generation, ask.params)
        rest = text if stream is None else stream.finish(text)
        sampled = SampledTokens(list(generation.ids[told:]), list(generation.logprobs[told:]))
        fields = self._shape.ending(generation, ask.params, rest, first=not self._opened[index])
        yield self._chunk(index, fields, sampled)

    def usage_piece(self, generations: Sequence[Generation]) -> Iterator[Json]:
        if self._wishes.usage_in_stream:
            yield self._head(self._shape.piece_kind) | {"choices": [], "usage": self._usage(generations)}

    def _chunk(self, index: int, fields: Json, sampled: SampledTokens) -> Json:
        first, self._opened[index] = not self._opened[index], True
        prompt = self._prompt(index) if first else PromptFields({}, {})
        choice = {"index": index, "finish_reason": None, **fields, **prompt.choice, **self._extras(sampled)}
        return self._head(self._shape.piece_kind) | prompt.answer | {"choices": [choice]}

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._wishes.model}

    def _prompt(self, index: int) -> PromptFields:
        wanted = self._wishes.token_ids
        return self._shape.prompt(list(self._asks[index].prompt_ids)) if wanted else PromptFields({}, {})

    def _extras(self, sampled: SampledTokens) -> Json:
        ids = {"token_ids": sampled.ids} if self._wishes.token_ids else {}
        return {"logprobs": self._shape.logprobs(sampled) if self._wishes.logprobs else None, **ids}

    def _usage(self, generations: Sequence[Generation]) -> Json:
        prompt = sum(len(ask.prompt_ids) for ask in self._asks[:: self._wishes.choices])
        sampled = sum(len(generation.ids) for generation in generations)
        cached = sum(generation.cached_tokens for generation in generations[:: self._wishes.choices])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class CompletionShape:
    """Text that goes on; special tokens are left out of it."""

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

    def ending(self, generation: Generation, params: SamplingParams, rest: str, *, first: bool) -> Json:
        return {"text": rest, "finish_reason": generation.finish}

    def logprobs(self, sampled: SampledTokens) -> Json:
        return {"tokens": [self._decode([i]) for i in sampled.ids], "token_logprobs": sampled.logprobs}


class ChatShape:
    """An assistant's turn. With tools it is told when it is whole: only then is it known what is a call."""

    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: ChatCodec, tools: bool) -> None:
        self._codec, self._tools = codec, tools

    def stream(self, params: SamplingParams) -> TextStream | None:
        return None if self._tools else TextStream(self._codec.decode, params.stop)

    def text(self, generation: Generation, params: SamplingParams) -> str:
        return before_stop(self._codec.decode(_without_end(generation, params)), params.stop)

    def prompt(self, ids: list[int]) -> PromptFields:
        return PromptFields({"prompt_token_ids": ids}, {})

    def whole(self, generation: Generation, params: SamplingParams) -> Json:
        message, finish = self._message(generation, params)
        return {"message": message, "finish_reason": finish}

    def piece(self, text: str, *, first: bool) -> Json:
        return {"delta": {**({"role": "assistant"} if first else {}), "content": text}}

    def ending(self, generation: Generation, params: SamplingParams, rest: str, *, first: bool) -> Json:
        message, finish = self._message(generation, params)
        fields = self.piece(rest, first=first)
        if "tool_calls" in message:
            calls = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            fields["delta"] |= {"content": message["content"], "tool_calls": calls}
        return fields | {"finish_reason": finish}

    def logprobs(self, sampled: SampledTokens) -> Json:
        entries = []
        for token_id, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
            token = self._codec.decode([token_id])
            raw = None if "\ufffd" in token else list(token.encode())
            entries.append({"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": []})
        return {"content": entries, "refusal": None}

    def _message(self, generation: Generation, params: SamplingParams) -> tuple[Json, str]:
        """The turn as a message, and why it ended: calls that can be understood end it as calls."""
        if self._tools:
            message = self._codec.message(self._codec.parse(generation.ids))
            if "tool_calls" in message:
                calls = [_openai_call(call["function"]) for call in message["tool_calls"]]
                return {**message, "content": message["content"] or None, "tool_calls": calls}, "tool_calls"
        return {"role": "assistant", "content": self.text(generation, params)}, generation.finish


def _openai_call(function: Json) -> Json:
    """A call with an id of its own; OpenAI has the arguments as JSON text."""
    written = {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": written}


def _without_end(generation: Generation, params: SamplingParams) -> tuple[int, ...]:
    """The ids without the stop token that ended them, which is no text."""
    ids = generation.ids
    return ids[:-1] if generation.finish == "stop" and ids and ids[-1] in params.stop_ids else ids
