"""Curricula choose the rows computed by hand, as a function of (seed, step) and their state."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rally.data import (
    DataError,
    EasyToHard,
    EasyToHardOptions,
    RowSampler,
    SamplerSettings,
    SolvedSometimes,
    SolvedSometimesOptions,
    TaskSet,
    batch_indices,
    draw,
    draw_further,
    load_sampler_class,
    load_tasks,
    write_rows,
)
from rally.types import Episode, Segment, StopReason

SEGMENT = Segment(prompt_ids=(1,), response_ids=(2,), response_mask=(1,), response_logprobs=(-1.0,))
LEVELS = [3, 9, 1, 7, 5, 0, 8, 2, 6, 4]  # the difficulty of each of ten rows
BAND = SolvedSometimesOptions(low=0.2, high=0.8, explore=0.5, solved_at=0.5)


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[Sequence[object]], TaskSet]:
    def make(levels: Sequence[object]) -> TaskSet:
        written = [
            {
                "data_source": "math",
                "prompt": [{"role": "user", "content": f"{i}?"}],
                "reward_model": {"ground_truth": "1"},
                "extra_info": {"level": level},
            }
            for i, level in enumerate(levels)
        ]
        write_rows(written, tmp_path / "rows.jsonl")
        return load_tasks(tmp_path / "rows.jsonl")

    return make


Rows = Callable[[Sequence[object]], TaskSet]


def settings(batch_size: int = 2, total_steps: int = 10, seed: int = 5) -> SamplerSettings:
    return SamplerSettings(batch_size=batch_size, total_steps=total_steps, seed=seed)


def episodes(tasks: TaskSet, row: int, rewards: Sequence[float], **info: object) -> list[Episode]:
    return [
        Episode(
            id=f"{row}-{i}",
            task=tasks[row],
            group=str(row),
            stop_reason=StopReason.STOP,
            segments=(SEGMENT,),
            reward=reward,
            reward_info=dict(info),
        )
        for i, reward in enumerate(rewards)
    ]


def easy_to_hard(tasks: TaskSet, **changes: object) -> EasyToHard:
    options = {"field": "extra_info.level", "start_share": 0.2, "grow_steps": 4} | changes
    return EasyToHard(tasks, settings(), EasyToHardOptions(**options))


def test_the_open_rows_grow_evenly_from_the_easiest_to_all(rows: Rows) -> None:
    sampler = easy_to_hard(rows(LEVELS))
    assert [sampler.open_rows(step) for step in range(1, 7)] == [2, 4, 6, 8, 10, 10]
    assert {LEVELS[row] for row in sampler.batch(1)} == {0, 1}
    for step, hardest in ((2, 3), (3, 5), (4, 7)):
        batch = sampler.batch(step)
        assert len(set(batch)) == 2 and max(LEVELS[row] for row in batch) <= hardest
    assert sampler.batch(6) == batch_indices(10, 2, seed=5, step=6, shuffle=True), "then as without a curriculum"


def test_a_batch_larger_than_the_open_share_opens_enough_rows(rows: Rows) -> None:
    tasks = rows(LEVELS)
    options = EasyToHardOptions(field="extra_info.level", start_share=0.0, grow_steps=100)
    sampler = EasyToHard(tasks, settings(batch_size=4), options)
    assert sorted(LEVELS[row] for row in sampler.batch(1)) == [0, 1, 2, 3]
    assert len(EasyToHard(tasks, settings(batch_size=12), options).batch(1)) == 12


def test_easy_to_hard_reports_the_difficulty_of_what_was_tried(rows: Rows) -> None:
    tasks = rows(LEVELS)
    tried = episodes(tasks, 1, [0.0, 1.0]) + episodes(tasks, 2, [0.0, 0.0])
    assert easy_to_hard(tasks).update(2, tried) == {"difficulty": 5.0, "open_share": 0.4}
    assert easy_to_hard(tasks).update(2, []) == {"open_share": 0.4}


@pytest.mark.parametrize("level", ["hard", None, True, math.inf])
def test_a_row_without_a_difficulty_is_named(rows: Rows, level: object) -> None:
    with pytest.raises(DataError, match=r"row rows:1: extra_info.level is .*must name a number in every row"):
        easy_to_hard(rows([1, level, 2]))


def solved_sometimes(tasks: TaskSet, batch_size: int = 2, **changes: float) -> SolvedSometimes:
    options = {"low": BAND.low, "high": BAND.high, "explore": BAND.explore, "solved_at": BAND.solved_at} | changes
    return SolvedSometimes(tasks, settings(batch_size), SolvedSometimesOptions(**options))


def test_success_is_measured_by_row_and_older_results_fade(rows: Rows) -> None:
    tasks = rows(range(4))
    sampler = solved_sometimes(tasks)
    metrics = sampler.update(1, episodes(tasks, 0, [1.0, 1.0, 0.0, 0.4]) + episodes(tasks, 1, [0.0, 0.1]))
    # row 0: 2 of 4 reach 0.5; row 1: none; their mean difficulty is 1 - (0.5 + 0) / 2
    assert metrics == pytest.approx(
        {"solved_share": 0, "target_share": 0.25, "unsolved_share": 0.25, "unseen_share": 0.5, "difficulty": 0.75}
    )
    metrics = sampler.update(2, episodes(tasks, 0, [1.0, 1.0]))
    assert sampler.state() == {"rows:0": [0.75, 2], "rows:1": [0.0, 1]}  # half of 0.5, half of 1
    sampler.update(3, episodes(tasks, 0, [1.0, 1.0]))
    assert sampler.update(4, [])["solved_share"] == 0.25, "0.875 is above the band"


def test_accuracy_speaks_before_the_reward(rows: Rows) -> None:
    tasks = rows(range(4))
    sampler = solved_sometimes(tasks)
    sampler.update(1, episodes(tasks, 0, [-1.0], acc=True) + episodes(tasks, 1, [0.9], acc=False))
    assert sampler.state() == {"rows:0": [1.0, 1], "rows:1": [0.0, 1]}


def test_a_batch_is_half_rows_of_the_band_and_half_unseen(rows: Rows) -> None:
    tasks = rows(range(20))
    sampler = solved_sometimes(tasks, batch_size=4)
    for row in range(10):  # 0..5 are solved half of the time, 6 and 7 always, 8 and 9 never
        sampler.update(1, episodes(tasks, row, [1.0, 0.0] if row < 6 else [1.0] if row < 8 else [0.0]))
    for step in range(2, 30):
        batch = sampler.batch(step)
        assert len(set(batch)) == 4
        assert sum(row < 6 for row in batch) == 2 and sum(row >= 10 for row in batch) == 2
    assert len({tuple(sampler.batch(step)) for step in range(2, 30)}) > 10, "chance chooses among equals"


def test_rows_out_of_the_band_come_back_longest_ago_first(rows: Rows) -> None:
    tasks = rows(range(6))
    sampler = solved_sometimes(tasks, batch_size=2)
    for row, step in ((0, 1), (1, 2), (2, 3), (3, 9), (4, 8), (5, 7)):
        sampler.update(step, episodes(tasks, row, [1.0, 0.0] if row < 3 else [0.0]))
    assert sampler.batch(10) == [0, 5]
    sampler.update(10, episodes(tasks, 0, [1.0, 0.0]) + episodes(tasks, 5, [0.0]))
    assert sampler.batch(11) == [1, 4]


def test_what_is_short_is_filled_from_the_other_side(rows: Rows) -> None:
    tasks = rows(range(5))
    sampler = solved_sometimes(tasks, batch_size=4, explore=0.0)
    assert len(set(sampler.batch(1))) == 4, "nothing was tried yet, so all is exploration"
    sampler.update(1, episodes(tasks, 0, [1.0, 0.0]))
    assert 0 in sampler.batch(2) and len(set(sampler.batch(2))) == 4
    for row in range(1, 5):
        sampler.update(2, episodes(tasks, row, [1.0, 0.0]))
    eager = solved_sometimes(tasks, batch_size=4, explore=1.0)
    eager.load_state(sampler.state())
    assert len(set(eager.batch(3))) == 4, "there is nothing left to explore"


def test_fewer_rows_than_a_batch_are_refused(rows: Rows) -> None:
    with pytest.raises(DataError, match=r"3 are fewer than data.train_batch_size=4; lower it"):
        solved_sometimes(rows(range(3)), batch_size=4)


def test_a_sampler_with_the_saved_state_goes_on_as_the_first_one(rows: Rows) -> None:
    tasks, luck = rows(range(30)), random.Random(0)
    first = solved_sometimes(tasks, batch_size=6)

    def one_step(sampler: SolvedSometimes, step: int, seed: int) -> Sequence[int]:
        dice = random.Random(seed)
        batch = sampler.batch(step)
        for row in batch:
            sampler.update(step, episodes(tasks, row, [float(dice.random() < row / 30) for _ in range(4)]))
        return batch

    for step in range(1, 9):
        one_step(first, step, luck.randrange(10**6))
    second = solved_sometimes(tasks, batch_size=6)
    assert second.batch(9) != first.batch(9), "the state must matter"
    second.load_state(json.loads(json.dumps(first.state())))
    for step in range(9, 15):
        assert one_step(first, step, step) == one_step(second, step, step)
    assert first.state() == second.state()


def test_it_finds_the_rows_that_teach(rows: Rows) -> None:
    """Of 200 rows 40 are solved half of the time: a batch at random has a fifth of them, a targeted one far more."""
    tasks, dice = rows(range(200)), random.Random(1)
    sampler = solved_sometimes(tasks, batch_size=16)
    seen: Counter[bool] = Counter()
    for step in range(1, 41):
        for row in sampler.batch(step):
            chance = 0.5 if row % 5 == 0 else float(row % 5 > 2)
            sampler.update(step, episodes(tasks, row, [float(dice.random() < chance) for _ in range(8)]))
            seen[row % 5 == 0] += step > 20
    assert seen[True] > 0.45 * (seen[True] + seen[False])


class Backwards(RowSampler):
    def batch(self, step: int) -> Sequence[int]:
        return [len(self.tasks) - step]


def test_what_a_sampler_returns_is_checked(rows: Rows) -> None:
    tasks = rows(range(3))
    sampler = Backwards(tasks, settings())
    assert draw(sampler, 1, 1, 3) == [2]
    with pytest.raises(DataError, match=r"Backwards.batch\(4\) returned the row -1; it must return 1 row"):
        draw(sampler, 4, 1, 3)
    with pytest.raises(DataError, match=r"returned 1 rows; it must return 2 row numbers from 0 to 2"):
        draw(sampler, 1, 2, 3)
    assert all(type(row) is int for row in draw(RowSampler(tasks, settings()), 1, 2, 3))
    assert RowSampler(tasks, settings()).update(1, []) is None


def test_a_class_is_found_in_a_file_or_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from rally.data import RowSampler\nclass Mine(RowSampler): pass\nclass Other: pass\n")
    assert issubclass(load_sampler_class(str(path), "Mine"), RowSampler)
    assert load_sampler_class("pkg://rally.data.samplers", "RowSampler") is RowSampler
    with pytest.raises(DataError, match=r"has no class Other that is a rally.data.RowSampler"):
        load_sampler_class(str(path), "Other")
    path.write_text("1 / 0")
    with pytest.raises(DataError, match=r"cannot be imported \(ZeroDivisionError: division by zero\); correct it"):
        load_sampler_class(str(path), "Mine")
    with pytest.raises(DataError, match="cannot be imported"):
        load_sampler_class("no.such.module", "Mine")


def test_a_numpy_answer_of_a_users_class_is_fine(rows: Rows) -> None:
    class FromNumpy(RowSampler):
        def batch(self, step: int) -> Sequence[int]:
            return np.array([1, 2])

    assert draw(FromNumpy(rows(range(3)), settings()), 1, 2, 3) == [1, 2]


def test_further_rows_are_all_others_once_and_the_same_whenever_asked(rows: Rows) -> None:
    tasks = rows(LEVELS)
    sampler = RowSampler(tasks, settings(batch_size=3))
    for step in (1, 2, 7):
        batch, further = sampler.batch(step), sampler.further(step)
        assert sorted([*batch, *further]) == list(range(10))
        assert RowSampler(tasks, settings(batch_size=3)).further(step) == further
    assert len({tuple(sampler.further(step)) for step in range(1, 20)}) == 19, "each step has an order of its own"
    ordered = RowSampler(tasks, SamplerSettings(batch_size=3, total_steps=9, shuffle=False))
    assert ordered.batch(2) == [3, 4, 5] and ordered.further(2) == [6, 7, 8, 9, 0, 1, 2]


def test_further_rows_of_a_curriculum_go_on_where_its_batch_ends(rows: Rows) -> None:
    tasks = rows(LEVELS)
    grown = easy_to_hard(tasks)
    further = [LEVELS[row] for row in grown.further(2)]  # four rows are open, and two of them in the batch
    assert sorted([*further[:2], *(LEVELS[row] for row in grown.batch(2))]) == [0, 1, 2, 3]
    assert further[2:] == [4, 5, 6, 7, 8, 9], "then harder ones, the easiest first"
    sampler = solved_sometimes(tasks, batch_size=4)
    for row in range(6):  # 0..3 are solved half of the time
        sampler.update(1, episodes(tasks, row, [1.0, 0.0] if row < 4 else [0.0]))
    batch, further = sampler.batch(2), sampler.further(2)
    assert sorted([*batch, *further]) == list(range(10))
    assert sum(row < 4 for row in batch) == 2 and all(row < 4 for row in further[:2])


def test_further_rows_of_a_users_class_are_checked(rows: Rows) -> None:
    class Beyond(RowSampler):
        def further(self, step: int) -> Sequence[int]:
            return [3, 99]

    with pytest.raises(DataError, match=r"Beyond.further\(1\) returned the row 99; it must return row numbers from 0"):
        draw_further(Beyond(rows(LEVELS), settings()), 1, 10)
