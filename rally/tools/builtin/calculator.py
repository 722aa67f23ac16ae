"""The built-in `calculator`: a parser for arithmetic expressions, and the tool.

`calculate` returns the value of an expression as text or raises CalculatorError. Rational arithmetic is exact:
`0.1 + 0.2` is `0.3` and `1/3*3` is `1`. Integers and short decimals are written in full, other values with 12
significant digits. The operations are in `calculator_math.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from rally.tools.base import BaseTool, instant
from rally.tools.builtin.calculator_math import (
    BINARY,
    CONSTANTS,
    FUNCTIONS,
    CalculatorError,
    Number,
    apply,
    call,
    factorial,
    negate,
    number_literal,
    power,
)
from rally.types import ToolResponse

MAX_LENGTH = 500
MAX_DEPTH = 50

_EQUALS = re.compile(r"\s*=\s*\??\s*$")
_SAME_SIGN = str.maketrans({"×": "*", "⋅": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": "pi"})
_MONEY = re.compile(r"[$€£](?=\s*\.?[0-9])")
_TIMES = re.compile(r"(?<=[0-9)%])(?<!^0)(?<![^0-9.]0)\s*[xX]\s*(?=[-.(0-9])")
_FRACTION_AND_EXPONENT = r"(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_PLAIN = re.compile(rf"[0-9]+{_FRACTION_AND_EXPONENT}|\.[0-9]+(?:[eE][+-]?[0-9]+)?")
_GROUPED = re.compile(rf"[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9]){_FRACTION_AND_EXPONENT}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SYMBOL = re.compile(r"\*\*|//|[-+*/%^!(),]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2}


class Token(NamedTuple):
    kind: str  # "number", "name", "symbol", "end"
    text: str


def evaluate(text: str) -> Number:
    """The exact value of `text`, or its float where it is irrational."""
    if len(text) > MAX_LENGTH:
        raise CalculatorError(f"the expression is longer than {MAX_LENGTH} characters")
    text = _EQUALS.sub("", text.translate(_SAME_SIGN)).strip()
    text = _TIMES.sub("*", _MONEY.sub("", text))
    if not text:
        raise CalculatorError("the expression is empty")
    return _Parser(list(_tokens(text))).whole()


def _tokens(text: str) -> Iterator[Token]:
    # `brackets` is a stack: whether each open bracket belongs to a function call, where a comma separates arguments.
    position, brackets, previous = 0, [False], Token("end", "")
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        token = _next_token(text, position, in_call=brackets[-1])
        if token.text == "(":
            brackets.append(previous.kind == "name")
        elif token.text == ")" and len(brackets) > 1:
            brackets.pop()
        position += len(token.text)
        previous = token
        yield token
    yield Token("end", "")


def _next_token(text: str, position: int, *, in_call: bool) -> Token:
    kinds = (("number", _GROUPED), ("number", _PLAIN), ("name", _NAME), ("symbol", _SYMBOL))
    for kind, pattern in kinds[1:] if in_call else kinds:
        if match := pattern.match(text, position):
            return Token(kind, match.group())
    raise CalculatorError(f"unexpected {text[position]!r}")


class _Parser:
    """A precedence-climbing parser that evaluates while it parses. Nesting deeper than MAX_DEPTH is an error."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    @property
    def ahead(self) -> Token:
        return self.tokens[self.position]

    def take(self) -> Token:
        token = self.ahead
        self.position += 1
        return token

    def accept(self, *symbols: str) -> str | None:
        return self.take().text if self.ahead.kind == "symbol" and self.ahead.text in symbols else None

    def expect(self, symbol: str) -> None:
        if self.accept(symbol) is None:
            raise self.unexpected(f"{symbol!r} is missing")

    def unexpected(self, expected: str) -> CalculatorError:
        where = "at the end" if self.ahead.kind == "end" else f"before {self.ahead.text[:20]!r}"
        return CalculatorError(f"{expected} {where}")

    def whole(self) -> Number:
        value = self.sum()
        if self.ahead.kind != "end":
            raise self.unexpected("an operator is missing")
        return value

    def sum(self, floor: int = 1) -> Number:
        """Left-associative operators of precedence `floor` and above."""
        value = self.unary()
        while self.ahead.kind == "symbol" and _PRECEDENCE.get(self.ahead.text, 0) >= floor:
            symbol = self.take().text
            value = apply(BINARY[symbol], value, self.sum(_PRECEDENCE[symbol] + 1))
        return value

    def unary(self) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalculatorError(f"the expression is nested more than {MAX_DEPTH} deep")
        sign = self.accept("-", "+")
        value = self.unary() if sign else self.power()
        self.depth -= 1
        return negate(value) if sign == "-" else value

    def power(self) -> Number:
        base = self.postfix()
        if self.accept("**", "^"):
            return apply(power, base, self.unary())
        return base

    def postfix(self) -> Number:
        value = self.atom()
        while True:
            if self.accept("!"):
                value = factorial(value)
            elif self.ahead.text == "%" and not self.operand_after_percent():
                self.take()
                value = apply(BINARY["/"], value, Fraction(100))
            else:
                return value

    def operand_after_percent(self) -> bool:
        after = self.tokens[self.position + 1]
        return after.kind in ("number", "name") or after.text == "("

    def atom(self) -> Number:
        if self.accept("("):
            value = self.sum()
            self.expect(")")
            return value
        if self.ahead.kind == "number":
            return number_literal(self.take().text)
        if self.ahead.kind == "name":
            return self.name()
        raise self.unexpected("a number is missing")

    def name(self) -> Number:
        name = self.take().text
        if self.accept("("):
            return call(name, self.arguments())
        if name in CONSTANTS:
            return CONSTANTS[name]
        raise CalculatorError(f"unknown name {name[:40]!r}")

    def arguments(self) -> list[Number]:
        if self.accept(")"):
            return []
        values = [self.sum()]
        while self.accept(","):
            values.append(self.sum())
        self.expect(")")
        return values


__all__ = ["Calculator", "CalculatorError", "calculate"]

SIGNIFICANT_DIGITS = 12
MAX_DECIMAL_PLACES = 30


@lru_cache(maxsize=4096)  # the episodes of a group often write the same expression
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
    """Rounded with Decimal, because a fraction may be outside the range of floats."""
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

    @instant
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return ToolResponse(text=calculate(str(parameters.get("expression", ""))))
