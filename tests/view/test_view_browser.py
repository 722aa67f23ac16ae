"""The viewer in a real Chromium: reading, hovering, typing and clicking, during a run and from an exported file."""

import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from forked import forked_command
from train_cases import run_tree, write_model, write_reward, write_tasks
from view_cases import NASTY, go, make_episode, nasty_episode, served, write_run, write_step

from benchmarks.browser import Browser
from rally.chat import ChatCodec, tiny_tokenizer
from rally.track import AdvantageSpan, RunFolder
from rally.types import StopReason
from rally.view.page_export import write_export
from rally.view.run_data import open_runs

PATIENCE = 8.0  # seconds beyond the promise, for a busy machine
ROWS = "[...document.querySelectorAll('.rows .tr')].map(r => r.querySelector('.id').innerText)"


def wait_rows(browser: Browser, count: int) -> list[str]:
    browser.wait(f"document.querySelector('.scroll')?.dataset.total === '{count}'")
    browser.wait(f"{ROWS}.every(id => id !== '·')")
    return list(browser.evaluate(ROWS))


def test_a_run_is_opened_and_its_curves_are_read_by_pointing(browser: Browser, address: str) -> None:
    go(browser, address, ".chart path")
    assert "critic/rewards/mean" in browser.text("main")
    assert "step 2 · 30 episodes" in browser.text("#bar")
    browser.hover('[data-metric="actor/entropy"] svg')
    assert browser.wait(
        "!document.getElementById('tip').hidden && document.getElementById('tip').innerText"
    ).startswith("step")
    browser.click('[data-metric="actor/entropy"] svg')
    browser.wait("location.hash.startsWith('#/timeline')")


def test_episodes_are_filtered_by_typing_and_the_filter_is_a_link(browser: Browser, address: str) -> None:
    go(browser, address + "#/episodes", ".rows a[href]")
    wait_rows(browser, 30)
    browser.press("/")
    browser.type("00002")
    assert wait_rows(browser, 10) and browser.evaluate("document.activeElement.type") == "search"
    browser.click(".choice button:nth-child(3)")
    assert wait_rows(browser, 2) == ["v000002-00002-0", "v000000-00002-1"]
    link = browser.evaluate("location.href")
    go(browser, link, ".rows a[href]")
    wait_rows(browser, 2)
    browser.click("button.plain")
    wait_rows(browser, 30)
    browser.click("button.td.reward")
    browser.wait("document.querySelector('.rows .score').innerText === '1'")
    browser.click("button.td.reward")
    browser.wait("document.querySelector('.rows .score').innerText === '0'")


def test_keys_move_open_and_go_back(browser: Browser, address: str) -> None:
    go(browser, address + "#/episodes?kind=train&sort=id&desc=0", ".rows a[href]")
    names = wait_rows(browser, 24)
    for key in "jjk":
        browser.press(key)
    assert browser.evaluate("document.querySelector('.chosen .id').innerText") == names[1]
    browser.press("Enter")
    browser.wait(f"document.querySelector('h1')?.innerText === '{names[1]}'")
    browser.press("j")
    browser.wait(f"document.querySelector('h1')?.innerText === '{names[2]}'")
    browser.press("Escape")
    browser.wait("location.hash.startsWith('#/episodes')")
    assert wait_rows(browser, 24) == names
    browser.press("?")
    assert "Enter" in str(browser.wait("document.querySelector('dialog')?.innerText"))
    browser.click("dialog h2")
    browser.wait("!document.querySelector('dialog')")
    browser.press("1")
    browser.wait("!!document.querySelector('.names input')")
    browser.click(".names input")
    browser.press("3")
    browser.wait("location.hash.startsWith('#/episodes')")


def test_only_training_episodes_are_said_to_be_trained_on(browser: Browser, address: str) -> None:
    go(browser, address + "#/episode?id=t000002-00001-1", ".turn.assistant .t")
    assert "sampled: trained on" in browser.text(".toolbar.colours")
    go(browser, address + "#/episode?id=v000002-00001-0", ".turn.assistant .t")
    browser.wait("document.querySelector('h1, main').innerText.includes('v000002-00001-0')")
    assert "trained on" not in browser.text(".toolbar.colours")


def test_every_token_tells_what_it_was(browser: Browser, address: str) -> None:
    go(browser, address + "#/episode?id=t000002-00001-1&color=advantage", ".turn.assistant .t")
    assert browser.text(".turn.tool .call").split("\n")[:2] == ["calculator", "ok"]
    assert "expression: 1*2" in browser.text(".turn.tool .call")
    browser.hover(".turn.assistant .t:nth-child(3)")
    told = browser.wait("!document.getElementById('tip').hidden && document.getElementById('tip').innerText")
    for part in ("id", "logprob", "-1.0000", "advantage", "-0.710", "weight version", "2", "sampled"):
        assert part in told, told
    assert browser.evaluate("document.querySelector('.turn.assistant .t').className") == "t minus"
    assert browser.evaluate("document.querySelector('.turn.tool .t').className") == "t observed"
    for mode, first in (("version", "t v v2"), ("mask", "t sampled"), ("logprob", "t cold")):
        browser.press("c")
        assert browser.evaluate("document.querySelector('.turn.assistant .t').className") == first
        assert f"color={mode}" in browser.evaluate("location.hash")


def test_links_lead_from_an_episode_to_its_group_its_step_and_its_past(browser: Browser, address: str) -> None:
    go(browser, address + "#/episode?id=v000002-00001-0", ".turn")
    browser.click(".top a[href*='compare']")
    marked = browser.wait("[...document.querySelectorAll('mark')].map(m => m.innerText).join(' ')")
    assert "3" in marked and "2" in marked, "the answer at step 0 was 3, at step 2 it is 2"
    go(browser, address + "#/episode?id=t000002-00001-0", ".turn")
    browser.click(".top a[href*='timeline']")
    browser.wait("document.querySelector('canvas')?.dataset.episodes === '12'")
    assert "the engine had nothing to do for" in browser.text("main")
    assert browser.evaluate(PAINTED) > 500, "lanes are drawn"
    go(browser, address + "#/group?group=t000002-00001", ".side section:nth-child(4)")
    assert "training · step 2 · 4 episodes · mean reward 0.500" in browser.text(".top")


PAINTED = """(() => {
  const c = document.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let seen = 0;
  for (let i = 0; i < d.length; i += 4) if (d[i] === 59 && d[i + 1] === 130 && d[i + 2] === 214) seen += 1;
  return seen;
})()"""


def test_dark_and_light_are_the_systems_choice_and_then_the_persons(browser: Browser, address: str) -> None:
    go(browser, address, ".chart")
    background = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate(background) == "rgb(246, 247, 249)"
    browser.press("d")
    browser.wait(f"{background} === 'rgb(14, 19, 25)'")
    go(browser, address, ".chart")
    browser.wait(f"{background} === 'rgb(14, 19, 25)'")
    browser.press("d")


def test_two_runs_are_drawn_over_each_other(browser: Browser, run_path: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=4)
    with served(run_path, other) as url:
        go(browser, url, ".chart")
        assert browser.evaluate("document.querySelectorAll('[data-metric=\"actor/entropy\"] path.line').length") == 2
        go(browser, url + "#/episodes?run=1&step=4&kind=train", ".rows a[href]")
        wait_rows(browser, 12)


def test_a_table_of_many_rows_is_scrolled_to_its_end(browser: Browser, tmp_path: Path) -> None:
    codec, folder = ChatCodec(tiny_tokenizer()), RunFolder(tmp_path / "long").create()
    folder.log_episodes(1, [make_episode(codec, 1, 7, n) for n in range(1500)])
    with served(folder.path) as url:
        go(browser, url + "#/episodes?sort=id&desc=0", ".rows a[href]")
        names = sorted(f"t000001-00007-{n}" for n in range(1500))
        browser.wait("document.querySelector('.scroll')?.dataset.total === '1500'")
        browser.press("End")
        browser.wait(f"{ROWS}.at(-1) === '{names[-1]}'")
        assert browser.evaluate("document.querySelectorAll('.rows .tr').length") < 60
        browser.press("Home")
        browser.wait(f"{ROWS}[0] === '{names[0]}'")
        go(browser, url + "#/compare?task=t:7&a=0:t000001-00007-0", ".diff")
        assert "501 of 1,500 episodes of this task" in browser.text(".top")
        chosen = browser.evaluate("[...document.querySelectorAll('option:checked')].map(o => o.innerText).join()")
        assert "t000001-00007-0," in chosen and chosen.endswith("t000001-00007-1499")


@pytest.mark.slow
def test_a_running_training_appears_as_it_goes(browser: Browser, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    write_model(tmp_path / "model")
    slow = write_reward(tmp_path)  # a step must take longer than a check of the page
    slow.write_text(slow.read_text().replace("    return", "    import time; time.sleep(0.1)\n    return"))
    out = tmp_path / "run"
    (out / "episodes").mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_tree(tmp_path, out)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with served(out) as url:
        go(browser, url + "#/episodes", ".empty")
        command = forked_command(["-m", "rally.cli", "train", str(tmp_path / "run.yaml")])
        training = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            seen = _totals(browser, training, out)
            assert training.wait(60) == 0, training.stderr.read() if training.stderr else ""
        finally:
            training.kill()
            training.wait()
        total = sum(len(file.read_text().splitlines()) for file in (out / "episodes").iterdir())
        wait_rows(browser, total)
        assert len(seen) >= 3, "steps appeared one by one"
        browser.press("1")
        browser.wait("!!document.querySelector('[data-metric=\"critic/rewards/mean\"]')")


def _totals(browser: Browser, training: subprocess.Popen[bytes], out: Path) -> set[int]:
    """The totals that the page showed during training; each file appears in the page within 2 s."""
    seen: set[int] = set()
    waiting: dict[int, float] = {}
    while training.poll() is None:
        shown = int(browser.evaluate("document.querySelector('.scroll')?.dataset.total ?? '0'"))
        seen.add(shown)
        written = sum(file.read_text().count("\n") for file in (out / "episodes").glob("[tv]*.jsonl"))
        waiting.setdefault(written, time.monotonic())
        ago = time.monotonic() - 2.0 - PATIENCE
        late = [count for count, since in waiting.items() if count > shown and since < ago]
        assert not late, f"{late} episodes were written and are not shown"
        time.sleep(0.05)
    return seen


def test_an_exported_file_is_the_same_page_without_a_server(browser: Browser, run_path: Path, tmp_path: Path) -> None:
    written = write_export(open_runs([run_path]), tmp_path / "out.html")
    assert written.episodes == 15 and written.left_out == 15
    url = written.path.as_uri()
    go(browser, url, ".chart path")
    assert "15 of 30 episodes (training step 2, validation step 2); 15 were left out" in browser.text("#notes")
    go(browser, url + "#/episodes?kind=train&stop=length", ".rows a[href]")
    assert wait_rows(browser, 3) == ["t000002-00000-3", "t000002-00001-3", "t000002-00002-3"]
    browser.click(".rows a")
    browser.wait("document.querySelector('.turn.assistant .t')?.className === 't sampled'")
    browser.hover(".turn.assistant .t:nth-child(2)")
    assert "advantage" in browser.wait(
        "!document.getElementById('tip').hidden && document.getElementById('tip').innerText"
    )
    go(browser, url + "#/timeline", "canvas[data-episodes='12']")
    go(browser, url + "#/group?group=t000002-00001", ".side section:nth-child(4)")
    go(browser, url + "#/compare", ".diff")
    go(browser, url + "#/episode?id=t000001-00000-0", ".empty")
    assert "not in the exported file" in browser.text(".empty")
    go(browser, url + "#/timeline?step=1", ".said")
    browser.wait("document.querySelector('.said').innerText.includes('not in the exported file')")
    browser.click("[aria-label='step after']")
    browser.wait("document.querySelector('canvas').dataset.episodes === '12'")


def test_many_runs_without_episodes_fit_into_one_file(browser: Browser, run_path: Path, tmp_path: Path) -> None:
    runs = [Path(shutil.copytree(run_path, tmp_path / f"a_run_with_a_long_name_{n}")) for n in range(9)]
    url = write_export(open_runs(runs), tmp_path / "out.html", "step=900&kind=val").path.as_uri()
    go(browser, url, ".chart path")
    assert browser.text("#notes") == "What is in this file"
    assert len(set(browser.evaluate("[...document.querySelectorAll('.legend [class]')].map(e => e.className)"))) == 9
    widths = "[...document.querySelectorAll('.chart header')].map(e => e.scrollWidth - e.clientWidth)"
    assert not any(browser.evaluate(widths)), "nothing is wider than its card"
    titles = "[...document.querySelectorAll('.chart h2')].map(e => e.clientWidth)"
    assert min(browser.evaluate(titles)) > 50
    for view, words in (("timeline", ".said"), ("episodes", ".empty"), ("compare", ".empty")):
        go(browser, f"{url}#/{view}", words)
        wanted = json.dumps("No episodes of this run are in the file")
        browser.wait(f"document.querySelector('{words}').innerText.includes({wanted})")


def test_lanes_of_episodes_left_out_of_an_export_are_told_and_lead_nowhere(
    browser: Browser, run_path: Path, tmp_path: Path
) -> None:
    written = write_export(open_runs([run_path]), tmp_path / "out.html", "step=2&kind=train&sort=id&desc=0", 5)
    go(browser, written.path.as_uri() + "#/timeline?step=2", "canvas[data-episodes='12']")
    assert "7 episodes are drawn here and not in this file." in browser.text(".said")
    where = browser.evaluate("location.hash")
    browser.evaluate(CLICK_LAST_LANE)
    assert browser.evaluate("location.hash") == where


CLICK_LAST_LANE = """(() => {
  const canvas = document.querySelector('canvas'), box = canvas.getBoundingClientRect();
  const at = { clientX: box.left + 300, clientY: box.bottom - 12, bubbles: true };
  canvas.dispatchEvent(new MouseEvent('click', at));
})()"""


def test_an_export_holds_what_was_asked_for(run_path: Path, tmp_path: Path) -> None:
    runs = open_runs([run_path])
    written = write_export(runs, tmp_path / "one.html", "group=t000001-00002", 3)
    page = written.path.read_text()
    assert written.episodes == 3 and "What is 2*3?" in page and "What is 1*2?" not in page
    assert str(run_path.parent) not in page, "where it lies on this machine is nobody's business"


def test_what_went_wrong_is_in_an_export_without_the_paths_of_this_machine(tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path / "run"))
    folder.save_config("actor_rollout_ref: {model: {path: /no/such/model}}")
    (folder.episodes_path / "train_000007.jsonl").write_text('{"id": "half an epis', encoding="utf-8")
    page = write_export(open_runs([folder.path]), tmp_path / "out.html").path.read_text()
    assert "byte 0 of run/episodes/train_000007.jsonl is not an episode" in page and "there was no tokenizer" in page
    assert str(tmp_path) not in page and "/no/such/model" not in page


@pytest.mark.parametrize("exported", [False, True])
def test_texts_that_would_act_are_inert(browser: Browser, tmp_path: Path, exported: bool) -> None:
    """HTML, scripts, ANSI codes, emoji, right-to-left and a megabyte, in every field that has text."""
    folder = RunFolder(write_run(tmp_path / NASTY.replace("/", "_")[:60].replace("\x00", "")))
    long = NASTY + "x" * 1_000_000 + NASTY
    folder.log_episodes(3, [nasty_episode(long)])
    folder.log_metrics(3, {NASTY: 1.0, "critic/rewards/mean": 0.5})
    folder.log_phase(3, NASTY, 1.0, 2.0)
    folder.save_config(yaml.safe_dump({NASTY: NASTY, "model": {"path": "/nowhere"}}))
    name = quote(long[:300], safe="")
    links = {
        "": ".chart", f"#/curves?m={quote(NASTY, safe='')}": ".chart", "#/timeline?step=3": "canvas[data-episodes]",
        "#/episodes?step=3": ".rows a[href]", f"#/episode?id={name}": ".turn", f"#/group?group={name}": ".side section",
        f"#/compare?task={name}": ".diff", f"#/{name}": ".chart", f"#/episodes?text={name}&group={name}": ".filters",
        f"#/tasks?text={name[:30]}": ".tasklist[data-tasks]", "#/tasks": ".tasklist .task", "#/config": ".keys code",
        "#/rewards?step=3": ".bars",
    }  # fmt: skip
    with served(folder.path) as url:
        if exported:
            url = write_export(open_runs([folder.path]), tmp_path / "out.html", "step=3").path.as_uri()
        for link, ready in links.items():
            go(browser, url + link, ready)
            made = browser.evaluate(
                "document.querySelectorAll('img, iframe, svg[onload], script:not([type]), b > script').length"
            )
            assert made == 0 and browser.evaluate("window.acted") is None, link
            assert not browser.evaluate(r"/[\u0007\u001b\u202a-\u202e]/.test(document.body.innerText)"), link
    go(browser, url, ".chart") if exported else None


def test_a_long_text_is_cut_with_a_word_and_shown_when_asked_for(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path / "run"))
    folder.log_episodes(3, [nasty_episode("yyyyyyyyy " * 100_000)])
    with served(folder.path) as url:
        go(browser, url + "#/episode?id=" + quote("yyyyyyyyy " * 30), ".turn .more")
        assert browser.text(".turn .more") == "show 980,000 more characters"
        browser.evaluate("document.querySelector('.turn .more').click()")
        browser.wait("[...document.querySelectorAll('.turn pre')].some(p => p.textContent.length === 1000000)")


def test_a_link_to_an_episode_that_is_not_read_yet_shows_it_later(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with served(path) as url:
        go(browser, url + "#/episode?id=t000003-00000-1", ".empty")
        assert "it may not be indexed yet" in browser.text(".empty")
        write_step(RunFolder(path), ChatCodec(tiny_tokenizer()), 3)
        browser.wait("document.querySelector('h1')?.innerText === 't000003-00000-1'")
    assert all("404" in line for line in browser.said)
    browser.said.clear()


def test_rows_that_come_do_not_move_what_a_person_chose(browser: Browser, tmp_path: Path) -> None:
    folder, codec = RunFolder(write_run(tmp_path / "run")), ChatCodec(tiny_tokenizer())
    with served(folder.path) as url:
        go(browser, url + "#/episodes", ".rows a[href]")
        names = wait_rows(browser, 30)
        browser.press("j")
        browser.press("j")
        write_step(folder, codec, 3)
        wait_rows(browser, 42)
        assert browser.evaluate(CHOSEN) == names[2]
        browser.wait("[...document.querySelectorAll('.pill small')].map(n => n.innerText).join() === '33,9'")
        order = browser.evaluate("[...document.querySelectorAll('.rows .tr')].map(r => Number(r.ariaRowIndex))")
        assert order == sorted(order), "read aloud in the order they are seen in"
        browser.press("Enter")
        browser.wait(f"document.querySelector('h1')?.innerText === '{names[2]}'")
        write_step(folder, codec, 4)
        browser.wait("document.getElementById('live').dataset.episodes === '54'")
        browser.press("j")
        browser.wait(f"document.querySelector('h1')?.innerText === '{names[3]}'")
        browser.press("Escape")
        browser.wait(f"{CHOSEN} === '{names[3]}'")


CHOSEN = "document.querySelector('.chosen .id')?.innerText"


def test_every_view_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    folder, codec = RunFolder(write_run(tmp_path / "run")), ChatCodec(tiny_tokenizer())
    with served(folder.path) as url:
        go(browser, url + "#/timeline?step=3", ".said")
        write_step(folder, codec, 3)
        browser.wait("document.querySelector('canvas').dataset.episodes === '12'")
        go(browser, url + "#/compare?task=t:0&a=0:t000003-00000-1", ".diff")
        assert "12 episodes of this task" in browser.text(".top")
        late = [make_episode(codec, 4, 0, sample) for sample in range(3)]
        folder.log_episodes(4, late)
        browser.wait("document.querySelector('.top').innerText.includes('15 episodes of this task')")
        assert "t000004-00000-2" in browser.text(".diff header:nth-child(2) option:checked")
        go(browser, url + "#/group?group=t000004-00000", ".side section:nth-child(3)")
        assert "advantage" not in browser.text("main")
        folder.log_advantages(4, {one.id: [[AdvantageSpan(0.5, 0, 3)]] for one in late})
        folder.log_metrics(4, {"critic/rewards/mean": 0.5})
        browser.wait("document.querySelector('main').innerText.includes('advantage 0.5')")
        folder.log_episodes(4, [*late, make_episode(codec, 4, 0, 3)])
        browser.wait("!!document.querySelector('.side section:nth-child(4)')")


def test_a_group_shows_a_prompt_once_only_where_all_begin_with_it(browser: Browser, tmp_path: Path) -> None:
    folder, codec = RunFolder(write_run(tmp_path / "run")), ChatCodec(tiny_tokenizer())
    failed, one, other = (make_episode(codec, 3, 0, sample) for sample in range(3))
    ids = codec.encode_prompt([{"role": "user", "content": "a plan of its own"}])
    [segment, *rest] = other.segments
    rewritten = replace(other, segments=(replace(segment, prompt_ids=ids), *rest))
    folder.log_episodes(
        3,
        [
            replace(failed, segments=(), turns=(), reward=9.0, stop_reason=StopReason.ERROR, error="it broke"),
            one,
            other,
        ],
    )
    folder.log_episodes(4, [replace(e, id=e.id.replace("t000003", "t000004"), group="own") for e in (one, rewritten)])
    with served(folder.path) as url:
        for group, prompts in (("t000003-00000", [1, 0]), ("own", [0, 2])):
            go(browser, url + f"#/group?group={group}", ".side section:nth-child(2)")
            shown = [f"main > {where}" for where in (".turn.prompt", ".side .turn.prompt")]
            assert [browser.evaluate(f"document.querySelectorAll('{one}').length") for one in shown] == prompts
        assert "a plan of its own" in browser.text(".side")


def test_an_older_answer_never_covers_a_newer_one(browser: Browser, address: str) -> None:
    browser.open(address)
    shown = browser.evaluate(OLDER_LAST)
    assert shown == ["second", "fails: fourth"]


OLDER_LAST = """import('/page/live.js').then(async ({ live }) => {
  const seen = [], answers = [];
  const view = live({
    about: () => 'one', ask: () => new Promise((...both) => answers.push(both)), show: (what) => seen.push(what),
    fail: (problem) => seen.push('fails: ' + problem),
  });
  const asked = [view.load(), view.load()];
  answers[1][0]('second');
  answers[0][0]('first');
  await Promise.all(asked);
  view.refresh();  // nothing changed, nothing is asked
  const third = view.load();
  const fourth = view.load();
  answers[3][1]('fourth');
  answers[2][0]('third');
  await Promise.all([third, fourth]);
  const last = view.load();
  view.close();
  answers[4][0]('fifth');
  await last;
  return seen;
})"""


def test_live_metrics_are_followed(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with served(path) as url:
        go(browser, url, ".chart")
        write_step(RunFolder(path), ChatCodec(tiny_tokenizer()), 3)
        since = time.monotonic()
        browser.wait("document.getElementById('live').innerText.includes('step 3 · 42 episodes')")
        assert time.monotonic() - since < 2.0 + PATIENCE


def test_a_sampled_episode_is_compared_with_a_sampled_one(browser: Browser, tmp_path: Path) -> None:
    folder, codec = RunFolder(tmp_path / "passes").create(), ChatCodec(tiny_tokenizer())
    for step in (0, 10):
        sampled = make_episode(codec, step, 0, 0, validate=True)
        greedy = replace(sampled, id=f"v{step:06d}-00000-greedy-0")
        folder.log_episodes(step, [sampled, greedy], validate=True)
    with served(folder.path) as url:
        for sample in ("0", "greedy-0"):
            left, right = f"v000000-00000-{sample}", f"v000010-00000-{sample}"
            go(browser, f"{url}#/compare?task=v:0&a=0:{left}", ".diff")
            chosen = "[...document.querySelectorAll('.diff select')].map((one) => one.value)"
            assert browser.wait(chosen) == [f"0:{left}", f"0:{right}"]


def test_a_heading_that_is_sorted_by_is_not_cut_and_a_tree_of_values_begins_at_the_left(
    browser: Browser, tmp_path: Path
) -> None:
    folder, codec = RunFolder(tmp_path / "headings").create(), ChatCodec(tiny_tokenizer())
    more = {"interaction": {"name": "teacher", "info": [{}]}}
    folder.log_episodes(1, [replace(make_episode(codec, 1, 0, 0), extra=more)])
    with served(folder.path) as url:
        for column in ("errors", "sampled", "calls", "turns", "seconds"):
            go(browser, f"{url}#/episodes?sort={column}", ".rows .tr")
            cut = "[...document.querySelectorAll('.th button')].filter((one) => one.scrollWidth > one.clientWidth)"
            assert browser.evaluate(f"{cut}.map((one) => one.textContent)") == []
        go(browser, f"{url}#/episode?id=t000001-00000-0", ".facts .whole")
        assert browser.evaluate("getComputedStyle(document.querySelector('.whole .value')).textAlign") == "left"
