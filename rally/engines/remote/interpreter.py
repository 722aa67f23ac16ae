"""What another environment's Python has installed is asked of it without importing that, which may take a minute."""

from __future__ import annotations

import subprocess

from rally.engines.base import EngineError

FIND = """
import importlib.util, pathlib, sys
found = importlib.util.find_spec(sys.argv[1])
if found is None:
    sys.exit(3)
root = pathlib.Path(found.submodule_search_locations[0])
"""


def ask(python: str, package: str, question: str = "") -> str:
    """What `question` prints; it may use `root`, the folder of `package`, which must be there."""
    try:
        asked = subprocess.run(
            [python, "-c", FIND + question, package], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as problem:
        raise EngineError(f"rollout.server.python={python} cannot be run ({problem.strerror}); name a Python") from None
    if asked.returncode:
        raise EngineError(
            f"{python} has no {package}; install it into an environment of its own (python -m venv DIR && DIR/bin/pip "
            f"install {package}) and set rollout.server.python=DIR/bin/python"
        )
    return asked.stdout.strip()
