"""An episode is read back as it was written, as JSON that any reader accepts."""

import json
import math
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from track_episodes import NASTY, episodes, make_episode

from rally.track import Opaque, episode_from_json, episode_to_json
from rally.track.run_folder.episode_json import MAX_REPR
from rally.types import Episode, StopReason
from rally.util.jsonl import checked_lines


def through_json(episode: Episode) -> Episode:
    """Writes with the encoder of the run folder, which equals the strict one of the standard library."""
    [line] = checked_lines([episode_to_json(episode)])
    assert json.loads(line) == json.loads(json.dumps(episode_to_json(episode), ensure_ascii=False, allow_nan=False))
    return episode_from_json(json.loads(line.encode("utf-8")))


def extra_through_json(value: Any) -> Any:
    return through_json(make_episode(extra={"x": value})).extra["x"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(episodes())
@example(make_episode(extra={NASTY: NASTY, "nested": {"$tuple": [1, (2, 3)]}, "pair": "\ud83d\ude00"}))
def test_any_episode_comes_back_equal(episode: Episode) -> None:
    back = through_json(episode)
    assert back == episode
    assert repr(back) == repr(episode), "equal is not enough: 1 == 1.0 == True, and a tuple must stay one"


def test_a_failed_episode_without_tokens_comes_back() -> None:
    episode = make_episode(stop_reason=StopReason.ERROR, error="boom", segments=(), turns=(), reward=None)
    assert through_json(episode) == episode


def test_nan_and_infinity_survive_as_valid_json() -> None:
    assert math.isnan(extra_through_json(math.nan))
    assert extra_through_json([math.inf, -math.inf]) == [math.inf, -math.inf]


def test_numbers_of_array_libraries_become_plain_numbers() -> None:
    assert extra_through_json(np.float32(0.5)) == 0.5
    assert extra_through_json(np.int64(7)) == 7
    assert extra_through_json(torch.tensor(2.0)) == 2.0
    assert repr(extra_through_json([np.float64(0.1), StopReason.STOP])) == "[0.1, 'stop']"


def test_an_integer_too_long_for_json_readers_survives() -> None:
    assert extra_through_json(7**9000) == 7**9000


def test_what_json_cannot_hold_is_marked_and_stays_marked() -> None:
    once = extra_through_json({1, 2})
    assert once == Opaque("builtins.set", "{1, 2}")
    assert extra_through_json(once) == once
    assert len(extra_through_json(b"x" * 10**6).text) == MAX_REPR


def test_a_value_whose_repr_fails_does_not_lose_the_episode() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert extra_through_json(Broken()).text == "<no repr: RuntimeError>"


def test_endless_and_very_deep_values_do_not_lose_the_episode() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert isinstance(extra_through_json(endless), list)
    assert isinstance(extra_through_json(deep), list)


def test_the_written_object_is_readable_by_name() -> None:
    written = episode_to_json(make_episode())
    assert written["stop_reason"] == "stop"
    assert written["task"]["prompt"] == [{"role": "user", "content": "2+3?"}]
    assert list(written["segments"][0]["response_mask"]) == [1, 1, 1, 0, 0, 1]
    assert written["turns"][1]["tool_results"][0]["status"] == "ok"
