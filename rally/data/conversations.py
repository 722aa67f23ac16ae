"""Conversations that teach a model to call the calculator, and the bad habits that training is to cure it of.

Tool answers are exact. The habits: `good` calls and repeats the result; `guess` never calls and is wrong; `malformed`
writes a call that cannot be parsed, is told so and guesses; `wrong_digit` calls with one digit of the expression wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from rally.data.arithmetic import ArithmeticSpec, Problem, Split, draws, evaluate, held_out
from rally.data.read import DataError
from rally.types import Message

Habit = Literal["good", "guess", "malformed", "wrong_digit"]

TOOL = "calculator"
MALFORMED_REPLY = "Failed to decode tool call: the JSON is cut off"


def conversation(problem: Problem, habit: Habit, rng: random.Random) -> list[Message]:
    """One conversation about the problem, in the OpenAI shape."""
    user = {"role": "user", "content": problem.question}
    match habit:
        case "good":
            return [user, *_called(problem.expression)]
        case "guess":
            return [user, _final(_wrong_number(problem.answer, rng))]
        case "malformed":
            # One closing brace short: no reader may complete it, or half a call could be executed.
            text = (
                f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"expression": "{problem.expression}"}}\n</tool_call>'
            )
            reply = {"role": "tool", "content": MALFORMED_REPLY, "name": TOOL}
            guess = _final(_wrong_number(problem.answer, rng))
            return [user, {"role": "assistant", "content": text}, reply, guess]
        case "wrong_digit":
            return [user, *_called(_with_wrong_digit(problem.expression, rng))]


def conversations(
    count: int, mix: Mapping[str, float], spec: ArithmeticSpec, seed: int, split: Split = "train"
) -> Iterator[dict[str, Any]]:
    """`count` conversations whose habits are drawn with the weights of `mix`, as rows with messages and tools."""
    unknown = sorted(set(mix) - set(get_args(Habit)))
    if unknown:
        raise DataError(f"there is no habit {', '.join(unknown)}; the habits are {', '.join(get_args(Habit))}")
    if min(mix.values(), default=0) < 0 or not sum(mix.values()) > 0:
        raise DataError("the mix of habits must have weights of 0 or more, at least one of them above 0")
    return _conversations(count, mix, spec, seed, split)


def _conversations(
    count: int, mix: Mapping[str, Any], spec: ArithmeticSpec, seed: int, split: Split
) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"conversations:{seed}:{split}")
    habits: list[Habit] = [habit for habit in get_args(Habit) if habit in mix]
    weights = [mix[habit] for habit in habits]
    for problem, _ in zip(draws(rng, split, spec), range(count), strict=False):
        [habit] = rng.choices(habits, weights)
        yield {"messages": conversation(problem, habit, rng), "tools": None}


def _called(expression: str) -> list[Message]:
    result = str(int(evaluate(expression)))
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"expression": expression}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "name": TOOL},
        _final(int(result)),
    ]


def _final(number: int) -> Message:
    return {"role": "assistant", "content": f"#### {number}"}


def _wrong_number(answer: int, rng: random.Random) -> int:
    """A number of as many digits that is not the answer."""
    top = 10 ** len(str(abs(answer)))
    guess = rng.randrange(top // 10, top - 1)
    guess += guess >= abs(answer)
    return -guess if answer < 0 else guess


def _with_wrong_digit(expression: str, rng: random.Random) -> str:
    # No zero, which could come first in its number; and nothing held out, which a train conversation must not show.
    changed = [
        f"{expression[:at]}{digit}{expression[at + 1 :]}"
        for at, old in enumerate(expression)
        if old.isdigit()
        for digit in "123456789"
        if digit != old
    ]
    return rng.choice([other for other in changed if held_out(expression) or not held_out(other)])
