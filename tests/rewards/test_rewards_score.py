"""Return values of reward functions: which are valid, and that all others are errors and not a 0."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.rewards import Score
from rally.rewards.score import decode, encode, reward_metrics
from rally.track.metrics.validation_metrics import validation_metrics
from rally.types import Episode, Segment, StopReason, Task


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.25), 0.25),
        (np.int64(2), 2.0),
        (np.bool_(1), 1.0),
    ],
)
def test_numbers_are_rewards(value: Any, reward: float) -> None:
    score = Score.of(value)
    assert (score.reward, score.info, score.error) == (reward, {"score": reward}, None)
    assert type(score.reward) is float


def test_a_dict_gives_its_score_and_keeps_the_rest() -> None:
    score = Score.of({"score": np.float64(0.5), "acc": True, "pred": "7", "parts": np.array([1, 2])})
    assert score.reward == 0.5
    assert score.info == {"score": 0.5, "acc": True, "pred": "7", "parts": [1, 2]}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        ({"score": -math.inf}, "-inf"),
        (10**400, "0...; return a finite number"),
        ({"score": 10**5000}, "a value of type int; return a finite number"),
        (None, "returned None; return a number"),
        ("1.0", "str"),
        ([1.0], "list"),
        (np.array([1.0]), "ndarray"),
        ({"score": None}, "returned None; return a number"),
        ({"acc": 1.0}, 'without "score"'),
        ({}, 'without "score"'),
    ],
)
def test_anything_else_is_an_error_that_says_what_came(value: Any, word: str) -> None:
    score = Score.of(value)
    assert score.reward is None
    assert score.error is not None and word in score.error


def test_a_score_cannot_have_both_or_neither() -> None:
    with pytest.raises(AssertionError):
        Score()
    with pytest.raises(AssertionError):
        Score(reward=0.0, error="failed")


def test_values_json_has_no_word_for_are_translated() -> None:
    value = {"tuple": (1, 2), 3: {4}, "array": np.eye(2), "image": b"\x00" * 9, "decimal": Decimal("1.5")}
    assert decode(encode(value)) == {
        "tuple": [1, 2],
        "3": [4],
        "array": [[1.0, 0.0], [0.0, 1.0]],
        "image": "<9 bytes>",
        "decimal": "1.5",
    }


@given(st.dictionaries(st.text(), st.text(alphabet=st.characters(codec=None)) | st.integers() | st.none()))
def test_any_text_crosses_unchanged_in_one_line(value: dict[str, Any]) -> None:
    line = encode(value | {"broken": "\ud800", "break": "a\nb\u2028c"})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line) == value | {"broken": "\ud800", "break": "a\nb\u2028c"}


def test_numbers_beyond_float_range_beside_the_reward_harm_nobody() -> None:
    info = {"score": 1.0, "big": 10**400, "bigger": 10**5000}
    assert decode(encode(info)) == info | {"bigger": "an integer of 16610 bits"}
    task = Task(id="t", data_source="d", prompt=({"role": "user", "content": "?"},))
    episode = Episode(
        id="e",
        task=task,
        group="g",
        stop_reason=StopReason.STOP,
        segments=(Segment(prompt_ids=(1,)),),
        reward=1.0,
        reward_info=info,
    )
    assert reward_metrics([episode])["reward/score/mean"] == 1.0
    assert not any("big" in name for name in (*reward_metrics([episode]), *validation_metrics([episode], 1)))
