"""Scores episodes of the recipe repair independently: the recorded patch and the hidden tests, without Rally's code.

    python -m benchmarks.score_repair runs/rally/repair/episodes/val_000060.jsonl --rows data/repair/test.parquet

The repository and its tests are read from the file of rows, the patch from the episode. `git apply` applies it, and
Python calls the functions in a folder of its own, isolated by bubblewrap: the patch was written by a model. Results are
compared here, because that code must not see the right ones. With `--without-sandbox` it runs without isolation, for a
machine that holds nothing else. `differing` counts episodes whose recorded reward is not what the tests say. An episode
without a patch, such as one that failed, is wrong.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet

SECONDS = 30.0
Rows = Mapping[tuple[str, int], Mapping[str, Any]]


def rows_of(file: Path) -> Rows:
    """The rows by data source and number."""
    rows = pyarrow.parquet.read_table(file).to_pylist()
    return {(row["data_source"], row["extra_info"]["index"]): row["extra_info"] for row in rows}


def isolated(folder: Path) -> list[str]:
    """The command that runs another one with a read-only system, no network, and the folder alone to write to."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SystemExit("bubblewrap (bwrap) is not installed; install it, or give --without-sandbox in a container")
    hidden = ["--tmpfs", "/tmp", "--tmpfs", "/home", "--tmpfs", "/root"]
    interpreter = Path(sys.base_prefix).resolve()
    shown = ["--ro-bind", str(interpreter), str(interpreter)]
    bound = ["--bind", str(folder), str(folder), "--chdir", str(folder), "--dev", "/dev", "--proc", "/proc"]
    return [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", *hidden, *shown, *bound]


def passes(files: Mapping[str, str], patch: str, test: str, sandboxed: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix="score-repair-") as name:
        folder = Path(name).resolve()
        for path, text in files.items():
            (folder / path).write_text(text, encoding="utf-8", newline="")
        if patch:
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # in a repository it would skip files
            applied = subprocess.run(command, input=patch.encode(), cwd=folder, capture_output=True, env=alone)
            if applied.returncode:
                raise SystemExit(f"a recorded patch does not apply: {applied.stderr.decode()}")
        known = json.loads(test)
        calls = ", ".join(f"m.{function}(*{given!r})" for function, given, _ in known["cases"])
        begin = f"import sys\nsys.path.insert(0, '.')\nimport {known['module']} as m\n"
        script = f"{begin}results = [{calls}]\nprint()\nprint(repr(results))\n"
        python = str(Path(sys.executable).resolve())
        try:
            done = subprocess.run(
                [*(isolated(folder) if sandboxed else []), python, "-I", "-c", script],
                cwd=folder,
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
    try:
        results = ast.literal_eval(done.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")[2])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return done.returncode == 0 and bool(results == [wanted for _, _, wanted in known["cases"]])


def score(episodes: list[Path], rows: Rows, sandboxed: bool = True) -> dict[str, list[tuple[float, bool]]]:
    """For each data source the recorded reward and the result of the tests, by episode."""
    found: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for file in episodes:
        for episode in map(json.loads, file.open(encoding="utf-8")):
            task = episode["task"]
            info = rows[task["data_source"], task["extra_info"]["index"]]
            returned = (episode["extra"] or {}).get("returned") or {}
            patch = returned.get("patch")
            right = patch is not None and passes(json.loads(info["files"]), patch, info["test"], sandboxed)
            found[task["data_source"]].append((float(episode["reward"] or 0.0), right))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", type=Path, nargs="+", help="validation episodes of a run or an evaluation")
    parser.add_argument("--rows", type=Path, required=True, help="the file of rows that was validated on")
    parser.add_argument("--without-sandbox", action="store_true", help="run the tests without isolation")
    given = parser.parse_args()
    found = score(given.episodes, rows_of(given.rows), not given.without_sandbox)
    if not found:
        raise SystemExit("there are no episodes in these files")
    print(f"{'data source':20} episodes  recorded   tests  differing")
    for source, scores in found.items():
        recorded, passed = (sum(values) / len(scores) for values in zip(*scores, strict=True))
        differing = sum(reward != right for reward, right in scores)
        print(f"{source:20} {len(scores):>8} {recorded:>9.1%} {passed:>7.1%} {differing:>10}")


if __name__ == "__main__":
    main()
