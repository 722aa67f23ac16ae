"""Agents on other machines: workers that come late, are killed, are stopped or reach a deadline, as real processes."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_cases import row_of
from loop_cases import Held, Reply, hold, make_job, make_runner, said, sampling_of, tiny_codec
from served_cases import ROOT, free_port
from train_cases import Paper, run_tree

from rally.chat import ChatCodec
from rally.config import load_config
from rally.gateway import BlackBoxAgentLoop, worker_pool
from rally.gateway.agent_process import AgentWorkerLost
from rally.gateway.server import Gateway, gateway_at
from rally.loops import LoopError, LoopSpec, Runner
from rally.runs.train import train
from rally.services import agent_worker
from rally.services.agent_worker import AgentWorker, AgentWorkerSettings
from rally.track import RunFolder
from rally.types import StopReason

TOKEN = "a token of the tests"
PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"
PROGRAM = """
import json, os, sys, time, urllib.request

def send(url, body=None):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))

assert "RALLY_AGENT_TOKEN" not in os.environ
row, episode = json.loads(os.environ["RALLY_TASK"]), os.environ["RALLY_EPISODE_URL"]
messages = row.get("raw_prompt") or row["prompt"]
send(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "m", "messages": messages})
how = sys.argv[1]
if how == "fail":
    sys.exit("no more ideas")
if how == "hang":
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(1000)
send(episode, {"reward": 0.5})
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def tiny() -> ChatCodec:
    return tiny_codec()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts workers, and ends those that are left."""
    monkeypatch.setenv("RALLY_AGENT_TOKEN", TOKEN)
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    workers: list[subprocess.Popen[bytes]] = []

    def started(*words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rally.cli", "agent", "--gateway", URL, *options, "--"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RALLY_AGENT_TOKEN": TOKEN}
        workers.append(subprocess.Popen([*command, sys.executable, str(program), *words], env=environment))
        return workers[-1]

    yield started
    for worker in workers:
        worker.kill()
        worker.wait()


def runner_of(tiny: ChatCodec, lost_after: float = 20.0, **settings: Any) -> Runner:
    options = {"workers": True, "port": PORT, "worker_timeout": lost_after}
    loops = {"black_box": LoopSpec(BlackBoxAgentLoop, options)}
    return make_runner(tiny, [Reply(said(tiny, "four"))], loops=loops, loop="black_box", **settings)


def until(condition: Callable[[], Any], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1].startswith("Z")
    except FileNotFoundError:
        return True


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin work in a thread; the result waits for its end."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(180)
        assert results, "the episodes did not end"
        return results[0]

    return result


def test_episodes_wait_for_a_late_worker_which_plays_several_at_a_time(
    tiny: ChatCodec, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_pool, "NOTE_SECONDS", 0.2)
    caplog.set_level(logging.WARNING)
    jobs = [make_job(row_of(tiny), number) for number in range(4)]
    # Waiting does not count as the time of a turn.
    runner = runner_of(tiny, timeout_per_turn=20.0)
    result = in_thread(lambda: asyncio.run(runner.run(jobs, sampling_of(tiny))))
    until(lambda: "wait" in caplog.text)
    assert (
        "4 episodes wait for an agent worker; start one with: RALLY_AGENT_TOKEN=... rally agent --gateway"
        in caplog.text
    )
    start("report", options=("--jobs", "3"))
    assert [episode.reward for episode in result()] == [0.5] * 4
    assert caplog.text.count("wait for an agent worker") == 1


def test_a_killed_worker_is_told_and_its_episode_is_played_again_by_another(
    tiny: ChatCodec, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "pid"
    first = start("hang", str(mark))
    runner = runner_of(tiny, lost_after=5.0, max_retries=1)
    result = in_thread(lambda: asyncio.run(hold(runner, row_of(tiny))))
    until(lambda: mark.exists() and mark.read_text())
    first.kill()
    until(lambda: gone(int(mark.read_text())))  # its program ends with it
    start("report")
    held: Held = result()
    assert held.episode.error is None and held.episode.reward == 0.5
    assert "has not answered for 5 seconds; its episode is lost" in caplog.text


def test_a_lost_worker_is_no_fault_of_the_policy_and_one_that_is_stopped_says_so(
    tiny: ChatCodec, start: Start, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    worker = start("hang", str(mark))
    result = in_thread(lambda: asyncio.run(hold(runner_of(tiny), row_of(tiny))))
    until(lambda: mark.exists() and mark.read_text())
    worker.terminate()
    episode = result().episode
    assert episode.stop_reason is StopReason.ERROR and "was stopped" in str(episode.error)
    assert episode.extra["fault"] == "infrastructure" and episode.turns[0].text == "four"
    assert worker.wait(60) == 0 and gone(int(mark.read_text()))


def test_a_deadline_ends_the_program_at_the_worker_which_goes_on(tiny: ChatCodec, start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    worker = start("hang", str(mark))
    episode = asyncio.run(hold(runner_of(tiny, timeout_per_turn=6.0), row_of(tiny))).episode
    assert episode.stop_reason is StopReason.DEADLINE and episode.turns[0].text == "four"
    until(lambda: gone(int(mark.read_text())))
    assert worker.poll() is None


def test_a_program_that_fails_is_reported_with_its_last_lines(tiny: ChatCodec, start: Start) -> None:
    start("fail")
    episode = asyncio.run(hold(runner_of(tiny), row_of(tiny))).episode
    assert "it ended with exit code 1: no more ideas" in str(episode.error) and episode.turns[0].text == "four"


@pytest.mark.drill("security", "A stranger asks for a run's episodes as an agent worker", "401: it lacks the token")
async def test_a_report_that_is_lost_on_its_way_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the gateway closes an idle connection at the moment at which the worker uses it."""
    monkeypatch.setattr(agent_worker, "RETRY_SECONDS", 0.01)
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        if seen.count("/report") in (1, 2):
            raise httpx.RemoteProtocolError("the server disconnected without sending a response")
        return httpx.Response(200, json={"known": True, "go_on": True})

    settings = agent_worker.AgentWorkerSettings(gateway="http://run", token="t", command=["true"])
    worker = agent_worker.AgentWorker(settings, print)
    claim = {"lease": "one", "lost_after": 30.0, "environment": {}}
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://run") as http:
        await worker._play(http, claim)
    assert seen.count("/report") == 3 and worker.played == 1


async def test_a_run_that_was_stopped_for_a_while_has_lost_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(worker_pool, "LONGEST_CHECK", 0.1)
    pool = worker_pool.WorkerPool(URL)
    client: Any = SimpleNamespace(environment={}, episode_id="e", base_url=URL)
    playing = asyncio.create_task(pool.play(lambda: "reported", lambda: None, 1.0, {}, client))
    await asyncio.sleep(0)
    lease = pool._next("worker")
    assert lease is not None
    await asyncio.sleep(0.05)
    time.sleep(1.5)
    done, _ = await asyncio.wait({playing}, timeout=0.2)
    assert not done, "it may not be silent for a second, and the second has not passed while it could answer"
    with pytest.raises(AgentWorkerLost, match="has not answered for 1 seconds"):
        await playing


def test_a_stranger_gets_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLY_AGENT_TOKEN", TOKEN)
    gateway_at("127.0.0.1", PORT)

    def status(path: str, body: dict[str, Any], token: str = TOKEN) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.post(f"{URL}/v1/workers/{path}", json=body, headers=headers).status_code

    claim = {"worker": "w", "wait": 0.0}
    assert [status("claim", claim, "wrong"), status("claim", claim)] == [401, 204]
    assert status("beat", {"lease": "x"}, "wrong") == status("report", {"lease": "x"}, "wrong") == 401
    assert status("claim", claim | {"wait": 1e9}) == status("claim", claim | {"worker": "w" * 1000}) == 400
    assert status("report", {"lease": "x", "lines": "y" * 5000}) == 400
    assert status("beat", {"lease": "x"}) == 200
    monkeypatch.delenv("RALLY_AGENT_TOKEN")
    assert status("claim", claim) == 404


def test_mistakes_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLY_AGENT_TOKEN", raising=False)
    for options, words in (
        ({"workers": True, "command": ["sh"], "port": 1}, "beside agent or command"),
        ({"workers": True}, "needs agent_loop_config.port"),
        ({"workers": True, "port": 8200, "worker_timeout": 1}, "give 5 to 3600 seconds"),
        ({"workers": True, "port": 8200}, "set RALLY_AGENT_TOKEN here and where they run"),
    ):
        with pytest.raises(LoopError, match=words):
            BlackBoxAgentLoop.prepare(options)


def test_mistakes_of_a_worker_are_sentences(start: Start) -> None:
    for words, sentence in (
        (["--gateway", URL, "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["--gateway", "10.0.0.1", "--", "sh"], "is no address"),
        (["--gateway", "http://127.0.0.1:1", "--patience", "0", "--", "sh"], "no gateway has answered at"),
    ):
        command = [sys.executable, "-m", "rally.cli", "agent", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 2 and sentence in done.stderr, done.stderr


def test_the_end_of_a_run_leaves_its_idle_workers_waiting_for_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RALLY_AGENT_TOKEN", TOKEN)
    port, notes = free_port(), list[str]()
    settings = AgentWorkerSettings(
        gateway=f"http://127.0.0.1:{port}", token=TOKEN, command=["true"], jobs=3, patience=0.0
    )
    gateway = Gateway("127.0.0.1", port)
    asked = threading.Event()
    monkeypatch.setattr(gateway.workers, "_next", lambda worker: asked.set())
    threading.Thread(target=lambda: asked.wait(60) and gateway.close(), daemon=True).start()
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(AgentWorker(settings, notes.append).run())
    assert "no gateway has answered at" in str(failed.value.exceptions[0]) and "no gateway answers" in notes[0]
    assert "Exception in ASGI application" not in caplog.text


def test_an_error_of_a_proxy_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tried() -> str:
        settings = AgentWorkerSettings(gateway="http://10.0.0.1", token=TOKEN, command=["true"])
        answer = httpx.MockTransport(lambda request: httpx.Response(502))
        async with httpx.AsyncClient(base_url="http://10.0.0.1", transport=answer) as http:
            notes: list[str] = []
            assert await AgentWorker(settings, notes.append)._post(http, "claim", {}) is None
            return notes[0]

    assert asyncio.run(tried()) == "no gateway answers at http://10.0.0.1 (HTTP 502); waiting"


def test_a_run_trains_on_the_episodes_of_workers_of_which_one_is_killed(
    home: Path, tmp_path: Path, start: Start
) -> None:
    tree = run_tree(home, tmp_path / "run")
    options = {"workers": True, "port": PORT, "worker_timeout": 5}
    tree["actor_rollout_ref"]["rollout"] = {"n": 4, "agent_loop_class": "black_box", "agent_loop_config": options}
    del tree["custom_reward_function"]
    tree["trainer"] |= {"total_training_steps": 2, "save_freq": -1, "val_before_train": False, "test_freq": -1}
    mark = tmp_path / "pid"
    mortal = start("hang", str(mark))
    result = in_thread(lambda: train(load_config(base=tree), Paper().console) or "over")
    until(lambda: mark.exists() and mark.read_text())
    start("report", options=("--jobs", "4"))
    mortal.kill()
    assert result() is not None
    rows = [row.metrics for row in RunFolder(tmp_path / "run").read_metrics() if row.step]
    assert len(rows) == 2 and all(metrics["critic/score/mean"] == 0.5 for metrics in rows)
