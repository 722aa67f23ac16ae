"""What is expected of the best, the worst or the majority of n samples is a pure function of a prompt's samples.

It is estimated by bootstrap: `n` of the samples are drawn with replacement, 1000 times. The draws come from a fixed
seed and are the same for every prompt. Shape letters: R resamples, n drawn samples, S samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES, SEED = 1000, 42

Ints = NDArray[np.int64]


# Most prompts have samples like those of another, and variables are often equal: thousands take seconds, not a minute.
@lru_cache(maxsize=2**16)
def statistics(values: tuple[float, ...], answers: tuple[int, ...] | None, k: int) -> Mapping[str, float]:
    """Mean, deviation, and the best, the worst and the majority of n for n up to k, of the samples of one prompt."""
    values_S = np.array(values)
    found = {f"mean@{k}": float(values_S.mean())}
    if k == 1:
        return found
    found[f"std@{k}"] = float(values_S.std())
    for n in _sizes(k):
        places_nR = _draws(len(values_S), n)
        drawn_nR = values_S[places_nR]
        outcomes = {"best": drawn_nR.max(0), "worst": drawn_nR.min(0)}
        if answers is not None:
            outcomes["maj"] = values_S[_majority(np.array(answers), places_nR)]
        for rule, outcome_R in outcomes.items():
            found[f"{rule}@{n}/mean"] = float(outcome_R.mean())
            found[f"{rule}@{n}/std"] = float(outcome_R.std())
    return found


def _sizes(k: int) -> list[int]:
    """2, 4, 8, ... below k, and k."""
    return [*(2**i for i in range(1, k.bit_length()) if 2**i < k), k]


@cache
def _draws(size: int, n: int) -> Ints:
    """`n` of `size` places, with replacement, once for each resample."""
    # The legacy generator: other trainers use it, so equal samples give the numbers that users know from there.
    return np.ascontiguousarray(np.random.RandomState(SEED).choice(size, (RESAMPLES, n)).T)


def _majority(answers_S: Ints, places_nR: Ints) -> Ints:
    """For each resample the place of the first drawn sample with the most frequent answer; of two, the one drawn first
    counts."""
    drawn_nR, columns_R = answers_S[places_nR], np.arange(RESAMPLES)
    keys_nR = drawn_nR * RESAMPLES + columns_R  # one number for each answer in each resample
    votes = np.bincount(keys_nR.ravel(), minlength=len(answers_S) * RESAMPLES)
    chosen: Ints = places_nR[votes[keys_nR].argmax(0), columns_R]
    return chosen
