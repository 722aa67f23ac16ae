"""Advantages and the timeline are read back as written, survive a kill and are rewound on resume."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
from track_episodes import make_episode

from rally.track import AdvantageSpan, PhaseRow, RunFolder, episode_from_json, episode_to_json, rollout_metrics
from rally.types import Episode, Turn

SPANS = {"e0": ((AdvantageSpan(0.71, 0, 34), AdvantageSpan(0.71, 60, 80)), ()), "e1": ((AdvantageSpan(-1.25, 0, 3),),)}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def test_advantages_are_lines_of_spans_and_come_back(folder: RunFolder) -> None:
    folder.log_advantages(1, SPANS)
    lines = [json.loads(line) for line in (folder.path / "advantages" / "train_000001.jsonl").read_text().splitlines()]
    assert lines[0] == {"id": "e0", "segments": [[[0.71, 0, 34], [0.71, 60, 80]], []]}
    assert folder.read_advantages(1) == SPANS and folder.read_advantages(2) == {}


def test_an_advantage_that_is_no_number_is_null_and_read_as_nan(folder: RunFolder) -> None:
    folder.log_advantages(1, {"e0": [[AdvantageSpan(math.nan, 0, 3)]]})
    assert "null" in (folder.path / "advantages" / "train_000001.jsonl").read_text()
    [[span]] = folder.read_advantages(1)["e0"]
    assert math.isnan(span.value) and (span.start, span.end) == (0, 3)


def test_the_timeline_is_a_line_per_phase_and_a_torn_one_is_dropped(folder: RunFolder) -> None:
    folder.log_phase(3, "gen", 100.5, 102.0)
    assert folder.timeline_path.read_text() == '{"step": 3, "phase": "gen", "start": 100.5, "end": 102.0}\n'
    with folder.timeline_path.open("a") as file:
        file.write('{"step": 3, "phase": "upd')
    assert folder.read_timeline() == [PhaseRow(3, "gen", 100.5, 102.0)], "a line still being written is no line yet"
    folder.create()
    folder.log_phase(3, "update_actor", 102.0, 103.0)
    assert [row.phase for row in folder.read_timeline()] == ["gen", "update_actor"]


def test_rewind_sets_advantages_and_timeline_aside(folder: RunFolder) -> None:
    for step in (1, 2):
        folder.log_advantages(step, SPANS)
        folder.log_phase(step, "gen", step, step + 1.0)
    aside = folder.rewind(1)
    assert aside is not None
    assert folder.read_advantages(2) == {} and RunFolder(aside).read_advantages(2) == SPANS
    assert [row.step for row in folder.read_timeline()] == [1]
    assert [row.step for row in RunFolder(aside).read_timeline()] == [2]
    assert folder.rewind(1) is None, "nothing later is left"


def test_a_phase_that_was_cut_off_alone_is_set_aside_too(folder: RunFolder) -> None:
    folder.log_phase(2, "gen", 1.0, 2.0)
    aside = folder.rewind(1)
    assert aside is not None and RunFolder(aside).read_timeline() == [PhaseRow(2, "gen", 1.0, 2.0)]


def test_a_spoiled_line_is_named_before_anything_is_moved(folder: RunFolder) -> None:
    folder.log_advantages(2, SPANS)
    folder.timeline_path.write_text("rubbish\n")
    with pytest.raises(ValueError, match=r"line 1 of .*timeline\.jsonl"):
        folder.rewind(1)
    assert folder.read_advantages(2) == SPANS


def test_episodes_written_before_turns_had_these_fields_are_read() -> None:
    written = episode_to_json(make_episode())
    for turn in written["turns"]:
        del turn["queued"], turn["first_token"]
    assert episode_from_json(json.loads(json.dumps(written))) == make_episode()
    assert {"queued", "first_token"} <= {field.name for field in fields(Turn)}


def test_waiting_for_the_engine_is_told_where_it_says_so() -> None:
    def episode(*waits: tuple[float, float]) -> Episode:
        turns = [Turn(role="assistant", text="", queued=queued, first_token=first) for queued, first in waits]
        return make_episode(turns=tuple(turns))

    told = rollout_metrics([episode((0.0, 1.0), (2.0, 3.0))])
    assert told["engine/queue_s/p50"] == 1.0 and told["engine/first_token_s/p50"] == 2.0
    assert not any(name.startswith("engine/") for name in rollout_metrics([episode((0.0, 0.0))]))
