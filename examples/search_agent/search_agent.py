"""Trains a small transformer from random weights to look facts up in a real search server, on one CPU core in minutes.

    python examples/search_agent/search_agent.py [--seed 0] [--steps 20] [--out runs/search_agent] [KEY=VALUE ...]

The script writes a corpus, indexes it with BM25 and starts `rally serve retrieval` on a free port. The model is
fine-tuned to search, then deliberately degraded. GRPO then repairs it with a reward for exact match alone. The test
uses entities that no training question was about. Needs: pip install "rally-rl[search,services]"
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import facts
import httpx

from rally.demo.training_stages import Course, CourseResult, CourseSettings, run_course
from rally.retrieval import IndexSpec, build_index
from rally.track import RunConsole
from rally.types import RallyError

COURSE = Course(
    title="An agent learns to search",
    data_source=facts.DATA_SOURCE,
    write_data=facts.write_data,
    tell=facts.tell,
    habits=facts.HABITS,
    tools=Path(__file__).with_name("tools.yaml"),
    words=facts.WORDS,
    tool_chars=96,
)
SETTINGS = CourseSettings(clean_blocks=(150, 75, 75), habit_steps=50, grpo_steps=20, prompts=16)


def learn(folder: Path, settings: CourseSettings, console: RunConsole, overrides: Sequence[str] = ()) -> CourseResult:
    """The whole example; all its files are under `folder`, and its server ends with it."""
    corpus, index = folder / "corpus.jsonl", folder / "index"
    facts.write_corpus(corpus)
    build_index(corpus, index, IndexSpec())
    with serving(index) as url:
        os.environ["RETRIEVAL_URL"] = url  # read by tools.yaml
        console.note(f"{index} is served at {url}")
        return run_course(COURSE, folder, settings, console, overrides)


@contextmanager
def serving(index: Path) -> Iterator[str]:
    """`rally serve retrieval` as a child process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rally.cli", "serve", "retrieval", str(index), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            _wait(f"http://127.0.0.1:{port}/health", server)
            yield f"http://127.0.0.1:{port}/retrieve"
        finally:
            server.terminate()


def _wait(health: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if server.poll() is not None:
            sys.exit("the search server did not start; what it said stands above")
        try:
            httpx.get(health).raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    sys.exit(f"the search server does not answer at {health}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of questions and all sampling")
    parser.add_argument("--steps", type=int, default=SETTINGS.grpo_steps, help="GRPO steps")
    parser.add_argument("--out", type=Path, default=Path("runs/search_agent"), help="the run folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the GRPO stage")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    try:
        learn(given.out, replace(SETTINGS, seed=given.seed, grpo_steps=given.steps), RunConsole(), given.overrides)
    except RallyError as mistake:
        sys.exit(str(mistake))


if __name__ == "__main__":
    main()
