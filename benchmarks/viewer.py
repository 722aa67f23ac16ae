"""Measures `rally view` on a run of 100,000 episodes: indexing it once, opening it, paging, searching and scrolling.

    OMP_NUM_THREADS=1 python -m benchmarks.viewer [--episodes N] [--folder RUN] [--keep] [--indexed]

The run is made of episodes with 300 prompt tokens and 600 response tokens in three turns (about 20 KB a line; the words
are drawn from a vocabulary, so searches find some and not all). `open` is from the start of the command to the first
answer, then from the browser's navigation to rows on the screen. Exit status 1: opening took more than 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

from benchmarks.browser import Browser, find_chromium
from rally.track import RunFolder
from rally.track.run_folder.episode_json import episode_to_json
from rally.types import (
    Episode,
    Generation,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResponse,
    ToolResult,
    ToolStatus,
    Turn,
)
from rally.view.episode_index import NAME
from rally.view.run_data import open_runs

A_STEP = 512  # episodes, 8 of a group
MODELS = 64  # different episodes that the others are copies of, under other names and with other rewards
MOST_OPEN = 2.0  # seconds
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "lo", "mi", "ta")]
PORT = 8641


class Page(NamedTuple):
    name: str
    asked: dict[str, str]


PAGES = (
    Page("first page, newest first, with the count", {"count": "1"}),
    Page("lowest reward first", {"sort": "reward", "desc": "0", "count": "1"}),
    Page("validation only", {"kind": "val", "count": "1"}),
    Page("steps 50..60 with tool errors", {"step": "50..60", "errors": "1", "count": "1"}),
    Page("stopped by length, longest first", {"stop": "length", "sort": "tokens", "count": "1"}),
    Page("a word", {"text": "batalo", "count": "1"}),
    Page("two words of the question, and failed", {"text": "ban dar", "reward": "..0.5", "count": "1"}),
    Page("jump to the middle", {"skip": "50000"}),
)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) + rng.choice(WORDS) for _ in range(count))


def model_episode(rng: random.Random) -> Episode:
    def sampled(count: int) -> Generation:
        ids = tuple(rng.randrange(150_000) for _ in range(count))
        return Generation(ids=ids, logprobs=tuple(-rng.expovariate(2.0) for _ in ids), finish="stop")

    call = ToolCall(name="search", arguments={"query": words(rng, 6)})
    status = rng.choice([ToolStatus.OK] * 9 + [ToolStatus.TIMEOUT])
    result = ToolResult(call=call, status=status, response=ToolResponse(text=words(rng, 150)), seconds=rng.random())
    segment = Segment(prompt_ids=tuple(rng.randrange(150_000) for _ in range(300)))
    segment = segment.append_sampled(sampled(150)).append_observed([7] * 250).append_sampled(sampled(200))
    times = [{"started": start, "seconds": took} for start, took in ((0.0, 3.0), (3.0, 0.8), (3.8, 4.0))]
    turns = (
        Turn(
            role="assistant", text=words(rng, 80), end=150, tool_calls=(call,), queued=0.2, first_token=0.4, **times[0]
        ),
        Turn(role="tool", text=result.response.text or "", start=150, end=400, tool_results=(result,), **times[1]),
        Turn(role="assistant", text=words(rng, 100), start=400, end=600, **times[2]),
    )
    question = {"role": "user", "content": words(rng, 60)}
    return Episode(
        id="ID",
        group="GROUP",
        task=Task(
            id="TASK", data_source=rng.choice(["nq", "hotpotqa"]), prompt=(question,), ground_truth=words(rng, 2)
        ),
        stop_reason=rng.choice([StopReason.STOP] * 7 + [StopReason.LENGTH, StopReason.MAX_TURNS]),
        segments=(segment,),
        turns=turns,
        reward=-12345.0,
        step=-54321,
        timings={"started": 1.7632e9, "total": 7.9, "generate": 7.0},
    )


def write_run(path: Path, episodes: int) -> None:
    rng = random.Random(0)
    models = [json.dumps(episode_to_json(model_episode(rng))) + "\n" for _ in range(MODELS)]
    folder = RunFolder(path).create()
    for step in range(1, episodes // A_STEP + 2):
        count = min(A_STEP, episodes - (step - 1) * A_STEP)
        kind = "val" if step % 20 == 0 else "train"
        with (folder.episodes_path / f"{kind}_{step:06d}.jsonl").open("w") as file:
            file.writelines(copies(models, rng, step, count))
        folder.log_metrics(step, {"critic/rewards/mean": rng.random(), "num_turns/mean": 4.0})


def copies(models: list[str], rng: random.Random, step: int, count: int) -> Iterator[str]:
    validate = "true" if step % 20 == 0 else "false"
    for n in range(count):
        group = f"t{step:06d}-{n // 8:05d}"
        line = (
            models[rng.randrange(MODELS)].replace('"ID"', f'"{group}-{n % 8}"', 1).replace('"GROUP"', f'"{group}"', 1)
        )
        line = line.replace('"TASK"', f'"train:{n // 8 + 64 * (step % 40)}"', 1).replace("-54321", str(step), 1)
        yield line.replace("-12345.0", f"{rng.random():.3f}", 1).replace(
            '"validate": false', f'"validate": {validate}', 1
        )


def median_ms(act: Callable[[], Any], times: int = 15) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def report(name: str, value: str) -> None:
    print(f"{name:52} {value}", flush=True)


def measure_index(path: Path) -> None:
    (path / NAME).unlink(missing_ok=True)
    wall, cpu = time.perf_counter(), time.process_time()
    [run] = open_runs([path])
    run.indexer.catch_up()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    state = run.state()
    size = sum(file.stat().st_size for file in path.glob(NAME + "*"))
    report("episodes, files", f"{state['episodes']:,}, {state['bytes'] / 1e9:.2f} GB")
    report("indexing", f"{wall:.0f} s ({cpu:.0f} s of CPU), {state['episodes'] / wall:,.0f} episodes/s")
    report("size of the index", f"{size / 1e6:.0f} MB, {size / state['bytes']:.1%} of the files")


def measure_open(path: Path) -> float:
    """Seconds of the command, its first answer, and the page with its rows."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "rally.cli", "view", str(path), "--no-browser", "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{PORT}/"
    try:
        ask(url + "api/state")
        answered = time.perf_counter() - start
        report("open: command to first answer", f"{answered:.2f} s")
        measure_pages(url)
        return answered + (measure_browser(url) if find_chromium() else 0.0)
    finally:
        server.terminate()
        server.wait()


def ask(url: str) -> Any:
    end = time.monotonic() + 60
    while True:
        try:
            with urlopen(url) as answer:
                return json.loads(answer.read())
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def measure_pages(url: str) -> None:
    for page in PAGES:
        link = url + "api/runs/0/rows?" + urlencode(page.asked)
        found = ask(link)["count"]
        report(
            f"page: {page.name}",
            f"{median_ms(lambda link=link: ask(link)):.1f} ms" + (f"  ({found:,} rows)" if found else ""),
        )
    after: dict[str, str] = {}
    taken = []
    for _ in range(50):
        start = time.perf_counter()
        key = ask(url + "api/runs/0/rows?" + urlencode(after))["next"]
        taken.append(1e3 * (time.perf_counter() - start))
        if key is None:  # a small run has fewer
            break
        after = {"after": key}
    report(
        f"page: {len(taken)} pages one after the other, by their keys",
        f"{statistics.median(taken):.1f} ms each, at most {max(taken):.1f}",
    )
    row = ask(url + "api/runs/0/rows?limit=1")["rows"][0]
    link = url + "api/runs/0/episode?" + urlencode({"id": row["id"]})
    report("one episode, read by seek", f"{median_ms(lambda: ask(link)):.1f} ms")
    for name, path in (
        ("facets (steps, stop reasons, sources)", "facets"),
        ("rewards of all training steps", "rewards?kind=train"),
        ("pass rates of all training tasks", "tasks?kind=train"),
    ):
        report(name, f"{median_ms(lambda path=path: ask(url + 'api/runs/0/' + path)):.1f} ms")


SCROLL = """new Promise((done) => {
  const box = document.querySelector('.scroll'), frames = [];
  let last = performance.now(), n = 0;
  const next = (now) => {
    frames.push(now - last); last = now; box.scrollTop += 180;
    if (++n < 120) requestAnimationFrame(next); else done(frames.slice(1).sort((a, b) => a - b));
  };
  requestAnimationFrame(next);
})"""


def measure_browser(url: str) -> float:
    with Browser() as browser:
        browser.open("about:blank")
        start = time.perf_counter()
        browser.open(url + "#/episodes")
        browser.wait("document.querySelectorAll('.rows a[href]').length > 10")
        shown = time.perf_counter() - start
        report("open: navigation to rows on the screen", f"{shown:.2f} s")
        frames = browser.evaluate(SCROLL)
        report(
            "scrolling: ms a frame, median / 95 % / worst",
            " / ".join(f"{frames[int(q * (len(frames) - 1))]:.0f}" for q in (0.5, 0.95, 1)),
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the run is, or is to be made; else a temporary one")
    parser.add_argument("--keep", action="store_true", help="do not remove the run that was made")
    parser.add_argument("--indexed", action="store_true", help="the folder has its index already")
    options = parser.parse_args()
    path = options.folder or Path(tempfile.mkdtemp(prefix="rally-viewer-"))
    made = options.folder is None or not path.exists()
    if made:
        write_run(path, options.episodes)
    report("cores, load", f"{os.cpu_count()}, {os.getloadavg()[0]:.1f}")
    if not options.indexed:
        measure_index(path)
    took = measure_open(path)
    report("open: all of it", f"{took:.2f} s (must be under {MOST_OPEN})")
    if made and not options.keep:  # never remove a run that existed before
        shutil.rmtree(path)
    return int(took > MOST_OPEN)


if __name__ == "__main__":
    sys.exit(main())
