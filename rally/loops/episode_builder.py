"""The growing record of one exchange: segments, turns and messages move together.

This is where sampled ids enter a Segment, and the only place. The budget of an exchange is what the policy sampled and
observed over all segments; the context window bounds each segment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rally.chat import ChatCodec, EncodedMessages, Parsed
from rally.loops.base import LoopError, LoopSettings
from rally.types import Generation, Message, Segment, StopReason, Task, ToolResult, Turn


def cut_prompt(prompt: EncodedMessages, most: int | None, side: str) -> tuple[int, ...]:
    """A prompt cut to `most` tokens on the named side (data.truncation); `error` never gets this far uncut."""
    ids = prompt.ids
    if most is None or len(ids) <= most:
        return ids
    if prompt.images and side != "error":
        raise LoopError(
            f"a prompt of {len(ids)} tokens exceeds data.max_prompt_length={most} and holds images, which cannot be "
            "cut; raise it, set data.filter_overlong_prompts=true, or lower max_pixels in data.mm_processor_kwargs"
        )
    if side == "error":
        raise LoopError(
            f"a prompt of {len(ids)} tokens exceeds data.max_prompt_length={most}; raise it, set "
            "data.filter_overlong_prompts=true, or choose data.truncation=left, right or middle"
        )
    if side == "left":
        return ids[-most:]
    return ids[:most] if side == "right" else ids[: most // 2] + ids[len(ids) - (most - most // 2) :]


@dataclass
class EpisodeBuilder:
    """One conversation in progress."""

    codec: ChatCodec
    messages: list[Message]
    segments: list[Segment]
    max_model_len: int
    response_length: int
    prompt_messages: int
    whole_prompt: bool = True  # False when data.truncation cut it
    began: float = 0.0  # by time.perf_counter; turns count from there
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
        """An exchange that has its prompt. `began`, by time.perf_counter, is what its turns count from."""
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
    def room(self) -> int:
        """How many tokens the policy may sample next: what budget and context window leave."""
        return min(self.response_length - self.used, self.max_model_len - len(self.segment.ids))

    def out_of_room(self) -> StopReason:
        """Which limit ended the exchange: the response budget or the context window."""
        budget_left = self.response_length - self.used
        return StopReason.LENGTH if budget_left <= self.max_model_len - len(self.segment.ids) else StopReason.CONTEXT

    def as_sampled(self) -> list[Message]:
        """The messages with each of the policy's turns as the text it sampled, well-formed or not: rendered, they tell
        whether the template agrees with the history, and nothing about how well the policy writes."""
        texts = iter(turn.text for turn in self.turns if turn.role == "assistant")
        later = (
            {"role": "assistant", "content": next(texts)} if m["role"] == "assistant" else m
            for m in self.messages[self.prompt_messages :]
        )
        return [*self.messages[: self.prompt_messages], *later]

    def count(self, *roles: str) -> int:
        return sum(turn.role in roles for turn in self.turns)

    def add_sampled(self, generation: Generation, started: float) -> Parsed:
        """Append what the policy sampled, and read it."""
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
        """Append tool or user messages, or say which limit they do not fit; then they are recorded with no tokens."""
        self.messages.extend(messages)
        if rerender:
            reason = self._observe_rerendered()
        else:
            reason = self._observe(self.codec.delta(list(messages), closed=closed))
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

    def add_closing(self, text: str, score: float | None, started: float, role: str = "user") -> None:
        """Record a last word of the user or a tool. Nothing is sampled after it: it has no tokens and is no message."""
        at = len(self.segment.response_ids)
        self.turns.append(
            Turn(
                role="tool" if role == "tool" else "user",
                text=text,
                segment=len(self.segments) - 1,
                start=at,
                end=at,
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
        """Follow the inference template: extend the segment if it still agrees, else open a new one."""
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
    """What a person reads of a message: its words, and a mark for each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
