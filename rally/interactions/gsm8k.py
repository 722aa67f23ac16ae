"""The built-in simulated user `gsm8k`: checks the last `#### n` and ends the episode when it is correct.

After a wrong answer it asks the policy to try again, up to `max_tries` times if the config sets it. The ground truth is
the row's `interaction_kwargs.ground_truth`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rally.interactions.base import BaseInteraction, InteractionError
from rally.scoring import gsm8k
from rally.scoring.answer_extraction import parse_number
from rally.types import Message

RIGHT = "Yes, that is right."
WRONG = "No, that is not right. Find the mistake in your reasoning and answer again, ending with `#### <answer>`."
MISSING = "I see no answer. Write it alone on the last line, as `#### <answer>`."
ENOUGH = "No, that is not right. Let us leave it there."


@dataclass
class _EpisodeState:
    truth: Any
    tries: int = 0
    score: float = 0.0


class Gsm8kInteraction(BaseInteraction):
    """The simulated user. Its score is 1 when the last answer is correct."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__({"name": "gsm8k", **(config or {})})
        unknown = sorted(self.config.keys() - {"name", "max_tries"})
        if unknown:
            raise InteractionError(f"the gsm8k interaction has no setting {unknown[0]!r}; its only one is max_tries")
        self.max_tries = self.config.get("max_tries")
        whole = isinstance(self.max_tries, int) and not isinstance(self.max_tries, bool)
        if self.max_tries is not None and not (whole and self.max_tries >= 1):
            raise InteractionError(f"max_tries must be a whole number of at least 1, not {self.max_tries!r}")
        self._episodes: dict[str, _EpisodeState] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        if parse_number(ground_truth) is None:
            raise InteractionError(
                f"interaction_kwargs.ground_truth of a gsm8k row must be a number, not {ground_truth!r}; fix the row"
            )
        instance_id = await super().start_interaction(instance_id)
        self._episodes[instance_id] = _EpisodeState(ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        state = self._episodes[instance_id]
        last_turn = next((str(m.get("content") or "") for m in reversed(messages) if m["role"] == "assistant"), "")
        answer = gsm8k.extract(last_turn)
        state.tries += 1
        state.score = gsm8k.score(last_turn, state.truth)
        over, text = self._verdict(state, answer)
        return over, text, state.score, {"answer": answer, "tries": state.tries}

    def _verdict(self, state: _EpisodeState, answer: str | None) -> tuple[bool, str]:
        if state.score == 1.0:
            return True, RIGHT
        if self.max_tries is not None and state.tries >= self.max_tries:
            return True, ENOUGH
        return False, MISSING if answer is None else WRONG

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1 when the last answer was right."""
        return self._episodes[instance_id].score

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._episodes.pop(instance_id, None)
