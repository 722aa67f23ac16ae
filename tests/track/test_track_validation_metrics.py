"""Validation metrics equal a plain loop over the definition, and are the same at every call."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from track_episodes import make_episode

from rally.track import validation_metrics
from rally.types import Episode, StopReason, Task


def answer(group: str, reward: float | None, source: str = "gsm8k", **info: object) -> Episode:
    task = Task(id=group, data_source=source, prompt=({"role": "user", "content": "?"},))
    return make_episode(f"{group}-{reward}", task=task, group=group, reward=reward, reward_info=info)


def bootstrap(samples: Sequence[object], n: int, choose: Callable[[list[object]], object]) -> tuple[float, float]:
    """The definition, one resample after the other: mean and standard deviation of 1000 of them, seed 42."""
    np.random.seed(42)
    outcomes = [choose([samples[i] for i in np.random.choice(len(samples), n, replace=True)]) for _ in range(1000)]
    return float(np.mean(outcomes)), float(np.std(outcomes))


def first_of_majority(drawn: list[tuple[float, str]]) -> float:
    votes: dict[str, list[float]] = {}
    for value, pred in drawn:
        votes.setdefault(pred, []).append(value)
    return max(votes.values(), key=len)[0]


def scores(metrics: dict[str, float], name: str) -> dict[str, float]:
    """The statistics of one variable of gsm8k; a star marks the core ones."""
    rooms = {"val-core": "*", "val-aux": ""}
    parts = [(key.split("/", 3), value) for key, value in metrics.items()]
    return {rooms[p[0]] + p[3]: v for p, v in parts if p[1:3] == ["gsm8k", name]}


def test_validation_averages_over_prompts_first() -> None:
    episodes = [
        answer("p", 1.0, acc=True),
        answer("p", 0.2, acc=False),
        answer("q", 0.4, acc=False),
        answer("q", 0.4, acc=False),
    ]
    metrics = validation_metrics(episodes, k=2)
    best, best_std = bootstrap([1.0, 0.0], 2, max)
    worst, worst_std = bootstrap([1.0, 0.0], 2, min)
    assert scores(metrics, "acc") == pytest.approx(
        {
            "*mean@2": 0.25,  # (1 + 0) / 2 and 0
            "std@2": 0.25,  # 1/2 and 0
            "*best@2/mean": best / 2,
            "*best@2/std": best_std / 2,
            "worst@2/mean": worst / 2,
            "worst@2/std": worst_std / 2,
        }
    )
    # two draws of a right and a wrong sample: at least one is right in 3 of 4 cases, both in 1 of 4
    assert best == pytest.approx(0.75, abs=0.04) and worst == pytest.approx(0.25, abs=0.04)
    reward = scores(metrics, "reward")
    assert reward["mean@2"] == pytest.approx(0.5) and reward["std@2"] == pytest.approx(0.2)
    assert not [name for name in reward if name.startswith("*")], "acc is there, so reward is not the core variable"


def test_sizes_double_up_to_k_and_only_k_is_core() -> None:
    values = [0.1, 0.9, 0.4, 0.4, 0.0, 0.7]
    got = scores(validation_metrics([answer("p", value) for value in values], k=6), "reward")
    expected = {"*mean@6": float(np.mean(values)), "std@6": float(np.std(values))}
    for n, star in ((2, ""), (4, ""), (6, "*")):
        expected[f"{star}best@{n}/mean"], expected[f"{star}best@{n}/std"] = bootstrap(values, n, max)
        expected[f"worst@{n}/mean"], expected[f"worst@{n}/std"] = bootstrap(values, n, min)
    assert got == pytest.approx(expected)


def test_the_majority_is_of_answers_and_its_first_sample_counts() -> None:
    samples = [(1.0, "72"), (0.0, "71"), (0.8, "72"), (0.0, "70"), (0.0, "71")]
    episodes = [answer("p", value, pred=pred) for value, pred in samples]
    got = scores(validation_metrics(episodes, k=5), "reward")
    for n, star in ((2, ""), (4, ""), (5, "*")):
        expected = bootstrap(samples, n, first_of_majority)
        assert (got[f"{star}maj@{n}/mean"], got[f"{star}maj@{n}/std"]) == pytest.approx(expected)
    one_answer = [answer("p", value, pred="72") for value in (1.0, 1.0, 1.0)]
    assert scores(validation_metrics(one_answer, k=3), "reward")["*maj@3/mean"] == 1.0


def test_without_answers_there_is_no_majority_and_a_prompt_without_them_does_not_vote() -> None:
    silent = [answer("q", 0.0), answer("q", 0.0)]
    assert not [name for name in validation_metrics(silent, k=2) if "maj@" in name]
    voting = [answer("p", 1.0, pred="5"), answer("p", 1.0, pred="5")]
    assert scores(validation_metrics(voting + silent, k=2), "reward")["*maj@2/mean"] == 1.0


def test_a_prompt_that_lost_a_sample_still_counts() -> None:
    episodes = [answer("p", 1.0), answer("p", None), answer("q", 0.0), answer("q", 0.0)]
    metrics = validation_metrics(episodes, k=2)
    assert scores(metrics, "reward")["*best@2/mean"] == 0.5 and metrics["val-aux/unscored"] == 1


def test_how_the_exchanges_went_is_told_by_source() -> None:
    quiet = {"task": answer("q", 0.0, source="aime").task, "turns": ()}
    episodes = [
        answer("p", 1.0),
        make_episode("a", **quiet),
        make_episode("b", stop_reason=StopReason.MAX_TURNS, **quiet),
    ]
    got = validation_metrics(episodes, k=1)
    expected = {"val-aux/num_turns/mean": 2, "val-aux/num_turns/max": 4, "val-aux/num_turns/min": 1}
    expected |= {f"val-aux/gsm8k/num_turns/{name}": 4 for name in ("mean", "max", "min")}
    expected |= {"val-aux/gsm8k/tool/call_rate": 1, "val-aux/gsm8k/tool/success_rate": 1, "val-aux/gsm8k/stop/stop": 1}
    expected |= {"val-aux/aime/num_turns/max": 1, "val-aux/aime/tool/call_rate": 0}
    expected |= {"val-aux/aime/stop/stop": 0.5, "val-aux/aime/stop/max_turns": 0.5, "val-aux/aime/stop/length": 0}
    assert expected.items() <= got.items()
    assert "val-aux/aime/tool/success_rate" not in got, "a rate over nothing is left out"


def test_a_prompt_with_more_samples_does_not_weigh_more() -> None:
    episodes = [answer("p", 1.0), answer("q", 0.0), answer("q", 0.0), answer("q", 0.0)]
    assert validation_metrics(episodes, k=3)["val-core/gsm8k/reward/mean@3"] == 0.5


def test_validation_keeps_sources_and_ways_to_sample_apart() -> None:
    got = validation_metrics([answer("p", 1.0), answer("q", 0.0, source="aime"), answer("r", None)], 1, "greedy")
    assert got["val-core/gsm8k/reward/mean@1/greedy"] == 1.0
    assert got["val-core/aime/reward/mean@1/greedy"] == 0.0
    assert got["val-aux/unscored/greedy"] == 1
    assert not [name for name in got if "best@" in name], "with one sample best and worst say nothing new"
    assert all(name.endswith("/greedy") for name in got)
