"""Short answers to questions are compared after normalisation."""

from __future__ import annotations

import pytest

from rally.scoring import exact_match

TARGETS = ["the Eiffel Tower", "La Tour Eiffel"]


@pytest.mark.parametrize(
    ("answer", "exact", "contains"),
    [("Eiffel tower!", 1, 1), ("It is the Eiffel Tower.", 0, 1), ("Louvre", 0, 0), ("la tour eiffel", 1, 1)],
)
def test_words_count_and_not_how_they_are_written(answer: str, exact: int, contains: int) -> None:
    assert (exact_match.exact(answer, TARGETS), exact_match.contains(answer, TARGETS)) == (exact, contains)


def test_a_target_must_stand_there_as_words() -> None:
    assert exact_match.contains("a category", ["cat"]) == 0.0


def test_f1_is_the_best_overlap_of_words() -> None:
    assert exact_match.f1("tall Eiffel tower", TARGETS) == pytest.approx(2 * 2 / (3 + 2))
    assert exact_match.f1("the Eiffel Tower", TARGETS) == 1.0
    assert exact_match.f1("Louvre", TARGETS) == 0.0
    assert exact_match.f1("tower tower tower", ["Eiffel tower"]) == pytest.approx(2 * 1 / (3 + 2))
    assert exact_match.f1("yes it is", ["yes"]) == 0.0 and exact_match.f1("Yes.", ["yes"]) == 1.0


def test_the_last_answer_counts_and_guessing_costs() -> None:
    right = "<answer>Eiffel Tower</answer>"
    assert exact_match.score(f"<answer>Louvre</answer>{right}", TARGETS) == 1.0
    assert exact_match.score("Eiffel Tower", TARGETS) == 0.0
    assert exact_match.score(right * 10, TARGETS) == 1.0
    assert exact_match.score(right * 11, TARGETS) == 0.25


def test_an_unknown_match_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be exact, contains or f1, not 'em'"):
        exact_match.score("", TARGETS, "em")  # type: ignore[arg-type]
