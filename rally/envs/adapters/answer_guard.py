"""Keeps scorers of reasoning-gym from running what the policy wrote, and from computing without end.

Nine data sets pass an answer to Python's `eval`, or to sympy's `parse_expr`, which evaluates Python too. Such an answer
could run any program in the trainer, and `9**9**9` would stop it for good. In those modules, `eval` here takes only
literals, and `parse_expr` only arithmetic of bounded size. What else is written raises ValueError, which their scorers
take as a wrong answer. A formula that sympy does not simplify within a bound of CPU time is wrong too. `check_answer`
refuses answers with counts that a scorer would execute one by one, and NaN where it passes every comparison.
"""

from __future__ import annotations

import ast
import ctypes
import re
import threading
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib import import_module
from math import comb
from typing import Any, NamedTuple, TypeVar

import sympy

Result = TypeVar("Result")
LITERALS = {
    "binary_matrix": "algorithmic.binary_matrix",
    "n_queens": "games.n_queens",
    "spiral_matrix": "algorithmic.spiral_matrix",
    "string_insertion": "algorithmic.string_insertion",
}
"""Data sets whose scorers use `eval`, and their modules."""
FORMULAS = {
    "countdown": "games.countdown",
    "intermediate_integration": "algebra.intermediate_integration",
    "polynomial_multiplication": "algebra.polynomial_multiplication",
    "puzzle24": "games.puzzle24",
    "simple_integration": "algebra.simple_integration",
}
"""Data sets whose scorers use `parse_expr`, and their modules."""
FRACTIONS = {"coin_flip": "probability.coin_flip"}
"""Data sets whose scorers use `Fraction`, which writes out the zeros of 1e999999999, and their modules."""
COUNTED = ("rubiks_cube", "rush_hour")
"""Data sets whose scorers make a move as often as the answer says: `U1000000000` takes all memory."""
COMPARED = ("complex_arithmetic", "number_sorting")
"""Data sets whose scorers take NaN as close to every number."""
INTEGRALS = ("intermediate_integration", "simple_integration")
"""Data sets whose scorers take an unevaluated integral of the integrand as right."""
FUNCTIONS = frozenset(
    {
        *("Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log"),
        *("sec", "sin", "sinh", "sqrt", "tan", "tanh"),
    }
)
CONSTANT = "C"  # the name of the constant of integration
MOST_CHARACTERS = 20_000
MOST_BITS = 4096  # of a number that the formula could become
MOST_TERMS = 5000  # of the formula, expanded
MOST_SECONDS = 5.0  # of CPU time, to compare a formula with the right one


class Size(NamedTuple):
    """Upper bounds of what a formula can become: the bits of a number, and the terms of an expanded sum."""

    bits: int
    terms: int


def guard(name: str) -> None:
    """Guard the scorer of a data set, if it evaluates answers."""
    place = {**LITERALS, **FORMULAS, **FRACTIONS}.get(name)
    if place is None:
        return
    module: Any = import_module(f"reasoning_gym.{place}")
    if name in LITERALS:
        module.eval = ast.literal_eval  # found before the built-in function of this name
    if name in FRACTIONS:
        module.Fraction = parse_fraction
    if hasattr(module, "parse_expr"):
        module.parse_expr = parse_formula
    for alias in ("sp", "sympy"):
        if hasattr(module, alias):
            setattr(module, alias, _GuardedSympy())


def check_answer(name: str, answer: str) -> None:
    """Raise ValueError for an answer that a scorer must not get."""
    if name in COUNTED and re.search(r"\d{4,}", answer):
        raise ValueError("the answer repeats a move too often")
    if name in COMPARED and re.search("nan", answer, re.IGNORECASE):
        raise ValueError("NaN is no number")


class _OutOfTime(BaseException):
    """Not an Exception, which sympy may catch."""


def within_cpu_limit(work: Callable[[], Result], seconds: float) -> Result:
    """What `work` returns. Raises ValueError if this thread computes for longer than that. An exception in the thread
    may be swallowed by the code that it interrupts, so another thread raises it again and again until `work` ends."""
    thread = threading.get_ident()
    clock, lock, left = time.pthread_getcpuclockid(thread), threading.Lock(), threading.Event()
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        while not left.wait(0.1):
            with lock:
                if not left.is_set() and time.clock_gettime(clock) > end:
                    _raise_in(thread, _OutOfTime)

    def leave() -> None:
        while True:
            try:
                with lock:
                    left.set()
                    _raise_in(thread, None)  # one that has not been raised yet
                return
            except _OutOfTime:
                continue

    threading.Thread(target=watch, name="rally-cpu-limit", daemon=True).start()
    try:
        try:
            result = work()
        finally:
            leave()
        if time.clock_gettime(clock) <= end:
            return result
    except _OutOfTime:
        pass
    raise ValueError(f"the formula was not compared within {seconds:g} seconds of CPU time")


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next instruction; None takes it back."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class _GuardedSympy:
    """The package sympy with another `parse_expr`."""

    def __getattr__(self, name: str) -> Any:
        return parse_formula if name == "parse_expr" else getattr(sympy, name)


def parse_fraction(text: str) -> Fraction:
    if re.search(r"e[+-]?[\d_]{4,}", text, re.IGNORECASE):
        raise ValueError("the number is too large to compute")
    return Fraction(text)


def parse_formula(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """sympy's `parse_expr` of a formula of numbers, names and elementary functions. Raises ValueError for all else."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the formula has {len(text)} characters")
    names = [name for name in local_dict or {} if name != CONSTANT]
    try:
        tree = ast.parse(text.strip(), mode="eval")
        size_of(tree.body, names[0] if names else None)
        checked = ast.unparse(tree)  # what is evaluated is what was checked
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the formula cannot be read: {error}") from None
    return sympy.parse_expr(checked, local_dict=None if local_dict is None else dict(local_dict))


def size_of(node: ast.AST, variable: str | None = None) -> Size:
    """How large a formula can become. Raises ValueError if it is too large, or no formula. An unevaluated integral
    over `variable`, which the integration data sets have in some of their own answers, counts as one."""
    size = _size(node, variable)
    if size.bits > MOST_BITS or size.terms > MOST_TERMS:
        raise ValueError("the formula is too large to compute")
    return size


def _size(node: ast.AST, variable: str | None) -> Size:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and abs(number) < 1e300:
            return Size(int(abs(number)).bit_length() + 1, 1)
        case ast.Name(id=name) if not name.startswith("_"):
            return Size(2, 1)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return size_of(operand, variable)
        case ast.BinOp(left=left, op=operation, right=right):
            return _combined(operation, size_of(left, variable), size_of(right, variable))
        case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]) if function in FUNCTIONS:
            return Size(4 * size_of(argument, variable).bits, 1)
        case ast.Call(func=ast.Name(id="Integral"), args=[argument, ast.Name(id=over)], keywords=[]):
            if over == variable:
                return Size(size_of(argument, variable).bits, 1)
    raise ValueError(f"a formula has no {type(node).__name__}")


def _combined(operation: ast.operator, first: Size, second: Size) -> Size:
    match operation:
        case ast.Add() | ast.Sub():
            return Size(max(first.bits, second.bits) + 1, first.terms + second.terms)
        case ast.Mult() | ast.Div():
            return Size(first.bits + second.bits, first.terms * second.terms)
        case ast.Pow():
            most = 2**second.bits if second.bits < 16 else MOST_BITS + 1
            terms = 1 if first.terms == 1 else comb(first.terms + min(most, MOST_TERMS) - 1, first.terms - 1)
            return Size(first.bits * most, terms)
    raise ValueError(f"a formula has no {type(operation).__name__}")
