"""Converts an Episode into a trace: a tree of timed spans for the episode, its turns and their tool calls.

A pure function. Together the spans hold everything of the Episode: messages, texts, token ids, mask, log-probabilities,
calls, rewards and stop reason. Values are JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rally.track.run_folder.episode_json import plain
from rally.types import Episode, Message, StopReason, ToolCall, ToolResult, Turn

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

AGENT, MODEL, TOOL, STEP = "AGENT", "LLM", "TOOL", "CHAIN"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A timed operation. `start` and `end` are Unix seconds; `parent` is the index of an earlier span."""

    name: str
    kind: str
    start: float
    end: float
    parent: int | None = None
    inputs: Any = None
    outputs: Any = None
    attributes: Json = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Trace:
    """One episode as a trace. `tags` are searchable; `spans` begin with the root."""

    id: int  # 128 bits
    name: str
    tags: dict[str, str]
    spans: tuple[Span, ...]

    def span_id(self, place: int) -> int:
        """A 64-bit id, unique across traces, because some backends look spans up without their trace."""
        return _number(f"{self.id:032x}/{place}", 8)


def trace_of(episode: Episode, *, run: str, sample: int, decode: Decode | None = None) -> Trace:
    """The trace of an episode. `run` is part of its id and a tag. `sample` is its number within its group. `decode`
    adds token ids as text."""
    began = episode.timings.get("started", 0.0)
    turns = list(_turns(episode, began, decode))
    end = max([began + episode.timings.get("total", 0.0), *(span.end for span in turns)])
    tags = {
        "rally.run": run,
        "step": str(episode.step),
        "validate": str(episode.validate).lower(),
        "sample_index": str(episode.task.extra_info.get("index", episode.task.id)),
        "rollout_n": str(sample),
        "episode": episode.id,
        "group": episode.group,
        "data_source": episode.task.data_source,
        "stop_reason": episode.stop_reason.value,
        "reward": str(episode.reward),
        "num_turns": str(episode.num_turns),
    }
    identity = f"{run}/{episode.validate}/{episode.step}/{episode.id}"
    name = f"{'validation' if episode.validate else 'train'} {episode.step} {episode.task.id}"
    return Trace(_number(identity, 16), name, tags, (_root(episode, began, end, decode), *turns))


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest())


def _root(episode: Episode, start: float, end: float, decode: Decode | None) -> Span:
    replies = [turn.text for turn in episode.turns if turn.role == "assistant"]
    segments = [
        {"prompt_ids": s.prompt_ids, "response_ids": s.response_ids, "response_mask": s.response_mask}
        | ({"prompt_text": decode(s.prompt_ids), "response_text": decode(s.response_ids)} if decode else {})
        for s in episode.segments
    ]
    return Span(
        name="episode",
        kind=AGENT,
        start=start,
        end=end,
        inputs={"messages": _messages(episode.task.prompt)},
        outputs={
            "text": replies[-1] if replies else "",
            "reward": _json(episode.reward),
            "reward_info": _json(episode.reward_info),
            "stop_reason": episode.stop_reason.value,
        },
        attributes={
            "task": episode.task.id,
            "ground_truth": _json(episode.task.ground_truth),
            "segments": segments,
            "timings": _json(episode.timings),
            "seed": _json(episode.seed),
            "baseline": episode.baseline,
            "extra": _json(episode.extra),
        },
        error=episode.error if episode.stop_reason is StopReason.ERROR else None,
    )


def _turns(episode: Episode, began: float, decode: Decode | None) -> Iterator[Span]:
    """Each turn, followed by its tool calls."""
    messages: list[Json] = _messages(episode.task.prompt)
    place = 0
    for turn in episode.turns:
        place += 1
        start = began + turn.started
        attributes = _tokens(episode, turn, decode)
        if turn.role == "assistant":
            yield _sampled(turn, start, messages, attributes)
            messages = []
            continue
        messages.append({"role": turn.role, "content": turn.text})
        kind, name = (TOOL, "tools") if turn.role == "tool" else (STEP, "user")
        own = place
        yield Span(
            name=name,
            kind=STEP if turn.tool_results else kind,
            start=start,
            end=start + turn.seconds,
            parent=0,
            outputs={"text": turn.text, "reward": _json(turn.reward)},
            attributes=attributes | ({"tool_answers": _answers(turn)} if turn.tool_answers else {}),
        )
        for result in turn.tool_results:
            place += 1
            yield _called(result, start, own)


def _sampled(turn: Turn, start: float, messages: list[Json], attributes: Json) -> Span:
    """An assistant turn, with the messages since the previous one as its inputs."""
    return Span(
        name="generate",
        kind=MODEL,
        start=start,
        end=start + turn.seconds,
        parent=0,
        inputs={"messages": messages},
        outputs={"role": "assistant", "content": turn.text, "tool_calls": [_call(c) for c in turn.tool_calls]},
        attributes=attributes
        | {
            "finish": turn.finish,
            "cached_tokens": turn.cached_tokens,
            "queued_seconds": turn.queued,
            "first_token_seconds": turn.first_token,
            "reward": _json(turn.reward),
        },
    )


def _called(result: ToolResult, start: float, parent: int) -> Span:
    return Span(
        name=result.call.name or "tool",
        kind=TOOL,
        start=start,
        end=start + result.queued + result.seconds,
        parent=parent,
        inputs=_json(result.call.arguments) if result.call.error is None else {"raw": result.call.raw},
        outputs={"text": result.response.text, "images": len(result.response.image or ())},
        attributes={
            "call": _call(result.call),
            "status": result.status.value,
            "reward": _json(result.reward),
            "metrics": _json(result.metrics),
            "queued_seconds": result.queued,
            "seconds": result.seconds,
            "truncated": result.truncated,
            "cached": result.cached,
        },
        error=None if result.ok else result.call.error or result.response.text or result.status.value,
    )


def _tokens(episode: Episode, turn: Turn, decode: Decode | None) -> Json:
    """The tokens of a turn, with mask, log-probabilities and weight versions."""
    segment = episode.segments[turn.segment]
    owned = slice(turn.start, turn.end)
    ids = segment.response_ids[owned]
    tokens = {
        "segment": turn.segment,
        "start": turn.start,
        "ids": ids,
        "mask": segment.response_mask[owned],
        "logprobs": _json(list(segment.response_logprobs[owned])),
        "weight_versions": sorted({s.version for s in segment.spans if s.start < turn.end and s.end > turn.start}),
    }
    return tokens | ({"tokens_text": decode(ids)} if decode else {})


def _json(value: Any) -> Any:
    """JSON as in the run folder, except that texts with lone surrogates stay texts."""
    return _with_texts(plain(value))


def _with_texts(value: Any) -> Any:
    match value:
        case {"$str": codes}:
            return "".join(map(chr, codes))
        case dict():
            return {key: _with_texts(item) for key, item in value.items()}
        case list():
            return [_with_texts(item) for item in value]
    return value


def _messages(messages: Iterable[Message]) -> list[Json]:
    return [_json(message) for message in messages]


def _answers(turn: Turn) -> list[Json]:
    """The tool messages of an agent, with the calls that they answer."""
    return [
        {"text": _json(one.text), "call": None if one.call is None else _call(one.call)} for one in turn.tool_answers
    ]


def _call(call: ToolCall) -> Json:
    return {"name": call.name, "arguments": _json(call.arguments), "id": call.id, "raw": call.raw, "error": call.error}
