"""Which answers to an arithmetic question are right."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.scoring import arithmetic


@pytest.mark.parametrize(
    "line", ["#### 464", "####464", "####\n464\n", "#### 464.", "#### 464.0", "#### $464", "x ####  464 "]
)
def test_right(line: str) -> None:
    assert arithmetic.score(f"12*34+56 = 464\n{line}", "464") == 1.0


@pytest.mark.parametrize(
    "text", ["464", "#### 465", "#### 464 or 465", "#### 464\n#### 465", "####", "#### four", "#### 4 64", ""]
)
def test_wrong(text: str) -> None:
    assert arithmetic.score(text, "464") == 0.0


def test_only_the_first_line_after_the_marker_is_the_answer() -> None:
    assert arithmetic.score("#### 464\nI checked it twice.", "464") == 1.0


@given(st.integers(-(10**12), 10**12))
def test_every_integer_scores_however_it_is_written(n: int) -> None:
    assert arithmetic.score(f"#### {n}", n) == 1.0
    assert arithmetic.score(f"#### {n:,}", str(n)) == 1.0
    assert arithmetic.score(f"#### {n + 1}", str(n)) == 0.0


@given(st.text())
def test_no_text_raises(text: str) -> None:
    assert arithmetic.score("####" + text, "464") in (0.0, 1.0)


@given(st.from_regex(re.compile(r"[-$0-9,.]{0,8}"), fullmatch=True))
def test_an_answer_is_digits_with_a_sign_commas_and_one_point(line: str) -> None:
    written = re.fullmatch(r"-?\$?[0-9,]*\.?[0-9]+\.?", line) is not None
    assert (arithmetic.extract(f"#### {line}") is not None) == written


@pytest.mark.parametrize("line", ["1" * 100_000 + "x", "." + "1" * 100_000 + "x", "," * 100_000])
def test_a_long_line_is_read_once(line: str) -> None:
    began = time.perf_counter()
    assert arithmetic.score(f"#### {line}", "1") == 0.0
    assert time.perf_counter() - began < 2, "it scores in the run's own process; every split tried would take a minute"
