"""Rally's counterparts of verl's score functions, compared with scores that were observed from verl 0.9.1.

Each line of `verl_scores.jsonl` has a text, a ground truth and verl's results for both, with format_score 0.1:
`gsm8k` strict and flexible; `math` (math_reward); `math_dapo` (score, pred) without and with strict_box_verify;
`search` exact and as a substring.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rally.compat.verl import reward_scores
from rally.importing import import_file
from rally.rewards import RewardError, compute_score

CASES = [json.loads(line) for line in Path(__file__).with_name("verl_scores.jsonl").read_text().splitlines()]


@pytest.mark.drill(
    "reliability", "A reward function written for verl scores an episode", "It pays what verl pays, case by case"
)
def test_the_scores_are_those_of_verl() -> None:
    assert len(CASES) > 300
    for case in CASES:
        text, truth, target = case["text"], case["truth"], {"target": [case["truth"]]}
        dapo = [reward_scores.math_dapo(text, truth, strict) for strict in (False, True)]
        ours = {
            "gsm8k": [reward_scores.gsm8k(text, truth, method, 0.1, 1.0) for method in ("strict", "flexible")],
            "math": reward_scores.math(text, truth),
            "math_dapo": [[one["score"], one["pred"]] for one in dapo],
            "search": [
                scored(text, target, "strict", 0.1, 1.0)
                for scored in (reward_scores.search_r1, reward_scores.search_r1_contains)
            ],
        }
        assert ours == {key: case[key] for key in ours}, case
        assert all(one["acc"] is (one["score"] == 1.0) for one in dapo)


def test_every_score_occurs_in_the_table() -> None:
    seen = {(key, json.dumps(value)) for case in CASES for key, value in case.items() if key != "text"}
    for method in (0, 1):
        assert {case["gsm8k"][method] for case in CASES} == {0, 0.1, 1.0}
        assert {case["search"][method] for case in CASES} >= {0, 0.1, 1.0}
        assert {case["math_dapo"][method][0] for case in CASES} == {-1.0, 1.0}
    assert {("math", "0.0"), ("math", "1.0")} <= seen and any(case["search"][0] == 0.25 for case in CASES)


def test_default_compute_score_and_equality_verl_pay_the_same() -> None:
    sources = {
        "openai/gsm8k": lambda case: float(case["gsm8k"][0] == 1.0),
        "HuggingFaceH4/MATH-500": lambda case: case["math"],
        "aime_2024": lambda case: case["math_dapo"][0][0],
        "searchR1_nq": lambda case: {0.1: 0.0}.get(case["search"][0], case["search"][0]),
    }
    for source, expected in sources.items():
        for case in CASES:
            truth = {"target": [case["truth"]]} if source.startswith("search") else case["truth"]
            assert _score(reward_scores.default_compute_score(source, case["text"], truth)) == expected(case), case
            if case["truth"].strip() and source != "openai/gsm8k":
                try:
                    native = compute_score(source, case["text"], truth, equality="verl")
                except RewardError:  # the ground truth is no answer
                    continue
                assert _score(native) == expected(case), (source, case)
                assert _score(compute_score(source, case["text"], truth)) >= expected(case), (source, case)


def _score(value: Any) -> float:
    return float(value["score"] if isinstance(value, dict) else value)


def test_numbers_are_compared_by_value_unless_verl_is_asked_for() -> None:
    assert [compute_score("openai/gsm8k", "#### 72.0", "72", equality=e) for e in ("text", "verl")] == [1.0, 0.0]
    assert [_score(compute_score("math_dapo", "Answer: 0.5", "1/2", equality=e)) for e in ("text", "verl")] == [1, -1]
    with pytest.raises(RewardError, match=r"has no equality=verl: .* mathruler; use text or symbolic"):
        compute_score("hiyouga/geometry3k", r"\boxed{5}", "5", equality="verl")


@pytest.mark.parametrize("truth", [72, None, 0.5, ["72"]])
def test_a_truth_that_is_no_text_is_refused(truth: Any) -> None:
    for function in (reward_scores.gsm8k, reward_scores.math, reward_scores.math_dapo):
        with pytest.raises(RewardError, match="compare text, so no answer could equal"):
            function("#### 72", truth)


def test_sources_that_verl_scores_in_its_own_way() -> None:
    with pytest.raises(RewardError, match="verl scores numina_aops_forum with prime_math, which Rally does not have"):
        reward_scores.default_compute_score("numina_aops_forum", r"\boxed{5}", "5")
    with pytest.raises(RewardError, match="the test cases are no JSON text"):  # codecontests is scored by prime_code
        reward_scores.default_compute_score("codecontests", "```python\nprint(1)\n```", "no cases")
    cases = {"inputs": ["1"], "outputs": ["1"], "assert_case": ["assert f(1)", "assert f(2)"]}
    with pytest.raises(RewardError, match="as many inputs as assert_case, not 1 and 2"):
        reward_scores.default_compute_score("taco", "```python\nprint(1)\n```", cases)


@pytest.mark.parametrize("truth", ["Seine", {}, {"target": []}, {"target": [1]}, {"target": None}])
def test_targets_that_are_no_texts_are_refused(truth: Any) -> None:
    with pytest.raises(RewardError, match="the ground_truth of a search row must be"):
        reward_scores.search_r1("<answer>Seine</answer>", truth)


def test_pause_tokens_move_the_window_of_the_box() -> None:
    text = r"\boxed{5}" + " " * 150
    assert reward_scores.math_dapo(text, "5", True)["pred"] is None
    assert reward_scores.math_dapo(text, "5", True, [1, 2, 3, 100]) == {"score": 1.0, "acc": True, "pred": "5"}
    with pytest.raises(RewardError, match="must have 4 positions, not 1"):
        reward_scores.math_dapo(text, "5", True, [3])


def test_all_names_can_be_imported_from_a_file_for_verl(tmp_path: Path) -> None:
    file = tmp_path / "names.py"
    file.write_text(
        "from verl.utils.reward_score import default_compute_score, gsm8k, math, math_dapo, math_reward\n"
        "from verl.utils.reward_score.search_r1_like_qa_em import compute_score_subem, extract_solution\n"
        "paid = gsm8k.compute_score('garbage', '72', 'strict', 0.1, 1.0), gsm8k.extract_solution('#### 1,0')\n"
        "found = extract_solution('<answer> a </answer>'), math_reward.compute_score(r'\\boxed{1}', '1')\n"
    )
    module = import_file(file, "names")
    assert module.paid == (0.0, "10") and module.found == ("a", 1.0)
