"""Guarantees: the user of a GSM8K row says whether the last `#### n` is right, and ends the exchange when it is.

A wrong answer is sent back with a request to think again, at most `max_tries` times where the config sets it. The
ground truth is the row's `interaction_kwargs.ground_truth`.
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
class _Asked:
    truth: Any
    tries: int = 0
    score: float = 0.0


class Gsm8kInteraction(BaseInteraction):
    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__({"name": "gsm8k", **(config or {})})
        unknown = sorted(self.config.keys() - {"name", "max_tries"})
        if unknown:
            raise InteractionError(f"the gsm8k interaction has no setting {unknown[0]!r}; it has max_tries")
        self.max_tries = self.config.get("max_tries")
        whole = isinstance(self.max_tries, int) and not isinstance(self.max_tries, bool)
        if self.max_tries is not None and not (whole and self.max_tries >= 1):
            raise InteractionError(f"max_tries must be a whole number of at least 1, not {self.max_tries!r}")
        self._asked: dict[str, _Asked] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        if parse_number(ground_truth) is None:
            raise InteractionError(
                f"interaction_kwargs.ground_truth of a gsm8k row must be a number, not {ground_truth!r}; mend the row"
            )
        instance_id = await super().start_interaction(instance_id)
        self._asked[instance_id] = _Asked(ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        asked = self._asked[instance_id]
        said = next((str(m.get("content") or "") for m in reversed(messages) if m["role"] == "assistant"), "")
        answer = gsm8k.extract(said)
        asked.tries += 1
        asked.score = gsm8k.score(said, asked.truth)
        over, text = self._verdict(asked, answer)
        return over, text, asked.score, {"answer": answer, "tries": asked.tries}

    def _verdict(self, asked: _Asked, answer: str | None) -> tuple[bool, str]:
        if asked.score == 1.0:
            return True, RIGHT
        if self.max_tries is not None and asked.tries >= self.max_tries:
            return True, ENOUGH
        return False, MISSING if answer is None else WRONG

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1 when the last answer was right."""
        return self._asked[instance_id].score

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._asked.pop(instance_id, None)
