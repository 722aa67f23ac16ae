r"""The registry of reward functions by data source, and the built-in functions for common data sets.

The built-in functions are pure and linear in the text they read, so they run in the process of the trainer. The
exception is `equality=symbolic`, which uses sympy, may hang, and therefore runs in reward workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from rally.rewards.score import RewardError
from rally.scoring import arithmetic, exact_match, gsm8k, math_answers, verl_scores
from rally.scoring.answer_extraction import last_boxed, last_tagged, parse_number
from rally.scoring.math_answers import normalise, same_answer

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

RewardFunction = Callable[..., float | dict[str, Any]]
F = TypeVar("F", bound=Callable[..., Any])


class Registered(NamedTuple):
    """A reward function and the keywords it takes."""

    function: RewardFunction
    keywords: frozenset[str] | None  # beyond the four; None when it takes any


_registry: dict[str, Registered] = {}


def register_reward(data_source: str) -> Callable[[F], F]:
    """Score `data_source` with the decorated function. A trailing * matches any ending.

    An exact name takes precedence over a pattern, and a longer pattern over a shorter one. The last registration of a
    name wins, so built-in functions can be replaced. The function must be in the file that custom_reward_function.path
    names.
    """
    if not isinstance(data_source, str) or not data_source:
        raise RewardError('register_reward needs the name of a data source: write @register_reward("my_task")')

    def register(function: F) -> F:
        check_call(function, f"the reward function registered for {data_source}", {})
        _registry[data_source] = Registered(function, _keywords(function))
        return function

    return register


def registered() -> Mapping[str, Registered]:
    """The functions registered in this process, by data source."""
    return dict(_registry)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kw: Any
) -> float | dict[str, Any]:
    """Score with the function registered for `data_source`. It gets the keywords that it takes."""
    return route(_registry, kw, data_source, solution_str, ground_truth, extra_info)


def check_keywords(names: Iterable[str]) -> None:
    """Raise RewardError for a keyword that no registered function takes."""
    if any(entry.keywords is None for entry in _registry.values()):
        return
    known = frozenset[str]().union(*(entry.keywords or () for entry in _registry.values()))
    if unknown := sorted(set(names) - known):
        raise RewardError(
            f"no registered reward function takes reward_kwargs.{unknown[0]}; known are {', '.join(sorted(known))}"
        )


def check_call(
    function: Callable[..., Any], label: str, kwargs: Mapping[str, Any], arguments: Sequence[str] = ARGUMENTS
) -> None:
    """Raise RewardError if the function cannot be called with these arguments. Messages call it `label`."""
    if not callable(function):
        raise RewardError(f"{label} is not a function but {type(function).__name__}; name a function instead")
    if clash := sorted(set(kwargs) & set(arguments)):
        raise RewardError(f"reward_kwargs.{clash[0]} is always set from the episode; remove it from reward_kwargs")
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        names = ", ".join((*arguments, *kwargs))
        raise RewardError(f"{label} cannot be called with {names} ({error}); give it those parameters") from error


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters) - set(ARGUMENTS)


def route(registry: Mapping[str, Registered], kw: Mapping[str, Any], *values: Any) -> float | dict[str, Any]:
    """Call the function that `registry` has for the data source, the first of the values."""
    arguments = dict(zip(ARGUMENTS, values, strict=True))
    entry = find(registry, arguments["data_source"])
    taken = {k: v for k, v in kw.items() if entry.keywords is None or k in entry.keywords}
    return entry.function(**arguments, **taken)


def find(registry: Mapping[str, Registered], data_source: str) -> Registered:
    """The function of a data source. Raises RewardError with the known ones."""
    if data_source in registry:
        return registry[data_source]
    patterns = [name for name in registry if name.endswith("*") and data_source.startswith(name[:-1])]
    if patterns:
        return registry[max(patterns, key=len)]
    raise RewardError(
        f"no reward function for data_source {data_source!r} (known: {', '.join(sorted(registry))}); "
        f'write one with @register_reward("{data_source}") and name its file in custom_reward_function.path'
    )


Equality = Literal["text", "symbolic", "verl"]
Info = dict[str, Any] | None


def built_in_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, **kw: Any
) -> float | dict[str, Any]:
    """Score with the functions of this file only, whatever a user has registered in this process."""
    return route(_BUILT_IN, kw, data_source, solution_str, ground_truth, extra_info)


def check_truth(data_source: str, ground_truth: Any) -> None:
    """Raise RewardError if no function of this file scores that source, or if no answer can equal the ground truth."""
    built_in_score(data_source, "", ground_truth)


def may_hang(kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this file, with these keywords, must run in a worker that can be killed."""
    return kwargs.get("equality") == "symbolic"


def check_equality(kwargs: Mapping[str, Any]) -> None:
    """Raise RewardError if the way to compare answers is unknown or not installed."""
    equality = kwargs.get("equality", "text")
    if equality not in ("text", "symbolic", "verl"):
        raise RewardError(f"reward_kwargs.equality must be text, symbolic or verl, not {equality!r}")
    if equality == "symbolic" and not math_answers.installed():
        raise RewardError(
            "reward_kwargs.equality=symbolic needs the package math-verify; run pip install 'rally-rl[math]', "
            "or remove it to compare answers as text"
        )


@register_reward("openai/gsm8k")
def _gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    method: gsm8k.Method = "strict",
    equality: Equality = "text",
) -> float:
    solution_str = _with_mark(solution_str, extra_info, "####", "#### {}")
    if equality == "verl":
        return verl_scores.gsm8k(solution_str, str(ground_truth), method)
    return gsm8k.score(solution_str, _number(data_source, ground_truth), method=method)


@register_reward("rally/arithmetic")
def _arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    solution_str = _with_mark(solution_str, extra_info, "####", "#### {}")
    return arithmetic.score(solution_str, _number(data_source, ground_truth))


@register_reward("lighteval/MATH")
@register_reward("DigitalLearningGmbH/MATH-lighteval")
@register_reward("HuggingFaceH4/MATH-500")
def _math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, *, equality: Equality = "text"
) -> dict[str, Any]:
    truth, solution_str = _answer(data_source, ground_truth), _with_mark(solution_str, extra_info, *BOX)
    graded = math_answers.Graded(verl_scores.math(solution_str, str(truth)), last_boxed(solution_str))
    if equality != "verl" and not graded.right:
        graded = math_answers.boxed(solution_str, truth, _same(equality))
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
    if "answer" not in solution_str.lower():
        solution_str = _with_mark(solution_str, extra_info, *BOX)
    graded = math_answers.Graded(*verl_scores.math_dapo(solution_str, str(truth), strict_box_verify))
    if equality != "verl" and not graded.right:
        graded = math_answers.dapo(solution_str, truth, strict_box=strict_box_verify, same=_same(equality))
    turns = (extra_info or {}).get("num_turns", 2) if tool_credit else 2
    return _report(math_answers.retool(graded, turns), graded)


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
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    match: exact_match.Match = "exact",
) -> dict[str, Any]:
    solution_str = _with_mark(solution_str, extra_info, "<answer>", "<answer>{}</answer>")
    targets = _targets(data_source, ground_truth)  # equality=verl changes nothing here: match=exact is verl's score
    return {
        "score": exact_match.score(solution_str, targets, match),
        "acc": exact_match.score(solution_str, targets, "exact"),
        "f1": exact_match.score(solution_str, targets, "f1"),
        "pred": last_tagged(solution_str),
    }


@register_reward("hiyouga/geometry3k")
@register_reward("rally/geometry")
def _geo3k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, *, equality: Equality = "text"
) -> dict[str, Any]:
    if equality == "verl":
        raise RewardError(
            f"{data_source} has no equality=verl: verl compares these answers with the package mathruler; use text or "
            "symbolic"
        )
    solution_str = _with_mark(solution_str, extra_info, *BOX)
    graded = math_answers.boxed(solution_str, _answer(data_source, ground_truth), _same(equality))
    formed = math_answers.well_formed(solution_str)
    return _report(math_answers.score(graded.right, formed), graded) | {"format": float(formed)}


BOX = (r"\boxed", r"\boxed{{{}}}")


def _with_mark(text: str, extra_info: Info, mark: str, form: str) -> str:
    """The text. An answer that an agent behind the gateway returned may be the bare answer: it is written in the form
    of the data source, which the agent has parsed already."""
    returned = (extra_info or {}).get("agent_answer")
    return form.format(text.strip()) if isinstance(returned, str) and returned == text and mark not in text else text


def _report(score: float, graded: math_answers.Graded) -> dict[str, Any]:
    return {"score": score, "acc": float(graded.right), "pred": graded.answer}


def _same(equality: Equality) -> math_answers.Same:
    check_equality({"equality": equality})
    return math_answers.same_symbolic if equality == "symbolic" else same_answer


def _number(data_source: str, ground_truth: Any) -> Any:
    """The ground truth, which must be a number: any other would silently score every episode 0."""
    if parse_number(ground_truth) is None:
        raise RewardError(
            f"the ground_truth of a {data_source} row must be a number, not {ground_truth!r}; fix the row"
        )
    return ground_truth


def _answer(data_source: str, ground_truth: Any) -> Any:
    if not isinstance(ground_truth, (str, int, float)) or not normalise(ground_truth):
        raise RewardError(
            f"the ground_truth of a {data_source} row must be a short text or a number, not {ground_truth!r}; "
            "fix the row"
        )
    return ground_truth


def _targets(data_source: str, ground_truth: Any) -> list[str]:
    """The accepted answers, given as one, as a list, or as {"target": list}."""
    target: Any = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    target = target.tolist() if hasattr(target, "tolist") else target
    targets = [target] if isinstance(target, (str, int, float)) else target
    if not isinstance(targets, (list, tuple)) or not any(str(t).strip() for t in targets if t is not None):
        raise RewardError(
            f"the ground_truth of a {data_source} row must be an answer, a list of answers or "
            f'{{"target": [...]}}, not {ground_truth!r}; fix the row'
        )
    return [str(target) for target in targets if target is not None]


_BUILT_IN = registered()
