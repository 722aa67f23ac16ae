"""Servers that join and leave a run: they get weights by a full version and deltas, and no group is lost with them."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served_cases import TOKEN, EngineProcess, ServedModel
from train_cases import Paper, run_config
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rally.cli.serve import app
from rally.engines.base import EngineError
from rally.engines.remote import DeltaFiles, JoinFolder, RemoteEngine, ServerAnnouncement, announce, join_folder
from rally.engines.remote.server_api import WeightChain
from rally.runs.train import train
from rally.track import RunFolder

R = "actor_rollout_ref.rollout"


@pytest.fixture
def pair(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServedModel, EngineProcess]]:
    monkeypatch.setenv("RALLY_ENGINE_TOKEN", TOKEN)
    process = EngineProcess(home / "model", "--accept-weights", "--dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    try:
        process.wait_ready()
        with ServedModel(model, 256).running() as thread:
            yield thread, process
    finally:
        process.kill()


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


@pytest.mark.drill(
    "reliability", "A rollout server joins a run and is killed later", "It serves while it lives; no group is lost"
)
def test_a_server_joins_serves_and_is_killed(
    home: Path, tmp_path: Path, pair: tuple[ServedModel, EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, (first, second) = tmp_path / "run", pair
    publish, sent, served = RemoteEngine.publish, [], []
    source_for = DeltaFiles.source_for

    def recorded(self: DeltaFiles, has: int | None) -> WeightChain:
        sent.append(source_for(self, has))
        return sent[-1]

    async def eventful(self: RemoteEngine) -> dict[str, float]:
        told = await publish(self)
        if self.weight_version == 2:
            announce(run, ServerAnnouncement(second.url, TOKEN))
            await until(lambda: self.joined)
        elif self.weight_version == 4:
            known = {"Authorization": f"Bearer {TOKEN}"}
            served.append((await asyncio.to_thread(httpx.get, f"{second.url}/metrics", headers=known)).text)
            second.kill()
        return told

    monkeypatch.setattr(RemoteEngine, "publish", eventful)
    monkeypatch.setattr(DeltaFiles, "source_for", recorded)
    config = run_config(
        home,
        run,
        f"{R}.name=rally",
        f"{R}.mode=server",
        f"{R}.server.url={first.url}",
        f"{R}.server.health_every=0.1",
        f"{R}.checkpoint_engine.backend=delta",
        "data.val_files=null",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=6",
    )
    train(config, Paper().console)
    folder = RunFolder(run)
    rows = [row.metrics for row in folder.read_metrics()]
    assert [row["engine/joined"] for row in rows] == [0, 0, 1, 1, 0, 0]
    joins = next(chain for chain in sent[1:] if chain.folder is not None)
    assert joins.folder.endswith("full-0") and len(joins.deltas) == 2, "a full version, and the deltas since"
    assert all(chain.folder is None for chain in sent[1:] if chain is not joins)
    ended = [line for line in served[0].splitlines() if line.startswith("rally_engine_ended_requests_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in ended) > 6, "more than the probe and five canaries"
    groups = [[episode.group for episode in folder.read_episodes(step)] for step in range(1, 7)]
    assert [(len(set(group)), len(group)) for group in groups] == [(len(set(groups[0])), len(groups[0]))] * 6
    assert sum(row["failures/loop"] for row in rows) == 0 == sum(row["router/given_up"] for row in rows)


def test_only_whole_announcements_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError, match="is no run folder"):
        announce(tmp_path / "missing", ServerAnnouncement("http://a:1"))
    good = ServerAnnouncement("http://10.0.0.7:8000", "secret")
    file = announce(tmp_path, good)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    folder = JoinFolder(join_folder(tmp_path), lambda one: pytest.fail("nothing joins here"))
    for number, text in enumerate(("", "[]", '{"url": 5}', '{"url": "file:///x"}', '{"url": "http://a", "x": 1}')):
        (folder.folder / f"{number}.json").write_text(text)
    assert folder.read() == {good} == folder.read()
    assert len(caplog.records) == 5 and "secret" not in caplog.text, "each is reported once"
    assert "secret" not in repr(good)
    file.unlink()
    assert folder.read() == set()


def test_rally_serve_announces_itself_while_it_runs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RALLY_ENGINE_TOKEN", raising=False)
    before = signal.getsignal(signal.SIGTERM)  # Ray, in another test, leaves a handler of its own
    seen: list[dict[str, str]] = []

    def serve(*_: object, **__: object) -> None:
        seen.extend(json.loads(file.read_text()) for file in join_folder(tmp_path).iterdir())

    monkeypatch.setattr("uvicorn.run", serve)
    options = ["engine", str(home / "model"), "--join", str(tmp_path), "--max-num-seqs", "2", "--max-model-len", "64"]
    result = CliRunner().invoke(app, [*options, "--port", "18734"])
    assert result.exit_code == 0, result.exception
    assert [one["url"] for one in seen] == ["http://127.0.0.1:18734"] and len(seen[0]["token"]) > 20
    assert seen[0]["token"] not in result.output and not os.listdir(join_folder(tmp_path))
    assert "--join needs an address" in str(CliRunner().invoke(app, [*options, "--port", "0"]).exception)

    def ended_by_a_signal(*_: object, **__: object) -> None:  # as uvicorn.run does
        assert file_names() and signal.getsignal(signal.SIGTERM) is not before
        signal.raise_signal(signal.SIGTERM)

    def file_names() -> list[str]:
        return os.listdir(join_folder(tmp_path))

    monkeypatch.setattr("uvicorn.run", ended_by_a_signal)
    assert CliRunner().invoke(app, [*options, "--port", "18734"]).exit_code == 143
    assert not file_names() and signal.getsignal(signal.SIGTERM) is before


def test_announcements_that_cannot_be_read_end_nothing_and_reveal_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = ServerAnnouncement("http://me:hunter2@10.0.0.7:8000", "t0ken")
    file = announce(tmp_path, secret)
    assert file.name == "10.0.0.7-8000.json" and secret.name == "http://10.0.0.7:8000"
    joining = JoinFolder(join_folder(tmp_path), lambda one: pytest.fail("nobody joins"))
    (file.parent / "nested.json").write_text("[" * 50_000)
    (file.parent / "wrong.json").write_text(json.dumps({"url": "ftp://me:hunter2@10.0.0.8"}))
    assert joining.read() == {secret}

    def broken(self: Path, pattern: str) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "glob", broken)
    assert joining.read() == {secret}, "a folder that cannot be listed for a moment is no farewell"
    assert caplog.text.count("does not announce a server") == 2 and "Stale file handle" in caplog.text
    assert "hunter2" not in caplog.text + repr(secret) and "t0ken" not in caplog.text + repr(secret)
