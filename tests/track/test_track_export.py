"""Export to trackers: everything is sent once, in order, whatever fails."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from track_episodes import episodes, make_episode

from rally.track.export import ExportSettings, TraceSettings, require_packages
from rally.track.export.delivery import (
    DeliveryLedger,
    EpisodeFiles,
    MetricsLines,
    PositionedMetrics,
    Stream,
    error_text,
    sole_exporter,
)
from rally.track.export.episode_spans import trace_of
from rally.track.export.settings import flat
from rally.track.export.traces import chosen
from rally.track.run_folder.folder import RunFolder
from rally.types import Episode, RallyError


class Tracker:
    """A tracker that can be unavailable."""

    where = "here"

    def __init__(self) -> None:
        self.got: list[int] = []
        self.away = False
        self.ended: bool | None = None

    def send(self, item: PositionedMetrics) -> None:
        if self.away:
            raise ConnectionError("nobody answers\nand more")
        self.got.append(item.position)

    def close(self, ok: bool) -> None:
        self.ended = ok


class Bench:
    """A run folder, a tracker that follows it, its messages, and a clock that does not advance by itself."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path / "run").create()
        self.state = path / "state.json"
        self.tracker = Tracker()
        self.told: list[tuple[str, str, str]] = []
        self.now = 100.0
        self.back_at = 1e9  # when an unavailable tracker is back

    def stream(self) -> Stream[PositionedMetrics]:
        def connect(ledger: DeliveryLedger) -> Tracker:
            ledger.begin("it", ledger.through)
            return self.tracker

        stream = Stream(
            "tracker",
            MetricsLines(self.folder),
            DeliveryLedger.read(self.state),
            connect,
            lambda *words: self.told.append(words),
            clock=lambda: self.now,
            sleep=self.slept,
        )
        stream.open()
        return stream

    def slept(self, seconds: float) -> None:
        self.now += seconds
        self.tracker.away = self.tracker.away and self.now < self.back_at

    def log(self, *steps: int) -> None:
        for step in steps:
            self.folder.log_metrics(step, {"a": step / 2})


def test_a_tracker_gets_every_step_once_also_over_restarts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log(1, 2)
    first = bench.stream()
    first.pump()
    bench.log(3)
    first.pump()
    first.pump()
    bench.log(4)  # never pumped: the process was killed
    second = bench.stream()
    bench.log(5)
    second.close(ok=True)
    assert bench.tracker.got == [1, 2, 3, 4, 5]
    assert bench.tracker.ended is True
    assert bench.told[-1] == ("closed", "tracker", "here")


def test_a_tracker_that_comes_back_gets_what_it_missed_and_is_not_asked_all_the_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stream = bench.stream()
    bench.tracker.away = True
    bench.log(1)
    stream.pump()
    assert bench.told[-1] == ("failed", "tracker", "ConnectionError: nobody answers")
    bench.tracker.away = False
    bench.log(2)
    stream.pump()
    assert bench.tracker.got == []  # too early
    bench.now += 10
    stream.pump()
    assert bench.tracker.got == [1, 2]


def test_a_folder_that_cannot_be_read_for_a_while_is_read_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stream = bench.stream()
    bench.folder.metrics_path.write_text("{torn\n")
    stream.pump()
    assert [kind for kind, _, _ in bench.told] == ["opened", "failed"]
    bench.folder.metrics_path.unlink()
    bench.log(1)
    bench.now += 10
    stream.pump()
    assert bench.tracker.got == [1]


def test_only_one_process_hands_a_folder_on(tmp_path: Path) -> None:
    with (
        sole_exporter(tmp_path),
        pytest.raises(RallyError, match="wait for its end and try again"),
        sole_exporter(tmp_path, 0.0),
    ):
        pass
    with sole_exporter(tmp_path, 0.0):
        pass


def test_what_a_tracker_lacks_at_the_end_is_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stream = bench.stream()
    bench.tracker.away = True
    bench.log(1, 2, 3)
    stream.close(ok=False)
    assert ("missing", "tracker", "3") in bench.told
    assert bench.tracker.ended is False


def test_a_tracker_that_cannot_be_ended_is_not_said_to_be_tried_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stream = bench.stream()
    bench.tracker.close = away  # type: ignore[method-assign]
    stream.close(ok=True)
    assert bench.told[1:] == [("unended", "tracker", "ConnectionError"), ("closed", "tracker", "here")]


def away(ok: bool) -> None:
    raise ConnectionError


def test_a_tracker_that_comes_back_at_the_end_gets_everything(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stream = bench.stream()
    bench.tracker.away, bench.back_at = True, bench.now + 10
    bench.log(1, 2, 3)
    stream.close(ok=True)
    assert bench.tracker.got == [1, 2, 3] and "missing" not in {kind for kind, _, _ in bench.told}


def test_a_tracker_that_does_not_open_is_refused_in_words(tmp_path: Path) -> None:
    told: list[tuple[str, str, str]] = []

    def connect(ledger: DeliveryLedger) -> Tracker:
        raise OSError

    folder = RunFolder(tmp_path)
    stream = Stream(
        "tracker", MetricsLines(folder), DeliveryLedger(tmp_path / "s"), connect, lambda *words: told.append(words)
    )
    stream.open()
    stream.pump()
    stream.close(ok=True)
    assert told == [("refused", "tracker", "tracker cannot be opened (OSError); fix that, or leave tracker out")]


def test_a_ledger_knows_when_a_run_can_go_on_in_the_same_place(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.json"
    assert not DeliveryLedger.read(path).continues(5)
    ledger = DeliveryLedger(path)
    ledger.begin("id")
    ledger.will_send(4)
    ledger.was_sent(4)
    assert DeliveryLedger.read(path).continues(4) and DeliveryLedger.read(path).continues(5)
    assert not DeliveryLedger.read(path).continues(3)  # step 4 was sent, and will be sampled again
    ledger.will_send(5)
    assert not DeliveryLedger.read(path).continues(5)  # it may have arrived or not


def test_a_line_still_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    tail = MetricsLines(folder)
    assert tail.news(1.0) == []
    folder.log_metrics(1, {"a": float("inf"), "b": 2})
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 2, "a"')
        file.flush()
        [one] = tail.news(2.0)
        assert one.position == 1 and one.metrics["b"] == 2 and one.metrics["track/nonfinite"] == 1
        assert one.metrics["a"] != one.metrics["a"]  # nan: the file has null
        file.write(": 5}\n")
    assert tail.news(3.0) == [PositionedMetrics(2, 3.0, {"a": 5})]


def test_episode_files_come_in_the_order_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    files = EpisodeFiles(folder)
    for step, validate in ((0, True), (1, False), (2, False), (2, True), (3, False)):
        folder.log_episodes(step, [make_episode()], validate=validate)
    found = [(one.step, one.validate) for one in files.news(0.0)]
    assert found == [(0, True), (1, False), (2, False), (2, True), (3, False)]
    assert files.news(0.0) == []


def test_settings_survive_the_way_to_the_other_process() -> None:
    trace = TraceSettings(backend="otel", project="p", experiment="e", max_samples=0)
    sent = ExportSettings(folder="a b/ü", project="p", name="n", after=3, trackers=("mlflow",), trace=trace)
    assert ExportSettings.from_json(sent.to_json()) == sent
    assert ExportSettings.from_json(replace(sent, trace=None).to_json()).trace is None


def test_a_missing_library_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.track.export.settings.find_spec", lambda name: None)
    with pytest.raises(RallyError, match=r"^wandb needs the package wandb; run: pip install 'rally-rl\[wandb\]'$"):
        require_packages(["wandb"])


def test_the_configuration_is_flat_for_trackers_that_want_it_so() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": ["x"], "e": None}
    assert dict(flat(tree)) == {"a.b": "1", "a.c": "{}", "d": "['x']", "e": "None"}


def test_a_password_in_an_address_is_not_shown() -> None:
    said = error_text(OSError("cannot reach postgresql://me:secret@host/db or http://host:5000/a@b"))
    assert said == "OSError: cannot reach postgresql://***@host/db or http://host:5000/a@b"


def grouped(count: int, n: int) -> list[Episode]:
    return [make_episode(f"e{g}-{i}", group=f"g{g}") for i in range(n) for g in range(count)]


@given(st.integers(0, 8), st.integers(1, 4), st.none() | st.integers(0, 10))
def test_whole_groups_are_traced_and_always_the_same(count: int, n: int, most: int | None) -> None:
    batch = grouped(count, n)
    taken = list(chosen(batch, most))
    groups = Counter(one.episode.group for one in taken)
    assert len(groups) == (count if most is None else min(count, most))
    assert set(groups.values()) <= {n}
    assert {one.sample for one in taken} == (set(range(n)) if groups else set())
    assert {one.episode.id for one in chosen(batch[::-1], most)} == {one.episode.id for one in taken}


@settings(max_examples=25)
@given(episodes())
def test_any_episode_becomes_spans_that_are_json_and_lie_within_it(episode: Episode) -> None:
    in_place = tuple(replace(turn, segment=0) for turn in episode.turns)
    trace = trace_of(replace(episode, turns=in_place), run="r", sample=0)
    json.dumps([[s.inputs, s.outputs, s.attributes] for s in trace.spans], allow_nan=False)
    calls = sum(len(turn.tool_results) for turn in episode.turns if turn.role != "assistant")
    assert len(trace.spans) == 1 + len(episode.turns) + calls
    assert all(span.parent is not None and span.parent < place for place, span in enumerate(trace.spans) if place)


def test_an_episode_is_told_turn_by_turn_with_its_times() -> None:
    base = make_episode(timings={"started": 1000.0, "total": 3.0})
    turns = (
        replace(base.turns[0], started=0.25, seconds=1.0, queued=0.1, first_token=0.2),
        replace(base.turns[1], started=1.25, seconds=0.5),
        replace(base.turns[2], started=1.75, seconds=0.25),
    )
    trace = trace_of(
        replace(base, turns=turns, step=7, validate=True), run="r", sample=2, decode=lambda ids: f"<{ids}>"
    )
    root, first, tools, call, second = trace.spans
    assert [(s.name, s.kind, s.parent) for s in trace.spans] == [
        ("episode", "AGENT", None),
        ("generate", "LLM", 0),
        ("tools", "CHAIN", 0),
        ("calculate", "TOOL", 2),
        ("generate", "LLM", 0),
    ]
    assert (root.start, root.end) == (1000.0, 1003.0)
    assert (first.start, first.end, first.attributes["queued_seconds"]) == (1000.25, 1001.25, 0.1)
    assert (call.start, call.end) == (1001.25, pytest.approx(1001.45))
    assert first.inputs == {"messages": [{"role": "user", "content": "2+3?"}]}
    assert second.inputs == {"messages": [{"role": "tool", "content": "5"}]}
    assert call.inputs == {"expression": "2+3"} and call.outputs["text"] == "5"
    assert [s.attributes["ids"] for s in (first, tools, second)] == [(5, 6, 7), (8, 9), (10,)]
    assert [s.attributes["mask"] for s in (first, tools, second)] == [(1, 1, 1), (0, 0), (1,)]
    assert first.attributes["tokens_text"] == "<(5, 6, 7)>"
    assert root.attributes["segments"][0]["prompt_text"] == "<(1, 2, 3, 4)>"
    wanted = {"step": "7", "validate": "true", "rollout_n": "2", "reward": "1.0", "stop_reason": "stop"}
    assert wanted.items() <= trace.tags.items()


def test_ids_of_traces_differ_by_run_and_episode_only() -> None:
    def number(**changes: Any) -> int:
        run = changes.pop("run", "r")
        return trace_of(make_episode(**changes), run=run, sample=0).id

    assert number() == number(reward=0.0)
    assert len({number(), number(run="s"), number(name="e1"), number(step=1), number(validate=True)}) == 5
