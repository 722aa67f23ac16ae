"""The index agrees with the files, whatever happened to them since it was built."""

import errno
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from track.track_episodes import episodes
from view_cases import make_episode, write_run, write_step

from rally.chat import ChatCodec, tiny_tokenizer
from rally.track import RunFolder
from rally.track.run_folder.episode_json import episode_to_json
from rally.types import Episode, RallyError, Turn
from rally.view import episode_index as index_module
from rally.view import episode_index as indexer_module
from rally.view.episode_index import Index, IndexedFile, list_files
from rally.view.episode_query import Neighbours, Query
from rally.view.episode_rows import searched, shown, summarize
from rally.view.run_data import RunData, open_runs


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(tiny_tokenizer())


def opened(path: Path) -> RunData:
    [run] = open_runs([path])
    run.indexer.catch_up()
    return run


def ids(run: RunData, **asked: str) -> list[str]:
    return [row["id"] for row in run.rows({"limit": "1000", **asked})["rows"]]


@pytest.fixture(scope="module")
def small(run_path: Path) -> RunData:
    return opened(run_path)


def test_rows_are_what_was_recorded(small: RunData) -> None:
    [row] = small.rows({"id": "t000002-00001-2"})["rows"]
    expected = {
        "step": 2,
        "validate": 0,
        "reward": 1.0,
        "stop": "stop",
        "turns": 4,
        "calls": 1,
        "errors": 1,
        "seconds": 0.8,
    }
    assert row.items() >= expected.items()
    assert (row["question"], row["answer"]) == ("What is 1*2?", "#### 2")
    assert small.state()["episodes"] == 2 * 12 + 2 * 3


def test_new_files_are_added_and_the_others_are_not_read_again(tmp_path: Path, codec: ChatCodec) -> None:
    run = opened(write_run(tmp_path / "run"))
    before = dict(numbers(run))
    write_step(RunFolder(run.path), codec, 3)
    run.indexer.catch_up()
    assert before.items() <= dict(numbers(run)).items()
    assert len(ids(run, step="3")) == 12


def numbers(run: RunData) -> list[tuple[str, int]]:
    with closing(run.index.connect()) as db:
        return db.execute("SELECT id, n FROM episodes").fetchall()


def test_a_file_that_is_written_anew_or_set_aside_leaves_nothing_behind(tmp_path: Path, codec: ChatCodec) -> None:
    run = opened(write_run(tmp_path / "run"))
    folder = RunFolder(run.path)
    old = make_episode(codec, 2, 0, 0)
    folder.log_episodes(2, [replace(old, turns=(Turn(role="assistant", text="xylophone"),))])
    folder.rewind(2)
    run.indexer.catch_up()
    assert ids(run, step="2", kind="train") == [old.id]
    assert ids(run, text="xylophone") == [old.id]
    assert run.episode(old.id)["turns"][0]["text"] == "xylophone"
    folder.rewind(1)
    run.indexer.catch_up()
    assert ids(run, step="2") == [] and ids(run, text="xylophone") == []


def test_indexing_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHUNK", 5)
    path = write_run(tmp_path / "run")
    index = Index(path)
    files = list_files(index.episodes)
    with closing(index.connect()) as db:
        first = next(file for file in files if file.name == "train_000001.jsonl")
        assert not index.read_chunk(db, first)
        monkeypatch.setattr(index, "_add", _broken)
        with pytest.raises(KeyboardInterrupt):
            index.read_chunk(db, first)
    run = opened(path)
    assert len(ids(run)) == len(set(ids(run))) == 30


def _broken(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_newest_steps_are_read_first(run_path: Path) -> None:
    index = Index(run_path)
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.execute("CREATE TABLE files(name, done)")
        names = [file.name for file in index.unread(empty, list_files(index.episodes))]
    assert names == ["val_000002.jsonl", "train_000002.jsonl", "train_000001.jsonl", "val_000000.jsonl"]


def test_an_index_that_is_broken_or_of_another_format_is_made_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    run = opened(path)
    with closing(run.index.connect()) as db:
        db.execute("PRAGMA user_version = 99")
    assert len(ids(opened(path))) == 30
    run.index.path.write_bytes(b"this is no database " * 400)
    assert len(ids(opened(path))) == 30


def test_a_folder_that_cannot_be_written_is_indexed_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writable: Callable[..., bool] = os.access
    monkeypatch.setattr(os, "access", lambda where, mode: Path(where) != path and writable(where, mode))
    run = opened(path)
    assert len(ids(run)) == 30
    assert run.index.path.is_relative_to(tmp_path / "cache") and not (path / index_module.NAME).exists()


def test_a_spoiled_file_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "episodes/train_000007.jsonl").write_text('{"id": "half an epis', encoding="utf-8")
    run = opened(path)
    assert len(ids(run)) == 30
    [problem] = run.state()["problems"]
    assert "byte 0 of run/episodes/train_000007.jsonl is not an episode" in problem
    assert run.state()["read"] == run.state()["bytes"], "it is not waited for"


@pytest.mark.parametrize("removed", [False, True])
def test_a_spoiled_file_that_went_or_became_whole_is_forgiven(tmp_path: Path, codec: ChatCodec, removed: bool) -> None:
    path = write_run(tmp_path / "run")
    spoiled = path / "episodes/train_000003.jsonl"
    spoiled.write_text('{"id": "half an epis', encoding="utf-8")
    run = opened(path)
    assert run.state()["problems"]
    if removed:
        spoiled.unlink()
    else:
        write_step(RunFolder(path), codec, 3)
    run.indexer.catch_up()
    assert run.state()["problems"] == [] and len(ids(run)) == (30 if removed else 42)


def test_a_file_that_is_gone_before_it_is_looked_at_is_no_file(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "episodes/train_000009.jsonl").symlink_to(tmp_path / "nowhere")
    assert len(ids(opened(path))) == 30


def test_a_file_that_cannot_be_read_is_named_and_read_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", _forbidding("train_000002.jsonl"))
        run = opened(path)
        assert run.state()["problems"] == ["run/episodes/train_000002.jsonl cannot be read (Permission denied)"]
        assert len(ids(run)) == 18, "the others are not held up"
    run.indexer.catch_up()
    assert run.state()["problems"] == [] and len(ids(run)) == 30


def _forbidding(name: str) -> Callable[..., Any]:
    real = Path.open

    def forbidding(self: Path, *how: Any, **more: Any) -> Any:
        if self.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, *how, **more)

    return forbidding


def test_a_folder_that_fails_once_is_followed_on(
    tmp_path: Path, codec: ChatCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(write_run(tmp_path / "run"))
    broken = threading.Event()

    def failing(folder: Path) -> list[IndexedFile]:
        if broken.is_set():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return list_files(folder)

    monkeypatch.setattr(indexer_module, "list_files", failing)
    with following(run):
        broken.set()
        wait_for(lambda: "The run run cannot be read" in str(run.state()["problems"]))
        broken.clear()
        write_step(RunFolder(run.path), codec, 3)
        wait_for(lambda: run.state()["episodes"] == 42 and not run.state()["problems"])


def test_an_index_removed_under_a_running_viewer_is_made_anew(tmp_path: Path) -> None:
    run = opened(write_run(tmp_path / "run"))
    with following(run):
        before = run.state()["revision"]
        run.index.path.unlink()
        with suppress(sqlite3.OperationalError):
            run.facets()  # a concurrent request does not create an empty index
        wait_for(lambda: run.state()["revision"] > before and run.index.path.exists() and len(ids(run)) == 30)


@contextmanager
def following(run: RunData) -> Iterator[None]:
    run.indexer.start()
    try:
        yield
    finally:
        run.indexer.close()


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_words_phrases_and_beginnings_are_found(tmp_path: Path, codec: ChatCodec) -> None:
    folder = RunFolder(tmp_path / "run").create()
    said = ["The quick brown fox", "brown the fox quickly", "强化学习 agents", "naïve café"]
    episodes = [make_episode(codec, 1, n, 0) for n in range(len(said))]
    folder.log_episodes(
        1, [replace(e, turns=(Turn(role="assistant", text=t),)) for e, t in zip(episodes, said, strict=True)]
    )
    run = opened(folder.path)

    def found(text: str) -> list[int]:
        return sorted(int(name.split("-")[1]) for name in ids(run, text=text))

    assert found("brown") == found("FOX brown") == [0, 1]
    assert found('"quick brown"') == [0] and found("qui") == [0, 1] and found("quick ") == [0]
    assert found("强化学习") == found("化学") == [2] and found("习学") == []
    assert found("naive cafe") == [3]
    assert found("t000001-00003-0") == [3]


@settings(max_examples=50)
@given(episodes())
def test_whatever_was_recorded_has_a_row_and_can_be_shown(episode: Episode) -> None:
    recorded = json.loads(json.dumps(episode_to_json(episode)))
    row = summarize(recorded)
    assert (row.step, row.stop, row.turns) == (episode.step, episode.stop_reason, episode.num_turns)
    assert row.tokens == sum(len(segment.response_ids) for segment in episode.segments)
    assert row.reward == (episode.reward if math.isfinite(episode.reward or 0.0) else None)
    with closing(sqlite3.connect(":memory:")) as db:
        assert db.execute("SELECT ?, ?", (searched(recorded), row.question)).fetchone()[1] == row.question
    json.dumps([shown(value) for value in recorded.values()], allow_nan=False)


@given(st.text(max_size=20) | st.sampled_from(['"', "***", 'AND NOT "x', "NEAR(a b)", "a\x00b", 'x" OR "']))
def test_whatever_is_typed_is_no_error(small: RunData, text: str) -> None:
    assert small.rows({"text": text, "count": "1"})["count"] <= 30


RANGES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "step=2": lambda row: row["step"] == 2,
    "step=1..": lambda row: row["step"] >= 1,
    "reward=..0.5": lambda row: row["reward"] <= 0.5,
    "kind=val": lambda row: row["validate"] == 1,
    "kind=train": lambda row: row["validate"] == 0,
    "stop=length": lambda row: row["stop"] == "length",
    "stop=length,error": lambda row: row["stop"] in ("length", "error"),
    "errors=1": lambda row: row["errors"] > 0,
    "turns=2..3": lambda row: 2 <= row["turns"] <= 3,
    "group=t000001-00002": lambda row: row["grp"] == "t000001-00002",
}


@given(
    st.lists(st.sampled_from(sorted(RANGES)), unique_by=lambda f: f.split("=")[0], max_size=3),
    st.sampled_from(["step", "reward", "id", "errors", "question", "tokens"]),
    st.booleans(),
    st.integers(1, 7),
)
def test_pages_one_after_the_other_are_the_whole_table(
    small: RunData, filters: list[str], sort: str, desc: bool, size: int
) -> None:
    everything = small.rows({"limit": "1000"})["rows"]
    wanted = [row for row in everything if all(RANGES[name](row) for name in filters)]
    query = Query.parse({**dict(f.split("=") for f in filters), "sort": sort, "desc": str(int(desc))})
    pages, after = [], None
    with closing(small.index.connect()) as db:
        assert query.count(db) == len(wanted)
        while True:
            page = query.page(db, after, limit=size)
            pages += page.rows
            after = page.next
            if after is None:
                break
        skipped = query.page(db, None, skip=size, limit=size).rows
    assert sorted(row["id"] for row in pages) == sorted(row["id"] for row in wanted)
    assert [row[sort] for row in pages] == sorted((row[sort] for row in wanted), reverse=desc)
    assert skipped == pages[size : 2 * size]
    names = [row["id"] for row in pages]
    with closing(small.index.connect()) as db:
        found = [query.beside(db, name) for name in names]
        assert query.beside(db, "nobody") == Neighbours()
    assert found == [
        Neighbours(*one) for one in zip(range(len(names)), [None, *names], [*names[1:], None], strict=False)
    ]


def test_episodes_without_a_reward_are_sorted_below_all_others(tmp_path: Path, codec: ChatCodec) -> None:
    folder = RunFolder(tmp_path / "run").create()
    rewards = [0.5, None, -3.0, None, 1.0]
    folder.log_episodes(1, [replace(make_episode(codec, 1, n, 0), reward=r) for n, r in enumerate(rewards)])
    run, seen, after = opened(folder.path), [], None
    for _ in rewards:
        page = run.rows({"sort": "reward", "desc": "1", "limit": "1", **({"after": after} if after else {})})
        seen += [row["reward"] for row in page["rows"]]
        after = page["next"]
    assert seen == [1.0, 0.5, -3.0, None, None]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"stepp": "1"}, "there is no filter stepp"),
        ({"step": "one"}, "step=one is not a number"),
        ({"kind": "test"}, "it is train or val"),
        ({"sort": "n; DROP TABLE episodes"}, "cannot sort by"),
        ({"after": "x"}, "is not a key"),
    ],
)
def test_a_filter_that_means_nothing_is_one_sentence(small: RunData, asked: dict[str, str], told: str) -> None:
    with pytest.raises(RallyError, match=told):
        small.rows(asked)


def test_an_older_record_without_the_times_of_turns_is_shown(tmp_path: Path, codec: ChatCodec) -> None:
    folder = RunFolder(write_run(tmp_path / "run"))
    file = folder.episodes_path / "train_000001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        del line["timings"]["started"]
        for turn in line["turns"]:
            del turn["queued"], turn["first_token"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = opened(folder.path)
    kinds = {lane[0] for episode in run.timeline(1)["episodes"] for lane in episode["lanes"]}
    assert kinds == {"decode", "tool", "score"}
    assert {lane[0] for e in run.timeline(2)["episodes"] for lane in e["lanes"]} == kinds | {"queue", "prefill"}
