"""Mathematical answers: how they are extracted, which notations are equal, and their scores."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.scoring import math_answers
from rally.scoring.answer_extraction import last_boxed, last_line, last_tagged
from rally.scoring.math_answers import same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} or rather \fbox{2}", "2"),
        (r"\boxed{\frac{1}{2}} and }", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} but \boxed{2", None),  # the last one was cut off, and the first was taken back
        ("no box", None),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 5", "5"),
        ("answer : 5\nAnswer: 6 apples\nbye", "6 apples"),
        (r"**Answer:** $\boxed{12}$", "12"),
        ("The answer is 5", None),
    ],
)
def test_the_last_answer_line_is_the_answer(text: str, answer: str | None) -> None:
    assert last_line(text) == answer


def test_the_last_tag_is_the_answer() -> None:
    assert last_tagged("<answer>a</answer> <answer> b </answer>") == "b"
    assert last_tagged("<answer>a") is None and last_tagged("a</answer>") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", "1/2"),
        (r"-\tfrac{3}{4}", "-.75"),
        ("1,234", "1234"),
        (r"1{,}234.0", "1234"),
        (r"\$5", "5.00"),
        (r"50\%", "50"),
        (r"90^\circ", "90^{\\circ}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("x = 7", "7"),
        (r"12\text{ cm}", "12"),
        ("12 square feet", "12"),
        (r"\text{east}", "east"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("3.", "3"),
        (72, "72"),
    ],
)
def test_spellings_of_one_answer(one: object, other: object) -> None:
    assert same_answer(one, other) and same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5", "6"),
        ("5 or 6", "5"),
        ("", ""),
        ("1/0", "0"),
        ("x+1", "x-1"),
        ("(1,2)", "(2,1)"),
        ("5 pi", "5"),
        ("12", "1,2"),
    ],
)
def test_different_answers(one: str, other: str) -> None:
    assert not same_answer(one, other)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9))
def test_a_fraction_is_one_answer_however_it_is_written(top: int, bottom: int) -> None:
    spellings = [f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"$x = \dfrac{{{3 * top}}}{{{3 * bottom}}}$."]
    assert all(same_answer(one, other) for one in spellings for other in spellings)
    assert same_answer(f"{top / 100:.2f}", f"{top}/100") and not same_answer(f"{top}/{bottom}", f"{top + 1}/{bottom}")


def test_an_enormous_answer_costs_no_time() -> None:
    start = time.perf_counter()
    for text in ("9" * 10**6, r"\frac{" * 10**5, "1e999999999", r"\boxed{" * 10**5, "$" * 10**6):
        assert not same_answer(text, "5")
        assert last_boxed(text) is None
    assert time.perf_counter() - start < 2.0


def test_dapo_reads_the_answer_line_near_the_end_or_a_strict_box_at_the_very_end() -> None:
    assert math_answers.dapo("Answer: 34", "34") == (True, "34")
    assert math_answers.dapo("Answer: 34" + " " * 300, "34") == (False, None)
    assert math_answers.dapo(r"\boxed{34}", "34") == (True, "34"), "without an answer line the box counts"
    assert math_answers.dapo("\\boxed{34}\nAnswer: 5", "34") == (False, "5")
    assert math_answers.dapo(r"\boxed{34}", "34", strict_box=True) == (True, "34")
    assert math_answers.dapo(r"\boxed{34}" + "." * 100, "34", strict_box=True) == (False, None)


def test_retool_softens_a_wrong_answer_by_the_turns_that_were_tried_and_not_for_free() -> None:
    wrong, right = math_answers.Graded(False, "1"), math_answers.Graded(True, "2")
    assert [math_answers.retool(wrong, turns) for turns in (1, 2, 4, 6)] == pytest.approx([-1.0, -1.0, -0.9, -0.8])
    assert [math_answers.retool(wrong, turns) for turns in (10, 12, 100)] == pytest.approx([-0.6] * 3)
    assert math_answers.retool(right, 100) == 1.0


def test_geometry_is_right_and_well_formed_each_on_its_own() -> None:
    assert math_answers.well_formed(r"<think>a</think> so \boxed{5}")
    assert not math_answers.well_formed(r"a \boxed{5}")
    assert not math_answers.well_formed(r"<think>\boxed{5}</think> so 5")
    assert [math_answers.score(r, f) for r in (False, True) for f in (False, True)] == pytest.approx(
        [0.0, 0.1, 0.9, 1.0]
    )


def test_symbolic_equality_knows_algebra() -> None:
    if not math_answers.installed():
        pytest.skip("math-verify is not installed")
    assert math_answers.same_symbolic("2(x+1)", "2x+2") and not same_answer("2(x+1)", "2x+2")
    assert math_answers.same_symbolic(r"\sqrt{8}", r"2\sqrt{2}")
    assert not math_answers.same_symbolic("2x+3", "2x+2")
    assert not math_answers.same_symbolic("what", "2x+2")
