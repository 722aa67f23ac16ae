"""The operations and functions of the calculator.

Each returns a finite real number of bounded size or raises CalculatorError. A value is a Fraction as long as it is
rational, otherwise a float. Sizes are checked before the computation, so `9**9**9` costs nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from rally.types import RallyError

Number = Fraction | float

MAX_BITS = 4096  # of a numerator or denominator: about 1,200 digits
MAX_FACTORIAL = 500
MAX_COMB_BITS = 1024  # math.comb takes milliseconds beyond this, and an expression may contain many
MAX_EXPONENT = 1000  # of a literal such as 1e5, and of the places of round()


class CalculatorError(RallyError):
    """The expression cannot be evaluated. The text is a short reason."""


TOO_LARGE = "the numbers become too large"


def bounded(value: Number | int) -> Number:
    """`value` as a Number. Raises CalculatorError if it is infinite or too large."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculatorError(TOO_LARGE)
        return value
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError(TOO_LARGE)
    return value


def apply(function: Callable[..., Number | int], *values: Number) -> Number:
    """`function` of `values`. Arithmetic errors become CalculatorErrors."""
    try:
        return bounded(function(*values))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError(TOO_LARGE) from None
    except CalculatorError:
        raise
    except ValueError:
        raise CalculatorError("there is no real result, as for the root or logarithm of a negative number") from None


def number_literal(written: str) -> Number:
    if written.isdigit():
        return bounded(Fraction(int(written)))
    mantissa, _, exponent = written.lower().replace(",", "").partition("e")
    if len(exponent) > 6 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise CalculatorError(f"the exponent of {written[:20]} is too large")
    return bounded(Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or 0))


def negate(value: Number) -> Number:
    return -value


def power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _integer_power(base, exponent.numerator)
    if base < 0:
        raise CalculatorError("a negative number has no real power with a fractional exponent")
    if exponent == Fraction(1, 2):
        return square_root(base)
    return float(float(base) ** float(exponent))


def _integer_power(base: Number, exponent: int) -> Number:
    if isinstance(base, Fraction) and abs(base) not in (0, 1):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent) > MAX_BITS:
            raise CalculatorError(TOO_LARGE)
    return base**exponent


def square_root(value: Number) -> Number:
    """Exact when `value` is the square of a rational."""
    if isinstance(value, Fraction) and value >= 0:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
    return math.sqrt(value)


def whole_number(value: Number, wanted_by: str) -> int:
    if value != int(value):
        raise CalculatorError(f"{wanted_by} needs a whole number")
    return int(value)


def factorial(value: Number) -> Number:
    n = whole_number(value, "factorial")
    if not 0 <= n <= MAX_FACTORIAL:
        raise CalculatorError(f"factorial needs a number from 0 to {MAX_FACTORIAL}")
    return Fraction(math.factorial(n))


def _comb(n: Number, k: Number) -> int:
    top, chosen = whole_number(n, "comb"), whole_number(k, "comb")
    if top < 0 or chosen < 0:
        raise CalculatorError("comb needs numbers that are not negative")
    if min(top, top.bit_length() * min(chosen, abs(top - chosen))) > MAX_COMB_BITS:
        raise CalculatorError(TOO_LARGE)
    return math.comb(top, chosen)


def _gcd(*values: Number) -> int:
    return math.gcd(*(whole_number(value, "gcd") for value in values))


def _round(value: Number, places: Number = Fraction(0)) -> Number:
    """Halves go to the even neighbour, as in Python, but on the exact decimal: round(2.675, 2) is 2.68."""
    count = whole_number(places, "round")
    if abs(count) > MAX_EXPONENT:
        raise CalculatorError("round has too many places")
    return round(Fraction(value), count)


def _log(value: Number, base: Number | None = None) -> float:
    if base is None:
        return math.log(value)
    exact = {2: math.log2, 10: math.log10}.get(int(base)) if base == int(base) else None
    return exact(value) if exact else math.log(value, base)


def _trigonometric(function: Callable[[float], float]) -> Callable[[Number], float]:
    """Rounded to 15 places, because the float nearest to pi is not pi: sin(pi) should be 0."""
    return lambda value: round(function(float(value)), 15)


class Function(NamedTuple):
    compute: Callable[..., Number | int]
    least: int = 1
    most: int = 1


ANY = 1000

FUNCTIONS: dict[str, Function] = {
    "sqrt": Function(square_root),
    "abs": Function(abs),
    "round": Function(_round, 1, 2),
    "min": Function(lambda *values: min(values), 1, ANY),
    "max": Function(lambda *values: max(values), 1, ANY),
    "floor": Function(math.floor),
    "ceil": Function(math.ceil),
    "log": Function(_log, 1, 2),
    "ln": Function(_log),
    "log2": Function(math.log2),
    "log10": Function(math.log10),
    "exp": Function(math.exp),
    "sin": Function(_trigonometric(math.sin)),
    "cos": Function(_trigonometric(math.cos)),
    "tan": Function(_trigonometric(math.tan)),
    "factorial": Function(factorial),
    "gcd": Function(_gcd, 1, ANY),
    "comb": Function(_comb, 2, 2),
}

CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}

BINARY: dict[str, Callable[[Number, Number], Number | int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def call(name: str, arguments: Sequence[Number]) -> Number:
    if name not in FUNCTIONS:
        raise CalculatorError(f"unknown function {name[:40]!r}; known are {', '.join(sorted(FUNCTIONS))}")
    function = FUNCTIONS[name]
    if not function.least <= len(arguments) <= function.most:
        wanted = str(function.least) if function.least == function.most else f"{function.least} or more"
        hint = "; inside a function a comma separates arguments, so write 1234 for 1,234" if arguments else ""
        raise CalculatorError(f"{name} takes {wanted} argument(s), not {len(arguments)}{hint}")
    return apply(function.compute, *arguments)
