r"""Guarantees: `calc_geo3k_reward` tells the model whether its answer to a geometry problem is right, and remembers its
best for the episode, as `calc_gsm8k_reward` does; what stands in a `\boxed{}` is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rally.scoring import mathematics
from rally.scoring.answers import last_boxed
from rally.tools.gsm8k import Gsm8kTool, Judged


class Geo3kTool(Gsm8kTool):
    example: ClassVar[Mapping[str, Any] | None] = {"answer": "45"}

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {
            "name": "calc_geo3k_reward",
            "description": "Checks an answer to the geometry problem: 1.0 when it is right, 0.0 when it is not.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "Your answer to the problem"}},
                "required": ["answer"],
            },
        }

    def judged(self, answer: str, truth: Any) -> Judged:
        boxed = answer if last_boxed(answer) is not None else rf"\boxed{{{answer}}}"
        graded = mathematics.boxed(boxed, truth)
        return Judged(graded.answer, float(graded.right))
