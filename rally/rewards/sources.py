r"""The data sources that papers train on are scored without any code of the user's.

These functions are ours, pure and linear in the text they read, so a run that needs no others calls them in its own
process. The exception is `equality=symbolic`, which asks sympy and therefore runs in workers that can be killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rally.rewards.functions import find, register_reward, registered, route
from rally.rewards.result import RewardError
from rally.scoring import arithmetic, geo3k, gsm8k, mathematics, search, symbolic
from rally.scoring.answers import last_tagged
from rally.scoring.latex import normalise, same_answer
from rally.scoring.numbers import parse_number

Equality = Literal["text", "symbolic"]
Info = dict[str, Any] | None


def built_in_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, **kw: Any
) -> float | dict[str, Any]:
    """Score with the functions of this file alone, whatever a user has registered in this process."""
    return route(_BUILT_IN, kw, data_source, solution_str, ground_truth, extra_info)


def check_source(data_source: str) -> None:
    """Raise RewardError where no function of this file scores that source."""
    find(_BUILT_IN, data_source)


def may_hang(kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this file, given these keywords, must run where it can be killed."""
    return kwargs.get("equality") == "symbolic"


def check_equality(kwargs: Mapping[str, Any]) -> None:
    """A way to compare answers that is unknown, or not installed, is found before training."""
    equality = kwargs.get("equality", "text")
    if equality not in ("text", "symbolic"):
        raise RewardError(f"reward_kwargs.equality must be text or symbolic, not {equality!r}")
    if equality == "symbolic" and not symbolic.installed():
        raise RewardError(
            "reward_kwargs.equality=symbolic needs the package math-verify; run pip install 'rally-rl[math]', "
            "or leave it out to compare answers as text"
        )


@register_reward("openai/gsm8k")
def _gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    method: gsm8k.Method = "strict",
) -> float:
    return gsm8k.score(solution_str, _number(data_source, ground_truth), method=method)


@register_reward("rally/arithmetic")
def _arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    return arithmetic.score(solution_str, _number(data_source, ground_truth))


@register_reward("lighteval/MATH")
@register_reward("DigitalLearningGmbH/MATH-lighteval")
@register_reward("HuggingFaceH4/MATH-500")
def _math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, *, equality: Equality = "text"
) -> dict[str, Any]:
    graded = mathematics.boxed(solution_str, _answer(data_source, ground_truth), _same(equality))
    return _report(float(graded.right), graded)


@register_reward("math")
@register_reward("math_dapo*")
@register_reward("aime*")
def _dapo(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    equality: Equality = "text",
    strict_box_verify: bool = False,
    tool_credit: bool = False,
) -> dict[str, Any]:
    truth = _answer(data_source, ground_truth)
    graded = mathematics.dapo(solution_str, truth, strict_box=strict_box_verify, same=_same(equality))
    turns = (extra_info or {}).get("num_turns", 2) if tool_credit else 2
    return _report(mathematics.retool(graded, turns), graded)


@register_reward("retool*")
def _retool(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, *, equality: Equality = "text"
) -> dict[str, Any]:
    return _dapo(
        data_source,
        solution_str,
        ground_truth,
        extra_info,
        equality=equality,
        strict_box_verify=True,
        tool_credit=True,
    )


@register_reward("searchR1_*")
@register_reward("hotpotqa*")
def _search(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, *, match: search.Match = "exact"
) -> dict[str, Any]:
    targets = _targets(data_source, ground_truth)
    return {
        "score": search.score(solution_str, targets, match),
        "acc": search.score(solution_str, targets, "exact"),
        "f1": search.score(solution_str, targets, "f1"),
        "pred": last_tagged(solution_str),
    }


@register_reward("hiyouga/geometry3k")
@register_reward("rally/geometry")
def _geo3k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, *, equality: Equality = "text"
) -> dict[str, Any]:
    graded = mathematics.boxed(solution_str, _answer(data_source, ground_truth), _same(equality))
    formed = geo3k.well_formed(solution_str)
    return _report(geo3k.score(graded.right, formed), graded) | {"format": float(formed)}


def _report(score: float, graded: mathematics.Graded) -> dict[str, Any]:
    return {"score": score, "acc": float(graded.right), "pred": graded.answer}


def _same(equality: Equality) -> mathematics.Same:
    check_equality({"equality": equality})
    return symbolic.same_symbolic if equality == "symbolic" else same_answer


def _number(data_source: str, ground_truth: Any) -> Any:
    """A truth that no answer can equal would score every episode 0 without a word."""
    if parse_number(ground_truth) is None:
        raise RewardError(
            f"the ground_truth of a {data_source} row must be a number, not {ground_truth!r}; mend the row"
        )
    return ground_truth


def _answer(data_source: str, ground_truth: Any) -> Any:
    if not isinstance(ground_truth, (str, int, float)) or not normalise(ground_truth):
        raise RewardError(
            f"the ground_truth of a {data_source} row must be a short text or a number, not {ground_truth!r}; "
            "mend the row"
        )
    return ground_truth


def _targets(data_source: str, ground_truth: Any) -> list[str]:
    """The accepted answers, written as one, as a list, or as {"target": list}."""
    given: Any = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    given = given.tolist() if hasattr(given, "tolist") else given
    targets = [given] if isinstance(given, (str, int, float)) else given
    if not isinstance(targets, (list, tuple)) or not any(str(t).strip() for t in targets if t is not None):
        raise RewardError(
            f"the ground_truth of a {data_source} row must be an answer, a list of answers or "
            f'{{"target": [...]}}, not {ground_truth!r}; mend the row'
        )
    return [str(target) for target in targets if target is not None]


_BUILT_IN = registered()
