"""The adapter `reasoning_gym/<data set>`: one question per seed, scored by the data set's own function.

The answer is taken out of the reply before it is scored, because the package compares the whole text. A reply without
an answer scores 0, and so does one that a scorer cannot read. Questions are made anew from the seed, so no data passes
through files, which would change the scores of arc_agi and rearc.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import reasoning_gym
from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

from rally.envs.adapters.answer_guard import (
    FORMULAS,
    INTEGRALS,
    MOST_SECONDS,
    check_answer,
    guard,
    parse_fraction,
    within_cpu_limit,
)
from rally.envs.adapters.global_random import GlobalRandom
from rally.envs.base import EnvError, Environment, EnvTurn

AnswerForm = Literal["tag", "last_line", "reply"]
Scoring = Literal["package", "strict"]
INSTRUCTIONS = {
    "tag": "Write the final answer between <answer> and </answer>.",
    "last_line": "Write only the final answer on the last line.",
    "reply": "Reply with the final answer only.",
}
FLOOR_SCORES = (
    *("advanced_geometry", "color_cube_rotation", "countdown", "emoji_mystery", "fraction_simplification"),
    *("palindrome_generation", "power_function", "prime_factorization", "propositional_logic", "puzzle24"),
    *("rearc", "rubiks_cube", "rush_hour", "sentence_reordering", "tsumego"),
)
"""Data sets whose own scorer gives a wrong answer 0.01 to 0.05. `scoring=strict` gives it 0."""
NO_STORED_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Data sets that store no answer. Their scorers check an answer by the rules of the task."""
WRONG_SCORES = ("coin_flip", "game_of_life_halting")
"""Data sets whose own scorer gives some wrong answers 1. Only `scoring=strict` is accepted for them."""
COIN_TOLERANCE = 1e-4  # of the scorer of coin_flip, which gives 1 also to every beginning of the right number
GLOBAL_RANDOM = ("list_functions",)
"""Data sets that take numbers from the process-global random state."""
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def names() -> list[str]:
    return sorted(name for name in DATASETS if name != "composite")


def make(
    name: str,
    answer: AnswerForm = "tag",
    scoring: Scoring = "package",
    level: int | None = None,
    instruction: str | None = None,
    **config: Any,
) -> Environment:
    """The environment of a data set. `config` are the keys of the data set's own configuration. `level` takes them from
    the data set's curriculum instead; keys of `config` are then added to it."""
    if name == "composite":
        raise EnvError("reasoning_gym/composite is not supported; name the data sets in env.mixture, with weights")
    if name not in DATASETS:
        raise EnvError(f"there is no data set reasoning_gym/{name}; `rally env list reasoning_gym` lists them")
    if answer not in INSTRUCTIONS or scoring not in get_args(Scoring):
        raise EnvError(
            f"answer must be one of {', '.join(INSTRUCTIONS)} and scoring one of {', '.join(get_args(Scoring))}, not "
            f"{answer!r} and {scoring!r}; correct env.args"
        )
    if name in WRONG_SCORES and scoring != "strict":
        raise EnvError(f"the scorer of reasoning_gym/{name} gives wrong answers 1; set env.args.scoring=strict")
    settings = {**_of_level(name, level), **config}
    if clash := sorted(settings.keys() & {"seed", "size"}):
        raise EnvError(f"env.args.{clash[0]} is set by the row; leave it out")
    checked = DATASETS[name][1](**settings)  # wrong arguments are found before anything is played
    if hasattr(checked, "validate"):  # two data sets have none
        checked.validate()
    guard(name)
    return ReasoningGym(name, settings, answer, scoring, INSTRUCTIONS[answer] if instruction is None else instruction)


def _of_level(name: str, level: int | None) -> dict[str, Any]:
    if level is None:
        return {}
    if name not in CURRICULA:
        raise EnvError(f"reasoning_gym/{name} has no curriculum; leave env.args.level out")
    curriculum = create_curriculum(name)
    for step in range(level):
        if not curriculum.increment_global_level():
            raise EnvError(f"the curriculum of reasoning_gym/{name} ends at level {step}; lower env.args.level")
    return {
        key: value for key, value in vars(curriculum.generate_configuration()).items() if key not in ("seed", "size")
    }


class ReasoningGym(Environment):
    """One question of a data set."""

    def __init__(
        self, name: str, config: Mapping[str, Any], answer: AnswerForm, scoring: Scoring, instruction: str
    ) -> None:
        self.name, self.config, self.form, self.scoring = name, dict(config), answer, scoring
        self.instruction = instruction

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, Sequence[Mapping[str, Any]]]:
        self.dataset, self.entry = self._generated(seed)
        question = self.entry["question"]
        return (f"{question}\n\n{self.instruction}" if self.instruction else question), ()

    def _generated(self, seed: int) -> tuple[Any, dict[str, Any]]:
        if self.name == "arc_agi":  # slow to make
            dataset = _kept_dataset(self.name, tuple(sorted(self.config.items())))
            return dataset, dataset[seed]
        if self.name in GLOBAL_RANDOM:
            with GlobalRandom(seed).active():
                return self._fresh(seed)
        return self._fresh(seed)

    def _fresh(self, seed: int) -> tuple[Any, dict[str, Any]]:
        dataset = reasoning_gym.create_dataset(self.name, size=1, seed=seed, **self.config)
        return dataset, dataset[0]

    def step(self, turn: EnvTurn) -> tuple[str, float, bool, dict[str, Any]]:
        answer = extracted(turn.reply, self.form)
        score, problem = 0.0, "" if answer is not None else "no answer"
        if answer is not None:
            try:
                check_answer(self.name, answer)
                scored = partial(self.dataset.score_answer, answer, self.entry)
                score = float(within_cpu_limit(scored, MOST_SECONDS) if self.name in FORMULAS else scored())
            except Exception as error:  # noqa: BLE001 - what a scorer cannot read is a wrong answer
                problem = f"{type(error).__name__}: {error}"
        reward = float(score >= 1.0 and not self._loosely_right(answer)) if self.scoring == "strict" else score
        return "", reward, True, {"answer": answer, "package_score": score, **({"problem": problem} if problem else {})}

    def _loosely_right(self, answer: str | None) -> bool:
        """Whether the package accepts an answer that is not the stored one, although there is only one, or that
        solves nothing."""
        if self.name in INTEGRALS:  # the integrand as its own integral
            return "Integral" in (answer or "")
        stored = str(self.entry["answer"]).strip().lower()
        if self.name == "coin_flip":
            written = parse_fraction((answer or "0").replace(",", ""))
            return abs(float(written) - float(parse_fraction(stored))) > COIN_TOLERANCE
        return self.name in WRONG_SCORES and (answer or "").strip().lower() != stored


def extracted(reply: str, form: AnswerForm) -> str | None:
    """The answer in a reply; None if there is none."""
    if form == "tag":
        found = _TAG.findall(reply)
        return found[-1].strip() if found else None
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    if form == "last_line":
        return lines[-1] if lines else None
    return reply.strip() or None


@lru_cache(maxsize=8)
def _kept_dataset(name: str, config: tuple[tuple[str, Any], ...]) -> Any:
    """A data set whose item i is the one of seed i."""
    return reasoning_gym.create_dataset(name, size=2**31 - 1, seed=0, **dict(config))
