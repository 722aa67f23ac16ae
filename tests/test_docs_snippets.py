"""The documentation is true: its Python runs and prints the output shown, its links resolve, its keys exist.

The ```python blocks of a page run in order in one process, in an empty folder, on the CPU and offline. The ```output
blocks are their output, in the same order. `design.md` also has plans, so its names need not exist yet.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import run_forked

from rally.config import Config, SftConfig

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "rally" / "recipes").glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *RECIPES]
WITHOUT_SNIPPETS = {
    *("design.md", "index.md", "keys.md", "log.md", "benchmarks.md", "demo.md", "results.md", "replay.md"),
    *("asynchronous.md", "cluster_simulation.md", "models.md", "reliability.md", "security.md"),
}
RUNNABLE = [page for page in PAGES if page.name not in WITHOUT_SNIPPETS and page not in RECIPES]
OFFLINE = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Block(NamedTuple):
    language: str
    first_line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    content = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", content, re.MULTILINE | re.DOTALL):
        yield Block(found[1], content.count("\n", 0, found.start(2)), found[2])


def script(page: Path) -> str:
    """The Python of a page, with all other lines empty, so that a traceback has the line numbers of the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python":
            lines += [""] * (block.first_line - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    source = script(page)
    assert source.strip(), f"{page.name} has no python block; add one, or name the page in WITHOUT_SNIPPETS"
    file = tmp_path / f"snippets_of_{page.stem.lower()}.py"
    file.write_text(source, encoding="utf-8")
    done = run_forked([file.name], tmp_path, os.environ | OFFLINE)
    assert done.returncode == 0, f"{page.name}:\n{done.stderr}"
    rest = done.stdout
    for block in (b for b in blocks(page) if b.language == "output"):
        _, found, rest = rest.partition(block.text)
        assert found, f"{page.name}, line {block.first_line}: not printed in this place:\n{block.text}\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in t]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_on_command_lines_exist(page: Path) -> None:
    shell = "\n".join(block.text for block in blocks(page) if block.language == "bash")
    written = re.findall(r"(?<![\w.])\+{0,2}([a-z_]+(?:\.\w+)+)=", shell)
    assert not [key for key in written if not _exists(key)]


def _exists(key: str) -> bool:
    """Whether the schema has the key, or the key is inside a mapping with the user's own keys."""
    open_ended = (
        *("custom_reward_function.reward_kwargs.", "actor_rollout_ref.rollout.agent_loop_config."),
        *("distillation.teacher_models.", "env.args.", "actor_rollout_ref.actor.policy_loss.loss_kwargs."),
    )
    return key.startswith(open_ended) or key in {*Config.keys(), *SftConfig.keys()}


def test_the_page_of_keys_is_the_schema() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_keys.py")]
    made = subprocess.run(command, env=os.environ | OFFLINE, timeout=120, capture_output=True, text=True, check=True)
    told = "docs/keys.md is old; run: python docs/make_keys.py > docs/keys.md"
    assert made.stdout == (ROOT / "docs" / "keys.md").read_text(encoding="utf-8"), told


def test_the_pictures_show_the_layers_of_the_contract() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))["pictures"]()
    for name, picture in drawn.items():
        told = f"docs/images/{name} is old; run: python docs/make_architecture.py"
        assert picture == (ROOT / "docs" / "images" / name).read_text(encoding="utf-8"), told


def test_the_map_names_files_that_exist() -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("index.md", "design.md"))
    text += (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:rally|docs|tests|examples|benchmarks)/[\w/.]+)`", text))
    assert len(paths) > 60 and not [path for path in paths if not (ROOT / path).exists()]
