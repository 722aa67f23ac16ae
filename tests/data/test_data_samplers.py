"""The batches of a run depend only on (seed, step), and every epoch visits every row once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.data import DataError, batch_indices, episode_seed, steps_per_epoch, total_steps

ROWS = st.integers(1, 40)
BATCHES = st.integers(1, 50)
SEEDS = st.integers(0, 2**40)


@given(num_rows=ROWS, batch_size=BATCHES, seed=SEEDS, shuffle=st.booleans(), epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation_even_when_batches_straddle(
    num_rows: int, batch_size: int, seed: int, shuffle: bool, epochs: int
) -> None:
    steps = -(-num_rows * epochs // batch_size)
    stream = [
        index
        for step in range(1, steps + 1)
        for index in batch_indices(num_rows, batch_size, seed=seed, step=step, shuffle=shuffle)
    ]
    assert len(stream) == steps * batch_size
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(num_rows=ROWS, batch_size=BATCHES, seed=SEEDS, steps=st.permutations(range(1, 8)))
def test_a_batch_does_not_depend_on_what_was_asked_before(
    num_rows: int, batch_size: int, seed: int, steps: list[int]
) -> None:
    def batch(step: int) -> list[int]:
        return batch_indices(num_rows, batch_size, seed=seed, step=step, shuffle=True)

    in_order = {step: batch(step) for step in sorted(steps)}
    assert {step: batch(step) for step in steps} == in_order


def test_without_shuffle_the_rows_come_in_order() -> None:
    batches = [batch_indices(5, 3, seed=0, step=step, shuffle=False) for step in (1, 2, 3)]
    assert batches == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_seeds_and_epochs_differ() -> None:
    epochs = [batch_indices(100, 100, seed=seed, step=step, shuffle=True) for seed in (0, 1) for step in (1, 2)]
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_is_the_same_for_everybody() -> None:
    """Runs resumed on another machine rely on exactly these numbers; do not adapt them to a change."""
    assert batch_indices(10, 12, seed=7, step=1, shuffle=True) == [8, 0, 7, 1, 3, 6, 2, 4, 5, 9, 9, 0]
    assert episode_seed(0, 1, 2, 3) == 5628492896039661565


@given(num_rows=ROWS, batch_size=BATCHES, epochs=st.integers(1, 5))
def test_total_steps_fills_whole_batches(num_rows: int, batch_size: int, epochs: int) -> None:
    total = total_steps(num_rows, batch_size, epochs)
    assert total >= 1
    assert total == 1 or total * batch_size <= num_rows * epochs
    assert (total + 1) * batch_size > num_rows * epochs
    assert steps_per_epoch(num_rows, batch_size) == total_steps(num_rows, batch_size, 1)


def test_episode_seeds_are_63_bit_and_all_different() -> None:
    seeds = {episode_seed(s, t, r, n) for s in range(3) for t in range(12) for r in range(12) for n in range(12)}
    assert len(seeds) == 3 * 12**3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "seed", "sentence"),
    [(0, 4, 0, "no rows"), (4, 0, 0, "batch size is 0"), (4, 4, -1, "seed is -1; it must be 0 or more")],
)
def test_impossible_batches_are_said_in_a_sentence(num_rows: int, batch_size: int, seed: int, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        batch_indices(num_rows, batch_size, seed=seed, step=1, shuffle=True)
