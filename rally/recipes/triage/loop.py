"""The agent loop of triage in two rounds: round 1 is the whole tool loop, round 2 one reply without tools.

Round 2 begins when the policy stops calling tools or reaches a turn limit. If round 1 ends for any other reason (token
budget, deadline, tool failures), there is no round 2 and no reward.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rally.loops import ToolAgentLoop, register
from rally.recipes.triage.data import LOOP, ROUND_2
from rally.recipes.triage.reward import KEYS
from rally.types import RallyError, StopReason

INTO_ROUND_2 = (StopReason.STOP, StopReason.MAX_TURNS, StopReason.MAX_USER_TURNS)


@register(LOOP)
class TwoRounds(ToolAgentLoop):
    """The loop. `question` is the user message between the rounds."""

    def __init__(self, question: str = ROUND_2) -> None:
        self.question = question

    @classmethod
    def check_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        if not isinstance(truth, Mapping) or not set(KEYS) <= set(truth):
            raise RallyError(
                f"the ground_truth of a triage row must hold {' and '.join(KEYS)}, not {truth!r}; make the rows again "
                "with: rally data triage"
            )

    async def _converse(self, sampling_params: dict[str, Any]) -> StopReason:
        reason = await super()._converse(sampling_params)
        if reason not in INTO_ROUND_2:
            return reason
        last = self.exchange.turns[-1]
        sampled = self.exchange.segment.response_ids[last.start : last.end]
        limit = self.exchange.add_observed(
            [{"role": "user", "content": self.question}],
            (),
            closed=self.codec.parse(sampled).closed,
            rerender=self.settings.history == "rerender",
            started=time.perf_counter(),
        )
        if limit:
            return limit
        return await self._in_time(self._verdict(sampling_params)) or StopReason.STOP

    async def _verdict(self, sampling_params: dict[str, Any]) -> StopReason | None:
        """Sample one reply. Calls in it are not run."""
        reason, parsed = await self._assistant_turn(sampling_params)
        return reason if parsed is None else StopReason.STOP
