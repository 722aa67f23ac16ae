"""Builds the record of an episode: its segments, turns and messages grow together.

This is the only place where sampled ids enter a Segment. The response budget counts the sampled and observed tokens of
all segments; the context window limits each segment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rally.chat import ChatCodec, EncodedMessages, Parsed
from rally.loops.base import LoopError, LoopSettings
from rally.types import Generation, Message, Segment, StopReason, Task, ToolResult, Turn


def cut_prompt(prompt: EncodedMessages, max_tokens: int | None, side: str) -> tuple[int, ...]:
    """The prompt cut to `max_tokens` on one side (data.truncation). Raises LoopError for `error`, and for images."""
    ids = prompt.ids
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    if prompt.images and side != "error":
        raise LoopError(
            f"a prompt of {len(ids)} tokens exceeds data.max_prompt_length={max_tokens} and contains images, which "
            "cannot be cut; raise it, set data.filter_overlong_prompts=true, or lower max_pixels in "
            "data.mm_processor_kwargs"
        )
    if side == "error":
        raise LoopError(
            f"a prompt of {len(ids)} tokens exceeds data.max_prompt_length={max_tokens}; raise it, set "
            "data.filter_overlong_prompts=true, or choose data.truncation=left, right or middle"
        )
    if side == "left":
        return ids[-max_tokens:]
    return (
        ids[:max_tokens]
        if side == "right"
        else ids[: max_tokens // 2] + ids[len(ids) - (max_tokens - max_tokens // 2) :]
    )


@dataclass
class EpisodeBuilder:
    """One episode in progress."""

    codec: ChatCodec
    messages: list[Message]
    segments: list[Segment]
    max_model_len: int
    response_length: int
    prompt_messages: int
    whole_prompt: bool = True  # False when data.truncation cut it
    began: float = 0.0  # by time.perf_counter; `Turn.started` is relative to it
    turns: list[Turn] = field(default_factory=list)
    _observed_from: int = 0

    @classmethod
    def start(
        cls,
        codec: ChatCodec,
        task: Task,
        settings: LoopSettings,
        max_model_len: int,
        began: float | None = None,
    ) -> EpisodeBuilder:
        """A builder with the prompt of the task. `began` is by time.perf_counter."""
        full = codec.prompt(task.prompt)
        ids = cut_prompt(full, settings.prompt_length, settings.truncation)
        return cls(
            codec,
            list(task.prompt),
            [Segment(prompt_ids=ids, images=full.images)],
            max_model_len,
            settings.response_length,
            prompt_messages=len(task.prompt),
            whole_prompt=ids == full.ids,
            began=time.perf_counter() if began is None else began,
        )

    @property
    def segment(self) -> Segment:
        return self.segments[-1]

    @property
    def used(self) -> int:
        """Response tokens of all segments so far."""
        return sum(len(s.response_ids) for s in self.segments)

    @property
    def tokens_left(self) -> int:
        """How many tokens the policy may still sample, by the response budget and the context window."""
        return min(self.response_length - self.used, self.max_model_len - len(self.segment.ids))

    def limit_reached(self) -> StopReason:
        """Which limit is reached first: the response budget or the context window."""
        budget_left = self.response_length - self.used
        return StopReason.LENGTH if budget_left <= self.max_model_len - len(self.segment.ids) else StopReason.CONTEXT

    def as_sampled(self) -> list[Message]:
        """The messages with each assistant turn as its sampled text, well-formed or not. Their rendering shows whether
        the template agrees with the history, whatever the policy wrote."""
        texts = iter(turn.text for turn in self.turns if turn.role == "assistant")
        later = (
            {"role": "assistant", "content": next(texts)} if m["role"] == "assistant" else m
            for m in self.messages[self.prompt_messages :]
        )
        return [*self.messages[: self.prompt_messages], *later]

    def count(self, *roles: str) -> int:
        return sum(turn.role in roles for turn in self.turns)

    def add_sampled(self, generation: Generation, started: float) -> Parsed:
        """Append a sampled turn and parse it."""
        start = len(self.segment.response_ids)
        self.segments[-1] = self.segment.append_sampled(generation)
        parsed = self.codec.parse(generation.ids)
        self.messages.append(self.codec.message(parsed))
        self.turns.append(
            Turn(
                role="assistant",
                text=parsed.text,
                segment=len(self.segments) - 1,
                start=start,
                end=start + len(generation.ids),
                tool_calls=parsed.tool_calls,
                finish=generation.finish,
                cached_tokens=generation.cached_tokens,
                started=started - self.began,
                seconds=time.perf_counter() - started,
                queued=generation.queued_seconds,
                first_token=generation.first_token_seconds,
            )
        )
        return parsed

    def add_observed(
        self,
        messages: Sequence[Message],
        results: Sequence[ToolResult],
        *,
        closed: bool,
        rerender: bool,
        started: float,
        score: float | None = None,
    ) -> StopReason | None:
        """Append tool or user messages. If they exceed a limit, they are recorded without tokens and the limit is
        returned."""
        self.messages.extend(messages)
        if rerender:
            reason = self._observe_rerendered()
        else:
            sampled = self.segment.response_mask[-1:] == (1,)
            last_id = self.segment.response_ids[-1] if sampled else None
            reason = self._observe(self.codec.delta(list(messages), closed=closed, last_id=last_id))
        segment = self.segment
        text = "\n".join(_text(m["content"]) for m in messages)
        rewards = [reward for reward in (score, *(r.reward for r in results)) if reward is not None]
        self.turns.append(
            Turn(
                role="tool" if messages[0]["role"] == "tool" else "user",
                text=text,
                segment=len(self.segments) - 1,
                start=self._observed_from,
                end=len(segment.response_ids),
                tool_results=tuple(results),
                reward=sum(rewards) if rewards else None,
                started=started - self.began,
                seconds=time.perf_counter() - started,
            )
        )
        return reason

    def add_closing(
        self, text: str, score: float | None, started: float, role: str = "user", results: Sequence[ToolResult] = ()
    ) -> None:
        """Record a final message of the user or a tool. Nothing is sampled after it, so it gets no tokens."""
        at = len(self.segment.response_ids)
        self.turns.append(
            Turn(
                role="tool" if role == "tool" else "user",
                text=text,
                segment=len(self.segments) - 1,
                start=at,
                end=at,
                tool_results=tuple(results),
                reward=score,
                started=started - self.began,
                seconds=time.perf_counter() - started,
            )
        )

    def _observe(self, new: EncodedMessages) -> StopReason | None:
        self._observed_from = len(self.segment.response_ids)
        if self.used + len(new.ids) >= self.response_length:
            return StopReason.LENGTH
        if len(self.segment.ids) + len(new.ids) >= self.max_model_len:
            return StopReason.CONTEXT
        self.segments[-1] = self.segment.append_observed(*new)
        return None

    def _observe_rerendered(self) -> StopReason | None:
        """Extend the segment if the template's rendering still begins with it, else start a new segment."""
        full = self.codec.rerender(self.messages)
        known, seen = self.segment.ids, len(self.segment.images)
        if full.ids[: len(known)] == known and full.images[:seen] == self.segment.images:
            later = tuple(span.moved(-len(known)) for span in full.images[seen:])
            return self._observe(EncodedMessages(full.ids[len(known) :], later))
        self._observed_from = len(self.segment.response_ids)
        if len(full.ids) >= self.max_model_len:
            return StopReason.CONTEXT
        self.segments.append(Segment(prompt_ids=full.ids, images=full.images))
        self._observed_from = 0
        return None


def _text(content: str | list[dict[str, Any]]) -> str:
    """The text of a message, with `[image]` for each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
