"""Rewards by step, pass rates by task, configurations and log axes: the data, and what a person sees of it."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_cases import go, make_episode, served, write_run, write_step

from benchmarks.browser import Browser
from rally.chat import ChatCodec, tiny_tokenizer
from rally.track import RunFolder
from rally.types import Episode, RallyError, StopReason
from rally.view.page_export import write_export
from rally.view.reward_tables import reward_histograms
from rally.view.run_data import RunData, open_runs

CODEC = ChatCodec(tiny_tokenizer())


def opened(path: Path) -> RunData:
    [run] = open_runs([path])
    run.indexer.catch_up()
    return run


def scored(step: int, rewards: Sequence[float | None], *, validate: bool = False, **changes: Any) -> list[Episode]:
    """One episode of a task for each reward; without one the episode has failed."""
    made = [make_episode(CODEC, step, n, 0, validate=validate) for n in range(len(rewards))]
    failed = {"stop_reason": StopReason.ERROR, "error": "it broke"}
    pairs = zip(made, rewards, strict=True)
    return [replace(e, reward=r, **(failed if r is None else {}), **changes) for e, r in pairs]


numbers = st.integers(-3, 3).map(float) | st.floats(-5, 5) | st.floats(-1e300, 1e300)


@given(st.lists(numbers | st.none(), min_size=1, max_size=25))
def test_every_reward_is_counted_once_in_the_bin_that_holds_it(rewards: list[float | None]) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE episodes(step, validate, baseline, reward)")
        db.executemany("INSERT INTO episodes VALUES (1, 0, 0, ?)", [(reward,) for reward in rewards])
        found = reward_histograms(db, "train")
    [[step, unscored, counts]] = found["steps"]
    assert (step, unscored) == (1, rewards.count(None))
    assert sum(counts) == len(rewards) - unscored and len(counts) == len(found["bins"])
    real = [reward for reward in rewards if reward is not None]
    for (low, high), count in zip(found["bins"], counts, strict=True):
        assert low == high or low < high
        slack = 1e-6 * max(1.0, abs(low), abs(high)) if low < high else 0.0
        assert count <= sum(low - slack <= reward <= high + slack for reward in real)
        if low == high:
            assert count == Counter(real)[low]


def test_many_values_are_counted_in_round_bins(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    folder.log_episodes(1, scored(1, [n / 20 for n in range(21)]))
    found = opened(tmp_path).rewards("train")
    assert found["bins"][:2] == [[0.0, 0.05], [0.05, 0.1]] and found["bins"][-1] == [0.95, 1.0]
    assert found["steps"] == [[1, 0, [1] * 19 + [2]]], "the highest reward is in the last bin"


def test_baselines_and_failed_episodes_are_no_rewards(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    folder.log_episodes(1, [*scored(1, [0.0, 1.0, None]), *scored(1, [1.0], baseline=True, id="t000001-00000-greedy")])
    run = opened(tmp_path)
    assert run.rewards("train") == {"bins": [[0.0, 0.0], [1.0, 1.0]], "steps": [[1, 1, [1, 1]]]}
    assert [one["cells"] for one in run.tasks("train")["tasks"]] == [[[1, 1, 0, 1]], [[1, 1, 1, 1]], [[1, 0, 0, 1]]]
    assert run.rewards("val") == {"bins": [], "steps": []} and run.tasks("val")["tasks"] == []


def test_a_task_is_passed_by_acc_if_it_is_reported_and_else_by_the_reward(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    first = scored(0, [0.7 + 0.2 + 0.1, 0.5], validate=True)  # a little less than 1
    folder.log_episodes(0, first, validate=True)
    folder.log_episodes(4, scored(4, [0.1, 0.5], validate=True, reward_info={"acc": True}), validate=True)
    run = opened(tmp_path)
    found = run.tasks("val")
    assert (found["threshold"], found["highest"]) == (1.0, 1.0)
    assert {one["task"]: one["cells"] for one in found["tasks"]} == {
        "v:0": [[0, 1, 1, 1], [4, 1, 1, 1]],
        "v:1": [[0, 1, 0, 1], [4, 1, 1, 1]],
    }
    assert run.tasks("val", "0.5")["tasks"][1]["cells"][0] == [0, 1, 1, 1]
    with pytest.raises(RallyError, match="pass=often is not a number"):
        run.tasks("val", "often")
    with pytest.raises(RallyError, match="it is train or val"):
        run.rewards("test")


def test_a_configuration_has_dotted_keys_and_no_secret(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.yaml").write_text("a:\n  b: [1, {c: 2}]\n  api_key: hunter22\n  d: {}\n")
    (path / "versions.json").write_text('{"torch": "2.13.0"}')
    found = opened(path).config()
    assert found["keys"] == [
        ["a.b", [1, {"c": 2}]],
        ["a.api_key", "***"],
        ["a.d", {}],
        ["versions.torch", "2.13.0"],
    ]
    (path / "versions.json").unlink()
    (path / "config.yaml").write_text("a: [")
    assert opened(path).config() == {
        "keys": [],
        "note": "config.yaml of run cannot be read (ParserError). run has no versions.json.",
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of three tasks: one is learned, one forgotten, one never passed; and one episode has no reward."""
    paths = []
    for name, rate in (("one", 0.1), ("two", 0.2)):
        path = write_run(tmp_path_factory.mktemp("rewards") / name, steps=1)
        folder = RunFolder(path)
        for step, rewards in ((0, [0.0, 1.0, 0.0]), (1, [1.0, 0.0, None])):
            folder.log_episodes(step, scored(step, rewards, validate=True), validate=True)
        folder.save_config(json.dumps({"actor": {"lr": rate, "clip": 0.2}, "model": {"path": str(path / "start")}}))
        for step in range(1, 6):
            folder.log_metrics(step, {"loss": 10.0**-step if step < 5 else 0.0, "flat": -1.0})
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def page(two: list[Path]) -> Iterator[str]:
    with served(*two) as url:
        yield url


def test_rewards_of_a_step_are_bars_that_lead_to_their_episodes(browser: Browser, page: str) -> None:
    go(browser, page + "#/rewards?kind=val", ".bars a")
    assert "Validation step 1, 2 rewards" in browser.text(".bars")
    assert browser.text(".bars div.bar").split("\n") == ["not scored", "1 episode"]
    browser.press("k")
    browser.wait("document.querySelector('.bars h2').innerText === 'Validation step 0, 3 rewards'")
    assert "step=0" in browser.evaluate("location.hash")
    browser.hover(".strip canvas")
    browser.click(".bars a.bar")
    browser.wait("document.querySelector('.scroll')?.dataset.total === '1'")
    assert browser.evaluate("location.hash").startswith("#/episodes?run=0&step=0&kind=val&reward=1")
    go(browser, page + "#/rewards", "canvas[data-steps='1']")
    assert "12 rewards" in browser.text(".bars")


TASKS = "[...document.querySelectorAll('.tasklist .task')].map(t => t.innerText.split(/\\n+/).join(' '))"


def test_tasks_are_sorted_by_what_became_of_them(browser: Browser, page: str) -> None:
    go(browser, page + "#/tasks?kind=val", ".tasklist[data-tasks='3']")
    assert [one.split()[0] for one in browser.evaluate(TASKS)] == ["v:1", "v:2", "v:0"], "the least solved first"
    browser.click(".task.th [name=change]")
    browser.wait("location.hash.includes('sort=change')")
    shown = browser.evaluate(TASKS)
    assert [one.split()[0] for one in shown] == ["v:1", "v:0", "v:2"] and "-100" in shown[0] and "+100" in shown[1]
    assert shown[2].split()[-4:] == ["0", "%", "0/1", "–"], "its last validation was not scored"
    browser.click(".task.th [name=change]")
    browser.wait(f"{TASKS}[0].startsWith('v:0')")
    assert browser.evaluate("getComputedStyle(document.querySelector('.more')).display") == "none", "all are shown"
    browser.press("/")
    browser.type("2*3")
    browser.wait("document.querySelector('.tasklist').dataset.tasks === '1'")
    go(browser, page + "#/tasks?kind=val&pass=2", ".tasklist[data-tasks='3']")
    assert browser.text(".note") == "No episode has reached a score of 2; the highest is 1."


def test_a_task_is_compared_by_a_click_or_a_key(browser: Browser, page: str) -> None:
    go(browser, page + "#/tasks?kind=val", ".tasklist[data-tasks='3']")
    browser.press("j")
    browser.press("j")
    browser.press("Enter")
    browser.wait("location.hash.startsWith('#/compare') && !!document.querySelector('.diff')")
    assert browser.text("h1") == "v:2"
    go(browser, page + "#/tasks?kind=val", ".tasklist[data-tasks='3']")
    browser.click(".tasklist a")
    browser.wait("document.querySelector('main.compare h1')?.innerText === 'v:1'")


def test_configurations_are_compared_and_searched(browser: Browser, page: str) -> None:
    go(browser, page + "#/config", ".config[data-keys='2']")
    rows = "[...document.querySelectorAll('.keys:not(.th)')].map(r => r.innerText.replaceAll('\\n', ' '))"
    shown = browser.evaluate(rows)
    assert shown[0] == "actor.lr 0.1 0.2" and shown[1].startswith("model.path")
    browser.click(".toolbar .pill")
    browser.wait("document.querySelector('.config.card').dataset.keys === '3'")
    browser.press("/")
    browser.type("clip")
    browser.wait("document.querySelector('.config.card').dataset.keys === '1'")
    assert browser.evaluate(rows) == ["actor.clip 0.2 0.2"]
    assert "all=1&text=clip" in browser.evaluate("location.hash")


def test_a_log_axis_says_what_it_cannot_show(browser: Browser, page: str) -> None:
    go(browser, page + "#/curves?m=loss|flat", "[data-metric=loss] path")
    assert not browser.evaluate("document.querySelectorAll('.left-out').length")
    browser.press("l")
    browser.wait("location.hash.includes('log=1')")
    assert browser.text("[data-metric=loss] .left-out") == "2 values are 0 or less and not drawn"
    assert "all 10 values are 0 or less" in browser.text("[data-metric=flat] .left-out")
    ticks = "[...document.querySelectorAll('[data-metric=loss] .tick.end:not(.of)')].map(t => t.textContent)"
    assert browser.evaluate(ticks) == ["1e-4", "0.001", "0.01", "0.1"]
    circles = "[...document.querySelectorAll('[data-metric=loss] .spot')].map(c => Number(c.getAttribute('cy')))"
    heights = browser.evaluate(circles)[:4]
    gaps = [round(b - a, 3) for a, b in pairwise(heights)]
    assert len(set(gaps)) == 1, "equal factors are equal distances"
    go(browser, page + "#/curves?m=loss&log=1", "[data-metric=loss] .left-out")
    browser.click(".toolbar .pill")
    browser.wait("!document.querySelector('.left-out')")


TICKS = """import('/page/chart.js').then(({ logTicks }) =>
  [[1, 1], [3, 4], [0.4, 0.95], [1.1, 1.2], [2e-9, 5e7], [1e-300, 1e300], [7, 690],
   [5.5e-14, 6.7e-14]].map((v) => logTicks(v)))"""


def test_the_ticks_of_a_log_axis_enclose_the_values(browser: Browser, page: str) -> None:
    browser.open(page)
    for (low, high), axis in zip(
        [(1, 1), (3, 4), (0.4, 0.95), (1.1, 1.2), (2e-9, 5e7), (1e-300, 1e300), (7, 690), (5.5e-14, 6.7e-14)],
        browser.evaluate(TICKS),
        strict=True,
    ):
        assert 0 < axis["low"] <= low and high <= axis["high"] and axis["low"] < axis["high"], (low, high, axis)
        assert 2 <= len(axis["found"]) <= 8
        assert len({name for _, name in axis["found"]}) == len(axis["found"]), axis["found"]


def test_new_steps_appear_in_rewards_and_tasks(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path / "run", steps=1))
    with served(folder.path) as url:
        go(browser, url + "#/rewards", "canvas[data-steps='1']")
        write_step(folder, CODEC, 2)
        browser.wait("document.querySelector('canvas').dataset.steps === '2'")
        assert "Training step 2, 12 rewards" in browser.text(".bars")
        go(browser, url + "#/tasks", ".tasklist[data-tasks='3']")
        assert browser.evaluate("document.querySelectorAll('.rate').length") == 6
        write_step(folder, CODEC, 3)
        browser.wait("document.querySelectorAll('.rate').length === 9")


def test_an_exported_file_has_rewards_tasks_and_configuration(
    browser: Browser, two: list[Path], tmp_path: Path
) -> None:
    url = write_export(open_runs(two), tmp_path / "out.html").path.as_uri()
    assert str(two[0].parent) not in (tmp_path / "out.html").read_text(), "no folders of this machine"
    go(browser, url + "#/rewards?kind=val", "canvas[data-steps='2']")
    go(browser, url + "#/tasks?kind=val&sort=change", ".tasklist[data-tasks='3']")
    go(browser, url + "#/tasks?kind=val&pass=2", ".tasklist .empty")
    assert "not in the exported file" in browser.text(".tasklist")
    go(browser, url + "#/config", ".config[data-keys='1']")
    assert "an exported file has the last part" in browser.text(".note")


@pytest.mark.parametrize("view", ["rewards", "tasks", "config", "curves?log=1"])
def test_new_views_fit_a_small_phone(browser: Browser, page: str, view: str) -> None:
    browser.resize(320, 640)
    try:
        go(browser, page + "#/" + view, ".bars a, .tasklist .task, .keys code, .chart")
        assert browser.evaluate("document.documentElement.scrollWidth") == 320
        first = "document.querySelector('main .toolbar button, main .toolbar input').getBoundingClientRect().right"
        assert browser.evaluate(first) <= 320
    finally:
        browser.resize(1360, 860)
