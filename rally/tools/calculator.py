"""Guarantees: `calculate` answers any expression with its value as text, or with a CalculatorError that says why not.

Rationals are exact: `0.1 + 0.2` is `0.3` and `1/3*3` is `1`. A value is written in full when it is whole or a short
decimal, else with 12 significant digits. What may be written is said in `expression.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from rally.tools.base import BaseTool, at_once
from rally.tools.expression import evaluate
from rally.tools.mathematics import FUNCTIONS, CalculatorError, Number
from rally.types import ToolResponse

__all__ = ["Calculator", "CalculatorError", "calculate"]

SIGNIFICANT_DIGITS = 12
MAX_DECIMAL_PLACES = 30


@lru_cache(maxsize=4096)  # the episodes of a group ask the same question, and most of them write the same expression
def calculate(expression: str) -> str:
    """The value of `expression` as text."""
    return _written(evaluate(expression))


def _written(value: Number) -> str:
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.{SIGNIFICANT_DIGITS}g}"
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**MAX_DECIMAL_PLACES
    if scaled.denominator == 1:
        return f"{Decimal(scaled.numerator).scaleb(-MAX_DECIMAL_PLACES, Context(prec=2000)):f}".rstrip("0")
    return _rounded(value)


def _rounded(value: Fraction) -> str:
    """Through Decimal, because a long fraction may lie outside the range of floats."""
    nearest = Context(prec=SIGNIFICANT_DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    return str(nearest.normalize()).lower()


class Calculator(BaseTool[Any]):
    """The built-in `calculator`: one argument, `expression`."""

    example: ClassVar[Mapping[str, Any] | None] = {"expression": "6*7"}

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluates an arithmetic expression exactly and returns its value.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "expression": {
                            "type": "string",
                            "description": f"Numbers, + - * / // % ** ( ), and {', '.join(FUNCTIONS)}; e.g. 12*(3+4)/7",
                        }
                    },
                    "required": ["expression"],
                },
            },
        }

    @at_once
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return ToolResponse(text=calculate(str(parameters.get("expression", ""))))
