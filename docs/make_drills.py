"""Writes the tables of docs/reliability.md and docs/security.md from the tests marked as drills.

A drill is a test that causes a fault, or an attack, and checks what Rally does about it:

    @pytest.mark.drill("reliability", "A bit of a checkpoint flips", "The next older one is used, with a warning")

python docs/make_drills.py          # rewrites the tables; a test compares them
make drills                         # runs all drills
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"reliability": "docs/reliability.md", "security": "docs/security.md"}
BEGIN, END = "<!-- drills: written by docs/make_drills.py -->", "<!-- end of drills -->"


class Drill(NamedTuple):
    page: str
    fault: str
    outcome: str
    file: str
    test: str


def drills(tests: Path = ROOT / "tests") -> list[Drill]:
    """Every drill under `tests`, ordered by file and line. A mark that cannot be read is a ValueError."""
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text()
        if "mark.drill" not in text:
            continue
        name = path.relative_to(tests.parent).as_posix()
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in sorted(functions, key=lambda node: node.lineno):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("mark.drill"):
                    values = [ast.literal_eval(value) for value in mark.args]
                    if mark.keywords or len(values) != 3 or values[0] not in PAGES:
                        raise ValueError(
                            f"{name}:{mark.lineno}: write drill(page, fault, outcome), page one of {[*PAGES]}"
                        )
                    found.append(Drill(*values, name, node.name))
    return found


def table(page: str, found: list[Drill]) -> str:
    """The table of one page, grouped by the package that the tests belong to."""
    head = "Fault" if page == "reliability" else "Attack or leak"
    lines = [BEGIN, "", f"| {head} | What happens | Test |", "|---|---|---|"]
    for drill in found:
        if drill.page == page:
            test = f"`{drill.file.removeprefix('tests/')}::{drill.test}`"
            lines.append(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in (drill.fault, drill.outcome, test)) + " |"
            )
    return "\n".join([*lines, "", END])


def with_table(text: str, page: str, found: list[Drill]) -> str:
    """The text of a page with its table replaced."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return head + table(page, found) + tail


if __name__ == "__main__":
    every = drills()
    for page, name in PAGES.items():
        path = ROOT / name
        path.write_text(with_table(path.read_text(), page, every))
