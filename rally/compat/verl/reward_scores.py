"""verl's score functions, with the signatures and the results of verl 0.9.

Two inputs that verl accepts are refused with a sentence: a ground truth that is no text, which no answer could equal,
and an empty list of targets.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rally.compat.verl.code_scores import prime_code
from rally.rewards.registry import compute_score
from rally.rewards.score import RewardError
from rally.scoring import verl_scores

PAUSES = 4


def gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, `format_score` for another one, 0 if there is no answer."""
    return verl_scores.gsm8k(solution_str, _text(ground_truth), method, format_score, score)


def math(solution_str: str, ground_truth: Any) -> float:
    r"""1 if the last `\boxed{}` is the ground truth, otherwise 0."""
    return float(verl_scores.math(solution_str, _text(ground_truth)))


def math_dapo(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """1 or -1, with `acc` and `pred`."""
    if pause_tokens_index is not None and len(pause_tokens_index) != PAUSES:
        raise RewardError(f"pause_tokens_index must have {PAUSES} positions, not {len(pause_tokens_index)}")
    graded = verl_scores.math_dapo(solution_str, _text(ground_truth), strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if graded.right else -1.0, "acc": graded.right, "pred": graded.answer}


def search_r1(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for an exact match, a quarter of it after more than ten answers, `format_score` for another answer, 0 if
    there is no answer. `method` has no effect, as in verl."""
    return verl_scores.search(solution_str, _targets(ground_truth), format_score, score)


def search_r1_contains(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if an accepted answer is part of the answer. `method` has no effect, as in verl."""
    return verl_scores.search_contains(solution_str, _targets(ground_truth), format_score, score)


def math_batch(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Any
) -> list[float]:
    """`math` of each answer."""
    return [math(answer, truth) for answer, truth in zip(solution_strs, ground_truths, strict=True)]


def last_box(string: str) -> str | None:
    r"""The last `\boxed{...}` with its command, or what follows `\boxed ` up to a dollar sign (`math_reward`)."""
    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    at = string.rfind("\\boxed")
    return _braced_command(string, string.rfind("\\fbox") if at < 0 else at)


def last_braced_box(string: str) -> str | None:
    r"""The last `\boxed{...}` with its command (`math_dapo`)."""
    return _braced_command(string, string.rfind("\\boxed{"))


def _braced_command(string: str, at: int) -> str | None:
    """The command at `at` up to the brace that closes its first one."""
    depth = 0
    for end in range(at, len(string)) if at >= 0 else ():
        depth += {"{": 1, "}": -1}.get(string[end], 0)
        if string[end] == "}" and depth == 0:
            return string[at : end + 1]
    return None


def remove_box(s: str) -> str:
    r"""The content of `\boxed{...}` or of `\boxed ...` (`math_reward`)."""
    bare = "\\boxed "
    return s.removeprefix(bare) if s.startswith(bare) else remove_braced_box(s)


def remove_braced_box(s: str) -> str:
    r"""The content of `\boxed{...}` (`math_dapo`). Raises AssertionError for other text, as verl does."""
    command = "\\boxed{"
    assert s.startswith(command) and s.endswith("}"), f"box error: {s}"
    return s[len(command) : -1]


def is_equivalent(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are the same after Hendrycks' normalization."""
    if str1 is None or str2 is None:
        return str1 is str2
    left, right = verl_scores.math_form(str1), verl_scores.math_form(str2)
    return str1 == str2 if left is None or right is None else left == right


def math_verify(model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0) -> float:
    """1 if the package math-verify finds the answers equal. It has no timeout here: reward workers have one."""
    grader, parser = _package("math_verify.grader", "math-verify"), _package("math_verify.parser", "math-verify")
    latex, expression = parser.LatexExtractionConfig(), parser.ExprExtractionConfig()
    gold = parser.parse(f"\\boxed{{{ground_truth}}}", (latex,), parsing_timeout=None)
    given = parser.parse(model_output, (expression, latex), parsing_timeout=None)
    return float(any(grader.verify(g, p, timeout_seconds=None) for g in gold for p in given))


def geo3k(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The accuracy by the package mathruler, and `format_score` for the format."""
    return (1.0 - format_score) * geo3k_accuracy(predict_str, ground_truth, use_boxed) + format_score * geo3k_format(
        predict_str
    )


def geo3k_accuracy(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    grader = _package("mathruler.grader", "mathruler")
    answer = grader.extract_boxed_content(predict_str) if use_boxed else predict_str
    return 1.0 if grader.grade_answer(answer, ground_truth) else 0.0


def geo3k_format(predict_str: str) -> float:
    return 1.0 if re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", predict_str, re.DOTALL) else 0.0


def _package(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RewardError(f"this score needs the package {error.name}; run: pip install {distribution}") from None


MATH_SOURCES = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
DAPO_SOURCES = ("math_dapo", "math", "math_dapo_reasoning")
SEARCH_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SEARCH_SOURCES = tuple(f"searchR1_{name}" for name in SEARCH_SETS)


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kw: Any
) -> float | dict[str, Any]:
    """verl's score of a data source. Sources that verl does not know, and `hiyouga/geometry3k`, which it scores with a
    package, get the score of `rally.rewards.compute_score`. Those of verl's `prime_math` are refused."""
    if data_source.startswith("numina_"):
        raise RewardError(
            f"verl scores {data_source} with prime_math, which Rally does not have, and other graders pay other "
            "answers; write a reward function (custom_reward_function.path), for example over math_verify"
        )
    if data_source in CODE_SOURCES:
        return float(prime_code(solution_str, ground_truth, continuous=True)[0])
    if data_source == "openai/gsm8k":
        return gsm8k(solution_str, ground_truth)
    if data_source in MATH_SOURCES:
        return math(solution_str, ground_truth)
    if data_source in DAPO_SOURCES or data_source.startswith("aime"):
        return math_dapo(solution_str, ground_truth, bool(kw.get("strict_box_verify", False)))
    if data_source in SEARCH_SOURCES:
        return search_r1(solution_str, ground_truth)
    return compute_score(data_source, solution_str, ground_truth, extra_info, **kw)


def _text(ground_truth: Any) -> str:
    if not isinstance(ground_truth, str):
        raise RewardError(
            f"verl's score functions compare text, so no answer could equal the ground_truth {ground_truth!r} of type "
            f"{type(ground_truth).__name__}; write it as a text, or score with rally.rewards.compute_score"
        )
    return ground_truth


def _targets(ground_truth: Any) -> Sequence[str]:
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
    targets = [target] if isinstance(target, str) else list(target) if target is not None else []
    if not targets or not all(isinstance(one, str) for one in targets):
        raise RewardError(f'the ground_truth of a search row must be {{"target": [texts]}}, not {ground_truth!r}')
    return targets
