"""The agent loop `tool_agent`: the policy and its tools, or a simulated user, take turns until a stop reason applies.

All calls of a turn are run and answered in order; a malformed call is answered with the reason. A turn without calls is
answered by the row's simulated user, or ends the episode if there is none. The engine gets the segment itself as the
history (`multi_turn.history: append`) or the template's rendering of the parsed messages (`rerender`); with `rerender`
an episode may have several segments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rally.chat import Parsed
from rally.images.loading import ImageError, read_image
from rally.interactions import Closing
from rally.loops.base import AgentLoopOutput
from rally.loops.multi_turn import MultiTurnLoop, uncancelled
from rally.loops.registry import register
from rally.types import Message, StopReason, ToolResponse, ToolResult, ToolStatus


@register("tool_agent")
class ToolAgentLoop(MultiTurnLoop):
    """Plays an episode with tools and a simulated user, under all stop conditions of LoopSettings."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        self.begin_exchange(self.codec, self.task)
        self.session = self.toolbox.open(self.task, self.context.episode_id)
        self.user = self.interactions.open(self.task, self.context.episode_id)
        self.user_info: list[dict[str, Any]] = []
        self.tool_rewards: dict[str, float] = {}
        self.closing = Closing()
        self.failures = self.repeats = 0
        self.last_calls: list[str] = []
        self.tool_seconds = self.user_seconds = 0.0
        try:
            if self.user is not None:
                await self.user.start()
            reason = await self._converse(sampling_params)
        finally:
            if self.user is not None or self.session.holds_instances:
                await uncancelled(self._close())
        return self._output(reason)

    async def _close(self) -> None:
        try:
            self.tool_rewards = await self.session.close()
        finally:
            if self.user is not None:
                self.closing = await self.user.close()

    async def _turn(self, sampling_params: dict[str, Any]) -> StopReason | None:
        reason, parsed = await self._assistant_turn(sampling_params)
        if parsed is None:
            return reason
        if not parsed.tool_calls and self.user is None:
            return StopReason.STOP
        return await self._answer(parsed, reason)

    async def _answer(self, parsed: Parsed, limit: StopReason | None) -> StopReason | None:
        """Answer a turn with its tools or the user. The user also scores the last turn before the limit of assistant
        turns: without a score, the attempt would look failed."""
        if parsed.tool_calls:
            return limit or await self._tool_turn(parsed)
        if self._no_more_users():
            return limit
        return await self._user_turn(parsed, limit)

    async def _tool_turn(self, parsed: Parsed) -> StopReason | None:
        started = time.perf_counter()
        try:
            results = [self._shortened(await self._with_images(r)) for r in await self.session.run(parsed.tool_calls)]
        finally:
            self.tool_seconds += time.perf_counter() - started
        reason = self.exchange.add_observed(
            [tool_message(r, self.codec.patches is not None) for r in results],
            results,
            closed=parsed.closed,
            rerender=self.settings.history == "rerender",
            started=started,
        )
        return self._after_tools(results) or reason

    async def _user_turn(self, parsed: Parsed, limit: StopReason | None) -> StopReason | None:
        assert self.user is not None
        started = time.perf_counter()
        try:
            reply = await self.user.reply(self.exchange.messages)
        finally:
            self.user_seconds += time.perf_counter() - started
        self.user_info.append(reply.info)
        if reply.ends or limit is not None:
            self.exchange.add_closing(reply.text, reply.score, started)
            return StopReason.STOP if reply.ends else limit
        return self.exchange.add_observed(
            [{"role": "user", "content": reply.text}],
            (),
            closed=parsed.closed,
            rerender=self.settings.history == "rerender",
            started=started,
            score=reply.score,
        )

    async def _with_images(self, result: ToolResult) -> ToolResult:
        """The result with its images decoded and prepared for a vision model. A broken image is the tool's error."""
        response = result.response
        if not response.image or self.codec.patches is None:
            return result
        try:
            images = await asyncio.to_thread(lambda sources: [read_image(image) for image in sources], response.image)
            await self.codec.patches.prepare(images)
        except ImageError as problem:
            failed = ToolResponse(text=f"Error: {result.call.name} returned an image that cannot be shown: {problem}")
            return replace(result, status=ToolStatus.ERROR, response=failed)
        return replace(result, response=replace(response, image=images))

    def _shortened(self, result: ToolResult) -> ToolResult:
        """Apply max_tool_response_tokens: the head is kept, with a note for the model."""
        limit = self.settings.max_tool_response_tokens
        if not limit or result.is_hint:
            return result
        ids = self.tokenizer(result.response.text or "", add_special_tokens=False)["input_ids"]
        if len(ids) <= limit:
            return result
        kept = self.codec.decode(ids[:limit]) + "...(truncated)"
        return replace(result, response=replace(result.response, text=kept), truncated=True)

    def _after_tools(self, results: Sequence[ToolResult]) -> StopReason | None:
        settings = self.settings
        if settings.stop_on_tool_success and all(r.ok for r in results):
            return StopReason.TOOL_SUCCESS
        if settings.stop_on_correct and any(r.metrics.get("correct") is True for r in results):
            return StopReason.TOOL_SUCCESS
        self.failures = 0 if any(r.ok for r in results) else self.failures + 1
        if settings.max_tool_failures and self.failures >= settings.max_tool_failures:
            return StopReason.TOOL_FAILURES
        calls = [r.call.raw for r in results]
        self.repeats = self.repeats + 1 if calls == self.last_calls else 1
        self.last_calls = calls
        if settings.max_repeated_calls and self.repeats >= settings.max_repeated_calls:
            return StopReason.REPETITION
        return None

    def _output(self, reason: StopReason) -> AgentLoopOutput:
        exchange = self.exchange
        segment = exchange.segment
        extra: dict[str, Any] = {"tool_rewards": self.tool_rewards} if self.tool_rewards else {}
        if self.session.trouble:
            extra["tool_trouble"] = self.session.trouble
        extra["timings"] = {"generate": self.server.seconds, "tools": self.tool_seconds}
        if self.user is not None:
            extra["timings"]["interaction"] = self.user_seconds
            extra["interaction"] = {
                "name": self.user.user.name,
                "score": self.closing.score,
                "failures": self.closing.failures,
                "info": self.user_info,
            }
        if difference := self.tokenization_difference(reason):
            extra["tokenization_difference"] = difference
        return AgentLoopOutput(
            prompt_ids=segment.prompt_ids,
            response_ids=segment.response_ids,
            response_mask=segment.response_mask,
            segments=tuple(exchange.segments),
            turns=tuple(exchange.turns),
            stop_reason=reason,
            extra_fields=extra,
        )


def tool_message(result: ToolResult, vision: bool) -> Message:
    """The message for a tool result. With `vision`, its images come first, then its text."""
    text, images = result.response.text or "", result.response.image or ()
    parts = [
        *({"type": "image", "image": image} for image in images),
        *([{"type": "text", "text": text}] if text else []),
    ]
    return {
        "role": "tool",
        "name": result.call.name,
        "tool_call_id": result.call.id,
        "content": parts if images and vision else text,
    }
