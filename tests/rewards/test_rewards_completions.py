"""Reward functions over completions, in the form of TRL: what they get, and what becomes of their numbers."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rally.rewards import RewardSpec, Score, Scorer
from rally.rewards.completions import CompletionsReward, takes_completions
from rally.rewards.custom_functions import load_reward_function
from rally.rewards.score import RewardError
from rally.types import Episode, Generation, Segment, StopReason, Task, Turn, WeightSpan

FUNCTIONS = """
from rally.rewards.completions import CompletionsReward


def right(prompts, completions, solution, **kwargs):
    assert prompts[0] == [{"role": "user", "content": "1+1?"}] and kwargs["level"] == [1, None], kwargs
    return [float(c[-1]["content"] == s) for c, s in zip(completions, solution, strict=True)]


async def short(completions, completion_ids, log_extra=None, log_metric=None):
    log_extra("roles", ["".join(m["role"][0] for m in c) for c in completions])
    log_metric("longest", max(map(len, completion_ids)))
    return [-len(ids) for ids in completion_ids]


def some(completions, level, **kwargs):
    return [None if one is None else 10 for one in level]


def none(completions, **kwargs):
    return [None] * len(completions)


def fewer(completions, **kwargs):
    return [1.0]


def overwrites(completions, log_extra, **kwargs):
    log_extra("right", [100.0] * len(completions))
    return [0.0] * len(completions)


def scaled(completions, margin=0.0):
    return [margin] * len(completions)


def by_place(completions, /, solution):
    return [0.0] * len(completions)


def words(completions, **kwargs):
    return ["good"] * len(completions)


def needy(completions, trainer_state):
    return [0.0] * len(completions)


both = CompletionsReward([right, short, some], [1.0, 0.5, 2.0])
clash = CompletionsReward([right, overwrites])
made = CompletionsReward([scaled])
"""


def episode(text: str, ids: int, **columns: Any) -> Episode:
    sampled = Generation(ids=tuple(range(ids)), logprobs=(-1.0,) * ids, finish="stop", spans=(WeightSpan(0, 0, ids),))
    segment = Segment(prompt_ids=(1, 2)).append_sampled(sampled)
    task = Task(
        id="r0",
        data_source="sums",
        prompt=({"role": "user", "content": "1+1?"},),
        extra_info={"solution": "2", **columns},
    )
    turns = (
        Turn(role="assistant", text="<tool_call>"),
        Turn(role="tool", text="2"),
        Turn(role="assistant", text=text),
    )
    return Episode(id="e", group="g", task=task, stop_reason=StopReason.STOP, segments=(segment,), turns=turns)


EPISODES = [episode("2", 3, level=1), episode("3", 5)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return str(path)


def scores(file: str, name: str) -> list[Score]:
    async def score() -> list[Score]:
        async with Scorer(RewardSpec(path=file, name=name, batch=True), num_workers=1, timeout=60.0) as scorer:
            return list(await scorer.score_batch(EPISODES))

    return asyncio.run(score())


def test_numbers_are_weighted_and_logged_by_name(file: str) -> None:
    first, second = scores(file, "both")
    assert first.reward == 1.0 - 0.5 * 3 + 2.0 * 10
    assert second.reward == 0.0 - 0.5 * 5, "a function that does not score an episode adds nothing to it"
    assert first.info["right"] == 1.0 and first.info["short"] == -3.0 and second.info["some"] is None
    assert [one.info["roles"] for one in (first, second)] == ["ata", "ata"] and second.info["longest"] == 5


def test_an_episode_that_no_function_scores_is_an_error_and_no_zero(file: str) -> None:
    assert [one.reward for one in scores(file, "none")] == [None, None]
    assert "None" in (scores(file, "none")[0].error or "")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fewer", "fewer returned 1 numbers for 2 episodes"),
        ("words", "words returned a list of str; return numbers or None"),
        ("clash", "overwrites logs right, a name of scores; choose another one"),
        ("needy", "needs trainer_state, which is no column of the rows: they have .*level, .*solution"),
    ],
)
def test_a_mistake_is_one_sentence(file: str, name: str, problem: str) -> None:
    assert all(re.search(problem, one.error or "") for one in scores(file, name))


def test_the_form_is_found_and_needs_the_batch_manager(file: str) -> None:
    with pytest.raises(RewardError, match=r"right of .* scores the completions of a whole batch; set .*=batch"):
        load_reward_function(file, "right")

    with pytest.raises(RewardError, match="let completions be given by its name"):
        load_reward_function(file, "by_place", batch=True)

    def usual(data_source: str, solution_str: str, ground_truth: str, completions: Sequence[str] = ()) -> float:
        return 0.0

    assert not takes_completions(usual) and not takes_completions(len)
    with pytest.raises(RewardError, match="different names and a weight each"):
        CompletionsReward([usual, usual])
    with pytest.raises(RewardError, match=r"reward_kwargs.prompts is always set"):
        CompletionsReward([usual], kwargs={"prompts": 1})


@pytest.mark.parametrize("name", ["scaled", "made"])
def test_arguments_of_the_configuration_reach_the_functions(file: str, name: str) -> None:
    spec = RewardSpec(path=file, name=name, batch=True, kwargs={"margin": 2.0})

    async def score() -> list[Score]:
        async with Scorer(spec, num_workers=1, timeout=60.0) as scorer:
            return list(await scorer.score_batch(EPISODES))

    assert [one.reward for one in asyncio.run(score())] == [2.0, 2.0]
    with pytest.raises(RewardError, match=r"no reward function takes reward_kwargs.other; remove it"):
        load_reward_function(file, name, {"other": 1}, batch=True)
