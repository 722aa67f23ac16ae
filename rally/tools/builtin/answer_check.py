r"""The built-in tools `calc_gsm8k_reward` and `calc_geo3k_reward`: the model checks its answer before it ends.

Each call returns the score of the answer and costs NO_GAIN unless it improves on the best so far. The reward of the
episode is its best score. GSM8K answers are numbers; a Geo3K answer may be written in `\boxed{}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

from rally.scoring import gsm8k, math_answers
from rally.scoring.answer_extraction import last_boxed
from rally.tools.base import BaseTool
from rally.tools.schema import ToolConfigError
from rally.types import ToolResponse

NO_GAIN = -0.05


class CheckedAnswer(NamedTuple):
    """The parsed answer and its score."""

    parsed: str | None
    score: float


class Gsm8kTool(BaseTool[Any]):
    """`calc_gsm8k_reward`. The row gives `create_kwargs.ground_truth`."""

    example: ClassVar[Mapping[str, Any] | None] = {"answer": "72"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._truth: dict[str, Any] = {}
        self._best: dict[str, float] = {}

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {
            "name": "calc_gsm8k_reward",
            "description": "Checks an answer to the problem: 1.0 when it is right, 0.0 when it is not.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "Your answer to the problem, a number"}},
                "required": ["answer"],
            },
        }

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise ToolConfigError(f"{self.name} needs tools_kwargs.{self.name}.create_kwargs.ground_truth in the row")
        instance_id = instance_id or str(uuid4())
        self._truth[instance_id] = ground_truth
        self._best[instance_id] = 0.0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        parsed, score = self.check_answer(str(parameters.get("answer", "")), self._truth[instance_id])
        improved = score > self._best[instance_id]
        self._best[instance_id] = max(score, self._best[instance_id])
        text = f"Current parsed answer={parsed!r} reward={score}"
        return ToolResponse(text=text), 0.0 if improved else NO_GAIN, {"score": score, "correct": score == 1.0}

    def check_answer(self, answer: str, truth: Any) -> CheckedAnswer:
        marked = answer if answer.startswith("#### ") else f"#### {answer}"
        return CheckedAnswer(gsm8k.extract(marked, "flexible"), gsm8k.score(marked, truth, "flexible"))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The best score of the episode."""
        return self._best[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._truth[instance_id], self._best[instance_id]


class Geo3kTool(Gsm8kTool):
    """`calc_geo3k_reward`: the same for geometry problems."""

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

    def check_answer(self, answer: str, truth: Any) -> CheckedAnswer:
        boxed = answer if last_boxed(answer) is not None else rf"\boxed{{{answer}}}"
        graded = math_answers.boxed(boxed, truth)
        return CheckedAnswer(graded.answer, float(graded.right))
