"""The arithmetic demo: answers are right, test does not leak into train, behaviours match their names."""

import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.data import DataError, load_conversations, load_tasks
from rally.recipes.arithmetic.data import (
    ArithmeticSpec,
    Habit,
    conversation,
    conversations,
    evaluate,
    held_out,
    problems,
    rows,
    write_arithmetic,
    write_arithmetic_sft,
)

FORMS = ("{a}*{b}", "{a}*{b}+{c}", "{a}*{b}-{c}", "{a}+{b}*{c}")
WIDE = ArithmeticSpec(a=(2, 99), b=(2, 99), c=(2, 99), forms=FORMS, phrasings=("{expression}=?", "Find {expression}."))
MIX = {"good": 0.28, "guess": 0.58, "malformed": 0.07, "wrong_digit": 0.07}


def passing(rows, total, label):  # type: ignore[no-untyped-def]
    return rows


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 60))
def test_no_expression_is_in_both_splits(seed: int, count: int) -> None:
    train = {p.expression for p in problems(count, seed, "train", WIDE)}
    test = {p.expression for p in problems(count, seed + 1, "test", WIDE)}
    assert len(train) == len(test) == count, "all different"
    assert not any(map(held_out, train))
    assert all(map(held_out, test))


def test_answers_are_right_and_questions_ask_for_them() -> None:
    for expression, answer, question in problems(300, 0, "train", WIDE):
        assert eval(expression) == answer
        assert question in (f"{expression}=?", f"Find {expression}.")


def test_a_tenth_is_held_out() -> None:
    share = sum(held_out(f"{a}*{b}") for a in range(100) for b in range(100)) / 10_000
    assert 0.08 < share < 0.12


def test_problems_are_reproducible_and_grow_at_the_end() -> None:
    assert problems(50, 3, "train") == problems(80, 3, "train")[:50]
    assert problems(50, 3, "train") != problems(50, 4, "train")


def test_asking_for_more_than_there_are_is_an_error() -> None:
    small = ArithmeticSpec(a=(2, 9), b=(2, 9), forms=("{a}*{b}",))
    everything = sum(not held_out(f"{a}*{b}") for a in range(2, 10) for b in range(2, 10))
    assert len(problems(everything, 0, "train", small)) == everything
    with pytest.raises(DataError, match=f"only {everything} of 65 different train problems"):
        problems(65, 0, "train", small)
    single = ArithmeticSpec(a=(2, 2), b=(2, 2), forms=("{a}*{b}",))
    with pytest.raises(DataError, match="have no test problem"):
        problems(1, 0, "test", single)


@pytest.mark.parametrize("form", ["{a}/{b}", "{d}+{a}", "{a", "{}", "{a}**{b}", "abs({a})"])
def test_forms_that_cannot_be_calculated_are_refused(form: str) -> None:
    with pytest.raises(DataError, match="joined by"):
        ArithmeticSpec(forms=(form,))


def test_ranges_and_phrasings_are_checked() -> None:
    with pytest.raises(DataError, match="the range of b is 9 to 2"):
        ArithmeticSpec(b=(9, 2))
    with pytest.raises(DataError, match=r"every phrasing must contain \{expression\}"):
        ArithmeticSpec(phrasings=("What?",))


@pytest.mark.parametrize(
    ("expression", "value"), [("2+3*4", 14), ("(2+3)*-4", -20), ("0.2*50", 10), ("1/3", Fraction(1, 3))]
)
def test_evaluate_is_exact(expression: str, value: Fraction) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize("text", ["", "1/0", "2**3", "open('x')", "True", "007", "1;2"])
def test_evaluate_refuses_everything_else(text: str) -> None:
    with pytest.raises(ValueError):
        evaluate(text)


def test_rows_have_what_the_tool_loop_needs() -> None:
    [row] = rows(1, 0, "test")
    [problem] = problems(1, 0, "test")
    assert row == {
        "data_source": "rally/arithmetic",
        "prompt": [{"role": "user", "content": f"What is {problem.expression}?"}],
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": "test", "index": 0, "question": problem.question, "answer": str(problem.answer)},
    }


def final_number(messages: list[dict[str, str]]) -> int:
    match = re.fullmatch(r"#### (-?\d+)", messages[-1]["content"])
    assert match, messages[-1]
    return int(match[1])


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_habits_are_what_they_are_called(seed: int) -> None:
    rng = random.Random(seed)
    [problem] = problems(1, seed, "train", WIDE)

    def play(habit: Habit) -> list[dict[str, str]]:
        messages = conversation(problem, habit, rng)
        assert messages[0] == {"role": "user", "content": problem.question}
        return messages

    good = play("good")
    assert [m["role"] for m in good] == ["user", "assistant", "tool", "assistant"]
    [call] = good[1]["tool_calls"]
    expected = {"name": "calculator", "arguments": {"expression": problem.expression}}
    assert call == {"type": "function", "function": expected}
    assert good[2]["content"] == str(problem.answer)
    assert final_number(good) == problem.answer

    guess = play("guess")
    assert len(guess) == 2
    assert final_number(guess) != problem.answer
    assert len(str(final_number(guess))) == len(str(problem.answer)), "a plausible one"

    malformed = play("malformed")
    assert [m["role"] for m in malformed] == ["user", "assistant", "tool", "assistant"]
    body = malformed[1]["content"]
    assert body.count("{") == body.count("}") + 1
    assert "Failed to decode" in malformed[2]["content"]
    assert final_number(malformed) != problem.answer

    wrong = play("wrong_digit")
    other = wrong[1]["tool_calls"][0]["function"]["arguments"]["expression"]
    assert sum(a != b for a, b in zip(other, problem.expression, strict=True)) == 1
    assert wrong[2]["content"] == str(eval(other)), "the tool is exact even then"
    assert not held_out(other), "a train conversation shows no test expression"


def test_the_mix_sets_the_shares() -> None:
    made = list(conversations(2000, MIX, ArithmeticSpec(), seed=0))
    guesses = sum(len(c["messages"]) == 2 for c in made)
    assert abs(guesses / 2000 - 0.58) < 0.05
    assert made == list(conversations(2000, MIX, ArithmeticSpec(), seed=0))
    only = conversations(50, {"good": 1, "guess": 0}, ArithmeticSpec(), seed=0)
    assert all(len(c["messages"]) == 4 for c in only)


def test_a_wrong_mix_is_said_at_once() -> None:
    with pytest.raises(DataError, match="there is no habit lazy; the habits are good, guess, malformed, wrong_digit"):
        conversations(1, {"lazy": 1}, ArithmeticSpec(), seed=0)
    with pytest.raises(DataError, match="weights of 0 or more"):
        conversations(1, {"good": 0}, ArithmeticSpec(), seed=0)


def test_the_commands_write_files_that_load(tmp_path: Path) -> None:
    written = write_arithmetic(tmp_path, 30, 10, 0, passing)
    assert [(w.path.name, w.rows) for w in written] == [("train.parquet", 30), ("test.parquet", 10)]
    for file, split in zip(written, ("train", "test"), strict=True):
        tasks = load_tasks(file.path)
        assert [t.ground_truth for t in tasks] == [str(p.answer) for p in problems(file.rows, 0, split)]  # type: ignore[arg-type]
    [sft] = write_arithmetic_sft(tmp_path, 40, MIX, 0, passing)
    loaded = load_conversations(sft.path)
    expected = [tuple(c["messages"]) for c in conversations(40, MIX, ArithmeticSpec(), 0)]
    assert [c.messages for c in loaded] == expected
    assert loaded[0].tools is None


def test_progress_sees_every_row(tmp_path: Path) -> None:
    seen: list[tuple[str, int | None, int]] = []

    def counting(rows, total, label):  # type: ignore[no-untyped-def]
        listed = list(rows)
        seen.append((label, total, len(listed)))
        return listed

    write_arithmetic(tmp_path, 5, 3, 0, counting)
    assert seen == [("train", 5, 5), ("test", 3, 3)]
