"""Servers that a run launches answer only the run: every route but /health requires its token, which no other user of
the machine can read. Foreign weights are found before they are trained on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_server import FakeServer
from remote_cases import SETTINGS, oracle_of
from served_cases import free_port
from small_models import make_model

from rally.engines.remote import (
    CanaryError,
    LaunchedServer,
    Rally,
    RemoteEngine,
    ServerReplica,
    Sglang,
    Vllm,
    WeightFiles,
)
from rally.engines.remote.server_api import LAUNCHER, TOKEN_VARIABLE

# Stands for vLLM: imports its --middleware by name, as vLLM does, also in a spawned process.
SERVER = """
import importlib, json, multiprocessing, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

def loaded(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)

async def answer(request):
    return JSONResponse({"argv": sys.argv[1:], "path": request.url.path})

def serve(middleware, port):
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    app.add_middleware(loaded(middleware))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical")

if __name__ == "__main__":
    port, middleware = int(sys.argv[1]), sys.argv[sys.argv.index("--middleware") + 1]
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(middleware, port))
    child.start()
    child.join()
"""
ARGUMENTS = """
import json, sys
from pathlib import Path
if __name__ == "__main__":
    print(json.dumps([sys.argv, Path("/proc/self/cmdline").read_text()]))
"""
CONTROL = ("/collective_rpc", "/update_weights", "/pause", "/sleep", "/v1/models", "/inference/v1/generate", "//health")


@contextmanager
def launched(folder: Path, token: str) -> Iterator[str]:
    package = folder / "pretended"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "serve.py").write_text(SERVER)
    port = free_port()
    environment = os.environ | {TOKEN_VARIABLE: token}
    command = [sys.executable, LAUNCHER, "pretended.serve", str(port)]
    process = subprocess.Popen(command, cwd=folder, env=environment, process_group=0)
    try:
        deadline = time.monotonic() + 280
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                assert process.poll() is None
                time.sleep(0.1)
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.drill("security", "A local user calls a run's vLLM server", "401 at every route but /health")
def test_a_launched_server_answers_only_who_knows_the_token(tmp_path: Path) -> None:
    with launched(tmp_path, "s3cret-of-the-run") as url, httpx.Client(base_url=url) as http:
        assert http.get("/health").status_code == 200
        for path in CONTROL:
            for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "s3cret-of-the-run"}):
                refused = http.post(path, json={}, headers=headers)
                assert refused.status_code == 401 and "requires its token" in refused.text, path
            allowed = http.post(path, json={}, headers={"Authorization": "Bearer s3cret-of-the-run"})
            assert allowed.status_code == 200


def test_sglang_gets_the_token_as_its_key_and_not_on_the_command_line(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(ARGUMENTS)
    command = [sys.executable, LAUNCHER, "sglang.launch_server", "--port", "1"]
    environment = os.environ | {TOKEN_VARIABLE: "s3cret"}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    arguments, shown = json.loads(told)
    assert arguments[1:] == ["--port", "1", "--api-key", "s3cret"] and "s3cret" not in shown


def test_each_launched_server_has_a_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the user's")
    seen = set()
    for number, api in enumerate((Rally(), Vllm(), Sglang())):
        server = LaunchedServer(api, lambda folder, port: [], tmp_path / f"{number}.log", environment={"A": "b"})
        token = server._environment[TOKEN_VARIABLE]
        assert server.headers == {"Authorization": f"Bearer {token}"} and len(token) > 40
        assert server._environment["A"] == "b"
        seen.add(token)
    assert len(seen) == 3 and "the user's" not in seen


@pytest.mark.drill("security", "Weights of a server are replaced during a rollout", "The canary stops the run")
@pytest.mark.parametrize("foreign", ["zeros", "another model"])
async def test_foreign_weights_are_found_before_the_update(foreign: str, tmp_path: Path) -> None:
    model = make_model(seed=0)
    async with FakeServer("vllm", make_model(seed=1)) as fake:
        replica: Any = ServerReplica(fake.url, Vllm())
        engine = RemoteEngine([replica], WeightFiles(model.save_pretrained, tmp_path), oracle_of(model), SETTINGS)
        await engine.start()
        await engine.rest()
        with engine.updating(), torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.1)
        await engine.publish()
        await engine.rest()
        with torch.no_grad():
            others = dict(make_model(seed=7).named_parameters())
            for name, parameter in fake.model.named_parameters():
                parameter.copy_(others[name]) if foreign == "another model" else parameter.zero_()
        with pytest.raises(CanaryError, match="does not sample from the weights of version 1"):
            await engine.rest()
        await engine.close()
