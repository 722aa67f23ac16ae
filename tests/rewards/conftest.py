"""Fixtures of the reward tests: episodes from short texts, and reward functions in real files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rally import Episode, Segment, StopReason, Task, Turn

MakeEpisode = Callable[..., Episode]
WriteReward = Callable[[str], str]


@pytest.fixture
def make_episode() -> MakeEpisode:
    def make(text: str = "#### 72", *, source: str = "openai/gsm8k", truth: Any = "72", **fields: Any) -> Episode:
        values: dict[str, Any] = {
            "id": "e",
            "group": "g",
            "stop_reason": StopReason.STOP,
            "segments": (Segment(prompt_ids=(1,)),),
            "turns": (Turn(role="assistant", text=text),),
            "task": Task(
                id="t",
                data_source=source,
                prompt=({"role": "user", "content": "How many?"},),
                ground_truth=truth,
                extra_info=fields.pop("extra_info", {}),
            ),
        }
        return Episode(**values | fields)

    return make


@pytest.fixture
def write_reward(tmp_path: Path) -> WriteReward:
    """Write a reward file, given indented, and return its path."""

    def write(source: str) -> str:
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return str(path)

    return write
