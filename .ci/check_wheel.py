"""Builds the wheel, installs it into an empty environment, and uses it from an empty folder as a stranger would.

    python .ci/check_wheel.py

What is checked: the package data are in the wheel; `rally recipes`, `rally run --dry-run`, `rally demo`, `rally view
--export` and the viewer's server work without the source tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ("recipes/gsm8k_tool/train.yaml", "recipes/gsm8k_tool/chatml_tools.jinja", "recipes/gsm8k_tool/README.md")
DATA += ("view/page/index.html", "py.typed")
PORT = 8651


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rally-wheel-") as place:
        folder = Path(place)
        wheel = build(folder / "dist")
        python = install(wheel, folder / "env")
        (folder / "empty").mkdir()
        use(python, folder / "empty")
    print("the wheel works from an empty folder")


def build(out: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, ROOT)
    [wheel] = out.glob("rally_rl-*.whl")
    print(f"built {wheel.name}, {wheel.stat().st_size:,} bytes")
    return wheel


def install(wheel: Path, env: Path) -> Path:
    venv.create(env, with_pip=True)
    python = env / "bin" / "python"
    # Of the thousands of modules, few are used: compiling them all takes a minute.
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--constraint")
    run(*pip, ROOT / "constraints.txt", "torch")
    run(*pip, ROOT / "constraints.txt", f"{wheel}[plot,services]")
    return python


def use(python: Path, cwd: Path) -> None:
    rally = python.with_name("rally")
    where = "import pathlib, rally; print(pathlib.Path(rally.__file__).parent)"
    package = Path(run(python, "-c", where, cwd=cwd).strip())
    assert not package.is_relative_to(ROOT), f"{package} is the source tree"
    missing = [name for name in DATA if not (package / name).is_file()]
    assert not missing, f"the wheel lacks {missing}"
    assert "rally train --recipe gsm8k_tool" in run(rally, "recipes", cwd=cwd)
    assert "rally sft --recipe triage" in run(rally, "run", "triage", "--dry-run", cwd=cwd).replace("\n", " ")
    run(rally, "demo", "--out", "demo", "--steps", "2", cwd=cwd)
    run(rally, "view", "demo", "--export", "page.html", cwd=cwd)
    assert (cwd / "page.html").stat().st_size > 10_000
    server = subprocess.Popen(
        [rally, "view", "demo", "--no-browser", "--port", str(PORT)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    try:
        assert b"<html" in answer(f"http://127.0.0.1:{PORT}/", server)
    finally:
        server.terminate()
        server.wait()


def answer(address: str, server: subprocess.Popen[bytes], seconds: float = 120.0) -> bytes:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                return bytes(response.read())
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def environment() -> dict[str, str]:
    other = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in other}


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
