"""Makes the pictures of docs/viewer.md: screenshots by Chromium of the given run folders.

    rally demo --out runs/demo
    python -m benchmarks.viewer_images runs/demo [runs/agents]

The second run is one of `benchmarks/branching_agent.py`; without it the pictures of agents stay as they are.

Needs Chromium (`make chromium`) and Pillow, which compresses the files.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvicorn
from PIL import Image

from benchmarks.browser import Browser
from rally.view.run_data import RunData, open_runs
from rally.view.server import create_app

IMAGES = Path(__file__).parents[1] / "docs/images"
SIZE = (1360, 860)
COLORS = 128  # of each kind, see small()
TIP = "!document.getElementById('tip').hidden"


class Shot(NamedTuple):
    """A link, the element to wait for, and the position of the pointer."""

    name: str
    link: str
    ready: str
    hover: str = ""
    dark: bool = False


def shots(run: RunData) -> list[Shot]:
    """Views of early steps, whose groups still have mixed rewards."""
    group = _mixed_group(run.rows({"step": "1", "kind": "train", "limit": "1000"})["rows"])
    failed = run.rows({"errors": "1", "kind": "train", "limit": "1"})["rows"][0]["id"]
    last = max(step for step, validate, *_ in run.facets()["steps"] if not validate) - 1  # without a validation
    return [
        Shot("viewer_curves", "#/curves?smooth=0.3", ".chart path", '[data-metric="critic/rewards/mean"] svg'),
        Shot("viewer_timeline", f"#/timeline?step={last}", "canvas[data-episodes]"),
        Shot("viewer_episodes", "#/episodes?reward=..0.5&sort=errors", ".rows a[href]"),
        Shot(
            "viewer_episode", f"#/episode?id={failed}&color=logprob", ".turn .t", ".turn.assistant .cold:nth-child(3)"
        ),
        Shot("viewer_group", f"#/group?group={group}&color=advantage", ".side .t"),
        Shot("viewer_compare", "#/compare", ".diff"),
        Shot("viewer_rewards", "#/rewards?step=3", ".bars a"),
        Shot("viewer_tasks", "#/tasks?kind=val&sort=last", ".tasklist .task"),
        Shot("viewer_dark", f"#/timeline?step={last}", "canvas[data-episodes]", dark=True),
    ]


def agent_shots(run: RunData) -> list[Shot]:
    """Views of the run of an agent, which is the first, beside the demo."""
    rows = run.rows({"step": "1", "kind": "train", "stop": "stop", "turns": "10..", "limit": "1"})["rows"]
    return [
        Shot("viewer_branches", f"#/episode?id={rows[0]['id']}", ".treemap"),
        Shot("viewer_agents", "#/timeline?step=1", "canvas[data-episodes]"),
        Shot("viewer_config", "#/config", ".keys code"),
    ]


def _mixed_group(rows: list[dict[str, Any]]) -> str:
    """A group in which few samples got a reward."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        rewards.setdefault(row["grp"], []).append(row["reward"])
    return min((group for group in rewards if sum(rewards[group]) > 1), key=lambda group: sum(rewards[group]))


def serve(*runs: RunData) -> tuple[uvicorn.Server, str]:
    server = uvicorn.Server(uvicorn.Config(create_app(runs), port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"


def take(browser: Browser, url: str, shot: Shot) -> None:
    browser.open("about:blank")
    browser.open(url + shot.link)
    browser.wait(f"!!document.querySelector({shot.ready!r})")
    time.sleep(0.5)
    if shot.hover:
        browser.hover(shot.hover)
        browser.wait(TIP)
    path = IMAGES / f"{shot.name}.png"
    browser.screenshot(path)
    with Image.open(path) as picture:
        small(picture.convert("RGB")).save(path, optimize=True)


def small(picture: Image.Image) -> Image.Image:
    """Reduce the picture to few colours: the most frequent ones exactly, so that surfaces keep theirs, and some
    from everywhere, so that a small dot does. Each pixel gets the nearest of them; Pillow's own search is inexact.
    """
    pixels = np.asarray(picture).astype(np.int64) @ (65536, 256, 1)
    codes, where, counts = np.unique(pixels, return_inverse=True, return_counts=True)
    colors = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1)
    spread = picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE).getpalette() or []
    chosen = np.concatenate([colors[np.argsort(-counts)[:COLORS]], np.reshape(spread, (-1, 3))])
    nearest = ((colors[:, None] - chosen[None]) ** 2).sum(axis=2).argmin(axis=1)
    found = Image.fromarray(nearest[where].reshape(pixels.shape).astype(np.uint8)).convert("P")
    found.putpalette(chosen.flatten().tolist())
    return found


def main() -> None:
    demo, *agents = map(Path, sys.argv[1:])
    IMAGES.mkdir(exist_ok=True)
    make([demo], shots)
    if agents:
        make([*agents, demo], agent_shots)


def make(paths: Sequence[Path], chosen: Callable[[RunData], list[Shot]]) -> None:
    """The pictures that `chosen` names for the first of these runs."""
    runs = open_runs(paths)
    for run in runs:
        run.indexer.catch_up()
    wanted = chosen(runs[0])
    server, url = serve(*runs)
    for dark in {shot.dark for shot in wanted}:
        with Browser(*SIZE, dark=dark) as browser:
            for shot in wanted:
                if shot.dark == dark:
                    take(browser, url, shot)
    server.should_exit = True


if __name__ == "__main__":
    main()
