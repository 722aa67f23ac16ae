"""The agent loop `single_turn_agent`: one prompt, one reply."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rally.loops.base import AgentLoopBase, AgentLoopOutput
from rally.loops.episode_builder import EpisodeBuilder
from rally.loops.registry import register
from rally.types import StopReason


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Samples one reply."""

    one_history = True

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        max_model_len = self.server.max_model_len
        exchange = EpisodeBuilder.start(self.codec, self.task, self.settings, max_model_len, self.context.began)
        reason = StopReason.CONTEXT
        if exchange.tokens_left > 0:
            started = time.perf_counter()
            params = {
                **sampling_params,
                "max_tokens": min(exchange.tokens_left, sampling_params.get("max_tokens", exchange.tokens_left)),
            }
            try:
                async with asyncio.timeout(self.context.turn_seconds(started)) as limit:
                    images = exchange.segment.images
                    generation = await self.server.generate(exchange.segment.ids, params, images=images)
                exchange.add_sampled(generation, started)
                cut = exchange.limit_reached() if exchange.tokens_left <= 0 else StopReason.LENGTH
                reason = {"stop": StopReason.STOP, "length": cut, "abort": StopReason.CANCELLED}[generation.finish]
            except TimeoutError:
                if not limit.expired():
                    raise
                reason = StopReason.DEADLINE
        segment = exchange.segment
        return AgentLoopOutput(
            prompt_ids=segment.prompt_ids,
            response_ids=segment.response_ids,
            response_mask=segment.response_mask,
            segments=(segment,),
            turns=tuple(exchange.turns),
            stop_reason=reason,
        )
