"""The tool loop: the policy talks, its tools and its user answer, until one named reason ends it.

All calls of a turn run and are answered in order; malformed ones are answered with the reason. A turn without calls is
answered by the row's simulated user, and ends the exchange where there is none. The history the engine is given is the
segment itself (`multi_turn.history: append`), or what the inference template makes of the parsed messages (`rerender`),
in which case the exchange may span several segments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from rally.chat import Parsed, TemplateError
from rally.images.loading import ImageError, read_image
from rally.interactions import Closing
from rally.loops.base import AgentLoopBase, AgentLoopOutput
from rally.loops.episode_builder import EpisodeBuilder
from rally.loops.registry import register
from rally.types import Message, StopReason, ToolResponse, ToolResult, ToolStatus


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Tools by configuration, a user by row; every stop condition of LoopSettings."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        most = self.server.engine.max_model_len
        self.exchange = EpisodeBuilder.start(self.codec, self.task, self.settings, most, self.context.began)
        self.session = self.toolbox.open(self.task, self.context.episode_id)
        self.user = self.interactions.open(self.task, self.context.episode_id)
        self.user_info: list[dict[str, Any]] = []
        self.tool_rewards: dict[str, float] = {}
        self.closing = Closing()
        self.failures = self.repeats = 0
        self.last_calls: list[str] = []
        self.began = time.perf_counter()
        self.tool_seconds = self.user_seconds = 0.0
        try:
            if self.user is not None:
                await self.user.start()
            reason = await self._converse(sampling_params)
        finally:
            if self.user is not None or self.session.holds_instances:
                await _to_its_end(self._close())
        return self._output(reason)

    async def _close(self) -> None:
        try:
            self.tool_rewards = await self.session.close()
        finally:
            if self.user is not None:
                self.closing = await self.user.close()

    async def _converse(self, sampling_params: dict[str, Any]) -> StopReason:
        reason: StopReason | None = None
        while reason is None:
            reason = await self._in_time(self._turn(sampling_params))
        return reason

    async def _turn(self, sampling_params: dict[str, Any]) -> StopReason | None:
        reason, parsed = await self._assistant_turn(sampling_params)
        return reason if parsed is None else await self._answer(parsed, reason)

    async def _in_time(self, turn: Coroutine[Any, Any, StopReason | None]) -> StopReason | None:
        """What ended the turn, which may be that its time was up."""
        try:
            async with asyncio.timeout(self.context.turn_seconds(self.began)) as limit:
                return await turn
        except TimeoutError:
            if not limit.expired():  # somebody else's timeout is a failure, not our deadline
                raise
            return StopReason.DEADLINE

    async def _answer(self, parsed: Parsed, limit: StopReason | None) -> StopReason | None:
        """What follows a turn: its tools' answers or the user's. A last answer that the limit of assistant turns lets
        nobody follow is still judged by the user: a try that is not scored would look like one that failed."""
        if parsed.tool_calls:
            return limit or await self._tool_turn(parsed)
        if self._no_more_users():
            return limit
        return await self._user_turn(parsed, limit)

    async def _assistant_turn(self, sampling_params: dict[str, Any]) -> tuple[StopReason | None, Parsed | None]:
        exchange = self.exchange
        room = exchange.room
        if room <= 0:
            return exchange.out_of_room(), None
        started = time.perf_counter()
        params = {**sampling_params, "max_tokens": min(room, sampling_params.get("max_tokens", room))}
        generation = await self.server.generate(exchange.segment.ids, params, images=exchange.segment.images)
        parsed = exchange.add_sampled(generation, started)
        if generation.finish == "abort":
            return StopReason.CANCELLED, None
        if generation.finish == "length":
            return (exchange.out_of_room() if exchange.room <= 0 else StopReason.LENGTH), None
        if not parsed.tool_calls and self.user is None:
            return StopReason.STOP, None
        return self._turn_limit(), parsed

    def _turn_limit(self) -> StopReason | None:
        most = self.settings.max_assistant_turns
        if most and self.exchange.count("assistant") >= most:
            return StopReason.MAX_TURNS
        return StopReason.MAX_USER_TURNS if self._no_more_users() else None

    def _no_more_users(self) -> bool:
        most = self.settings.max_user_turns
        return bool(most and self.exchange.count("tool", "user") >= most)

    async def _tool_turn(self, parsed: Parsed) -> StopReason | None:
        started = time.perf_counter()
        try:
            results = [self._shortened(await self._seen(r)) for r in await self.session.run(parsed.tool_calls)]
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

    async def _seen(self, result: ToolResult) -> ToolResult:
        """With its images ready to be shown to a policy that sees; one that cannot be shown is the tool's error."""
        response = result.response
        if not response.image or self.codec.patches is None:
            return result
        try:
            images = await asyncio.to_thread(lambda given: [read_image(image) for image in given], response.image)
            await self.codec.patches.prepare(images)
        except ImageError as problem:
            told = ToolResponse(text=f"Error: {result.call.name} returned an image that cannot be shown: {problem}")
            return replace(result, status=ToolStatus.ERROR, response=told)
        return replace(result, response=replace(response, image=images))

    def _shortened(self, result: ToolResult) -> ToolResult:
        """Apply the token limit of a tool answer; the head is kept and the model is told."""
        most = self.settings.max_tool_response_tokens
        if not most:
            return result
        ids = self.tokenizer(result.response.text or "", add_special_tokens=False)["input_ids"]
        if len(ids) <= most:
            return result
        kept = self.codec.decode(ids[:most]) + "...(truncated)"
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
        check = self.context.check_tokens and exchange.whole_prompt and self.settings.history == "append"
        if check and self.settings.sanity_check != "disable" and reason is StopReason.STOP:
            difference = self._difference()
            if difference:
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

    def _difference(self) -> str | None:
        """Where the history reads unlike the full rendering; a rendering the template refuses is a difference too."""
        try:
            return self.codec.sanity(self.exchange.segment.ids, self.exchange.as_sampled(), self.settings.sanity_check)
        except TemplateError as refusal:
            return str(refusal)


def tool_message(result: ToolResult, sees: bool) -> Message:
    """What the policy is told of a result: its images first, as people write them, then its text."""
    text, images = result.response.text or "", result.response.image or ()
    parts = [
        *({"type": "image", "image": image} for image in images),
        *([{"type": "text", "text": text}] if text else []),
    ]
    return {
        "role": "tool",
        "name": result.call.name,
        "tool_call_id": result.call.id,
        "content": parts if images and sees else text,
    }


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` even when the episode is being cancelled: what was opened must be closed."""
    closing = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not closing.done():
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError as again:
            cancelled = again
    if cancelled is not None:
        raise cancelled
    closing.result()
