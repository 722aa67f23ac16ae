"""Runs SandboxFusion's own tests against the sandbox server, from a checkout of SandboxFusion.

The tests reach their server through fastapi's TestClient. Here that is the published client (`run_code` of the package
sandbox-fusion), which talks to `rally serve sandbox`: no code of SandboxFusion but the tests and the client runs.
`external_access` needs the internet from inside the sandbox, which Rally never gives: it counts as expected to fail.

    git clone https://github.com/bytedance/SandboxFusion
    pip install sandbox-fusion
    python -m benchmarks.sandbox_fusion_tests SandboxFusion [--languages python,bash,pytest,isolation,nodejs,cpp]
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

LANGUAGES = "python,bash,pytest,isolation,nodejs,cpp"
EXPECTED_TO_FAIL = "test_isolation_network_external_access"
CONFTEST = """
import json, os, sys, types
import fastapi.testclient, httpx, pytest, sandbox_fusion

def module(name, **members):
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(members)
    made.__path__ = []

names = ("RunCodeRequest", "RunCodeResponse", "RunStatus")
types_of_the_client = {name: getattr(sandbox_fusion, name) for name in names}
for name in names[:2]:  # they are of pydantic 1, the tests use pydantic 2
    types_of_the_client[name].model_dump = lambda self: json.loads(self.json())
    types_of_the_client[name].model_dump_json = lambda self, indent=None: self.json(indent=indent)
module("sandbox")
module("sandbox.server")
module("sandbox.server.sandbox_api", **types_of_the_client)
module("sandbox.server.server", app=None)
module("sandbox.runners", CommandRunStatus=sandbox_fusion.CommandRunStatus)

class PublishedClient:
    # What the tests call is sent by the published client.

    def __init__(self, app):
        self.url = os.environ["SANDBOX_URL"]

    def post(self, path, json):
        assert path == "/run_code", path
        request = sandbox_fusion.RunCodeRequest(**json)
        answer = sandbox_fusion.run_code(request, endpoint=self.url, max_attempts=1, client_timeout=120)
        return httpx.Response(200, text=answer.json())

fastapi.testclient.TestClient = PublishedClient

def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == os.environ["EXPECTED_TO_FAIL"]:
            item.add_marker(pytest.mark.xfail(reason="there is no network in the sandbox"))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of SandboxFusion")
    parser.add_argument("--languages", default=LANGUAGES, help="the tests to run, by the names of their files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = copied_tests(options.checkout, options.languages.split(","), Path(folder))
        port = free_port()
        server = subprocess.Popen([sys.executable, "-m", "rally.cli", "serve", "sandbox", "--port", str(port)])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, server)
            code = run(tests, url)
        finally:
            server.terminate()
            server.wait()
    sys.exit(code)


def copied_tests(checkout: Path, languages: list[str], folder: Path) -> list[Path]:
    """The tests in a folder of their own, where the checkout's package `sandbox` cannot be imported."""
    source = checkout / "sandbox" / "tests" / "runners"
    if not source.is_dir():
        sys.exit(f"{checkout} is not a checkout of SandboxFusion: it has no folder sandbox/tests/runners")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    if (source / "samples").is_dir():
        shutil.copytree(source / "samples", folder / "samples")
    return [Path(shutil.copy(source / f"test_{language}.py", folder)) for language in languages]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            httpx.get(f"{url}/v1/ping")
            return
        except httpx.TransportError:
            time.sleep(0.2)
    sys.exit("the sandbox server did not start")


def run(tests: list[Path], url: str) -> int:
    """Run the tests of each file; 0 if none failed."""
    environment = {**os.environ, "SANDBOX_URL": url, "EXPECTED_TO_FAIL": EXPECTED_TO_FAIL}
    codes = []
    for path in tests:
        command = [sys.executable, "-m", "pytest", "-q", "-rfEx", "--tb=short", "-p", "no:cacheprovider", path.name]
        started = time.monotonic()
        ran = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True)
        codes.append(ran.returncode)
        summary = (ran.stdout.strip().splitlines() or [ran.stderr])[-1].strip("= ")
        print(f"{path.stem:16} {summary} ({time.monotonic() - started:.0f} s)")
        if ran.returncode:
            print(ran.stdout + ran.stderr)
    return max(codes)


if __name__ == "__main__":
    main()
