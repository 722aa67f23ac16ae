"""What the loops over several turns have in common: sampling a turn, the limits of turns and time, and the check of the
history against the template."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any

from rally.chat import ChatCodec, Parsed, TemplateError
from rally.loops.base import AgentLoopBase
from rally.loops.episode_builder import EpisodeBuilder
from rally.types import StopReason, Task


class MultiTurnLoop(AgentLoopBase):
    """A loop that samples a turn, lets something answer it, and repeats this until a stop reason applies."""

    one_history = True
    exchange: EpisodeBuilder
    began: float

    def begin_exchange(self, codec: ChatCodec, task: Task) -> None:
        """Encode the prompt of the task."""
        max_model_len = self.server.max_model_len
        self.exchange = EpisodeBuilder.start(codec, task, self.settings, max_model_len, self.context.began)
        self.began = time.perf_counter()

    @abstractmethod
    async def _turn(self, sampling_params: dict[str, Any]) -> StopReason | None:
        """Play one turn of the policy and its answer. Returns what ended the episode, if anything did."""

    async def _converse(self, sampling_params: dict[str, Any]) -> StopReason:
        """Play turns, each under its time limit, until the episode ends."""
        reason: StopReason | None = None
        while reason is None:
            reason = await self._in_time(self._turn(sampling_params))
        return reason

    async def _in_time(self, turn: Coroutine[Any, Any, StopReason | None]) -> StopReason | None:
        try:
            async with asyncio.timeout(self.context.turn_seconds(self.began)) as limit:
                return await turn
        except TimeoutError:
            if not limit.expired():  # a TimeoutError from inside is a failure and not this deadline
                raise
            return StopReason.DEADLINE

    async def _assistant_turn(self, sampling_params: dict[str, Any]) -> tuple[StopReason | None, Parsed | None]:
        """Sample a turn. Returns the parsed turn if it is complete, and a limit that it has reached."""
        exchange = self.exchange
        tokens_left = exchange.tokens_left
        if tokens_left <= 0:
            return exchange.limit_reached(), None
        started = time.perf_counter()
        params = {**sampling_params, "max_tokens": min(tokens_left, sampling_params.get("max_tokens", tokens_left))}
        generation = await self.server.generate(exchange.segment.ids, params, images=exchange.segment.images)
        parsed = exchange.add_sampled(generation, started)
        if generation.finish == "abort":
            return StopReason.CANCELLED, None
        if generation.finish == "length":
            return (exchange.limit_reached() if exchange.tokens_left <= 0 else StopReason.LENGTH), None
        return self._turn_limit(), parsed

    def _turn_limit(self) -> StopReason | None:
        limit = self.settings.max_assistant_turns
        if limit and self.exchange.count("assistant") >= limit:
            return StopReason.MAX_TURNS
        return StopReason.MAX_USER_TURNS if self._no_more_users() else None

    def _no_more_users(self) -> bool:
        """Whether the limit of tool and user turns is reached."""
        limit = self.settings.max_user_turns
        return bool(limit and self.exchange.count("tool", "user") >= limit)

    def tokenization_difference(self, reason: StopReason) -> str | None:
        """How a finished history differs from the template's full rendering, if the episode is to be checked. A
        rendering that fails is a difference too."""
        exchange, mode = self.exchange, self.settings.sanity_check
        check = self.context.check_tokens and exchange.whole_prompt and self.settings.history == "append"
        if not check or mode == "disable" or reason is not StopReason.STOP:
            return None
        try:
            return exchange.codec.sanity(exchange.segment.ids, exchange.as_sampled(), mode)
        except TemplateError as refusal:
            return str(refusal)


async def uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end even if the episode is cancelled, because what was opened must be closed."""
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
