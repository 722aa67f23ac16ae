"""The built-in reward functions score an episode where it is, and a mistake in its row is a named error as in a worker.

They are ours, pure, and linear in the text they read: there is nothing to kill, so nothing is sent anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rally.rewards.custom import load_reward_function
from rally.rewards.episodes import request_of
from rally.rewards.result import Score, describe
from rally.rewards.sources import built_in_score
from rally.types import Episode


class BuiltIn:
    """The functions of this package with a run's keywords."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        load_reward_function(kwargs=kwargs)  # refuses keywords that no function takes
        self._kwargs = kwargs

    def score(self, episode: Episode) -> Score:
        start = time.perf_counter()
        try:
            value = built_in_score(**request_of(episode), **self._kwargs)
        except ValueError as error:
            return Score(error=describe(error), seconds=time.perf_counter() - start)
        return Score.of(value, time.perf_counter() - start)
