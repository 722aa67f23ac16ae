"""What a run would find out late, after it has loaded weights or trained, ends it before."""

import socket
from pathlib import Path

import pytest
from train_cases import Paper, run_config

from rally.engines import EngineError
from rally.gateway.server import gateway_at
from rally.loops import LoopError
from rally.runs import build, host_memory
from rally.runs.build.run_inputs import RunError
from rally.runs.evaluate import evaluate
from rally.runs.train import train

R = "actor_rollout_ref.rollout"
AGENT = """
def run(row, client):
    return 1.0
"""


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "trainer_of", lambda *given: pytest.fail("weights are loaded"))


def test_a_disk_without_room_for_a_checkpoint(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        total, free = 10**9, 1000

    monkeypatch.setattr(host_memory.shutil, "disk_usage", lambda folder: Usage)
    config = run_config(home, tmp_path / "run")
    sentence = r"^a checkpoint takes about .* and .*/run has 1000\.0 B free; free space, or set trainer\.default"
    with pytest.raises(RunError, match=sentence):
        train(config, Paper().console)


@pytest.mark.parametrize("start", [train, evaluate])
def test_servers_whose_package_is_missing(start: object, home: Path, tmp_path: Path) -> None:
    config = run_config(home, tmp_path / "run", f"{R}.name=sglang")
    with pytest.raises(EngineError, match="does not have sglang; install it into a separate environment"):
        start(config, Paper().console)  # type: ignore[operator]


@pytest.mark.parametrize("start", [train, evaluate])
def test_a_port_of_the_gateway_that_is_taken(
    start: object, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "port_agent.py").write_text(AGENT, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = [f"{R}.agent_loop_config.{name}" for name in ("agent=port_agent.py:run", f"port={port}", "tools=[]")]
        config = run_config(home, tmp_path / "run", f"{R}.agent_loop_class=black_box", *options)
        with pytest.raises(LoopError, match=rf"^the gateway cannot listen at 127\.0\.0\.1:{port} .*; choose another"):
            start(config, Paper().console)  # type: ignore[operator]
    build.loops_of(config)  # it is free again
    gateway_at("127.0.0.1", port)
    build.loops_of(config)  # and may be this process's own


@pytest.mark.parametrize("option", ["port: 8123", "workers: true"])
def test_an_agent_of_a_file_whose_option_loop_workers_cannot_serve(
    option: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the default loop, which the configuration is checked for."""
    monkeypatch.setenv("RALLY_AGENT_TOKEN", "secret of the workers")
    (tmp_path / "port_agent.py").write_text(AGENT, encoding="utf-8")
    entry = f"agent: {tmp_path}/port_agent.py:run, {option}" if "port" in option else f"{option}, port: 8123"
    loops = tmp_path / "loops.yaml"
    loops.write_text(f"- {{name: asked, _target_: rally.gateway.BlackBoxAgentLoop, {entry}}}\n", encoding="utf-8")
    keys = [f"{R}.name=vllm", f"{R}.agent.num_workers=2", f"{R}.agent.agent_loop_config_path={loops}"]
    config = run_config(home, tmp_path / "run", *keys)
    name = option.partition(":")[0]
    with pytest.raises(
        LoopError, match=f"the option {name} of the agent loop asked does not work with rollout.agent.num_"
    ):
        build.loops_of(config)
