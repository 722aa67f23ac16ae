"""Which answers to a grade-school problem are right."""

import json
from pathlib import Path

import pytest

from rally.scoring import gsm8k


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 6*12 = 72\n#### 72", "72", "72"),
        ("#### 5 was wrong\n#### 7", "7", "7"),
        ("#### 1,234.50", "1234.50", "1234.50"),
        ("#### $18", "18", "18"),
        ("#### -3", "-3", "-3"),
        ("the answer is $1,000 in all", None, "1000"),
        ("####72", None, "72"),
        ("#### none. Or 12?", None, "12"),
        ("#### ...", None, None),
        ("no number here.", None, None),
        ("", None, None),
    ],
)
def test_extract(text: str, strict: str | None, flexible: str | None) -> None:
    assert gsm8k.extract(text) == strict
    assert gsm8k.extract(text, "flexible") == flexible


@pytest.mark.parametrize("written", ["72", "72.0", "72.00", "72.", "$72", "072"])
def test_equal_values_are_equal_answers(written: str) -> None:
    assert gsm8k.score(f"#### {written}", "72") == 1.0
    assert gsm8k.score("#### 72", written) == 1.0


def test_truth_may_be_a_number() -> None:
    assert gsm8k.score("#### 1,234", 1234) == 1.0
    assert gsm8k.score("#### 0.5", 0.5) == 1.0


def test_wrong_missing_and_partial_credit() -> None:
    assert gsm8k.score("#### 71", "72") == 0.0
    assert gsm8k.score("#### 71", "72", format_score=0.1) == 0.1
    assert gsm8k.score("seventy-two", "72", format_score=0.1) == 0.0
    assert gsm8k.score("72", "72", format_score=0.1) == 0.0, "strict needs the marker"
    assert gsm8k.score("72", "72", "flexible", score=2.0) == 2.0
    assert gsm8k.score("#### 1.2.3", "1.2.3") == 0.0, "not a number"
    assert gsm8k.score("#### 5", "NaN") == 0.0


def test_only_the_end_is_read() -> None:
    assert gsm8k.score("#### 72" + " ok" * 200, "72") == 0.0
    assert gsm8k.score(" ok" * 2000 + "#### 72", "72") == 1.0


def test_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="strict or flexible"):
        gsm8k.extract("#### 1", "loose")  # type: ignore[arg-type]


def test_every_reference_solution_earns_the_full_score(shared: Path) -> None:
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) > 1000
    for answer in answers:
        assert gsm8k.score(answer, answer.rpartition("#### ")[2].replace(",", "")) == 1.0
