"""The documentation is true: its Python runs and prints the output shown, its links and anchors resolve, its keys,
commands, options, modules and make targets exist, and its YAML is a configuration.

The ```python blocks of a page run in order in one process, in an empty folder, on the CPU and offline. The ```output
blocks are their output, in the same order. `design.md` also has plans, so its names need not exist yet.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from forked import run_forked

from rally.cli.main import app
from rally.config import Config, SftConfig
from rally.module_aliases import ALIASES

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "rally" / "recipes").glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *RECIPES]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
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


def prose_of(page: Path) -> str:
    """The text without its blocks of code, whose lines are left empty."""
    content = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$", lambda code: "\n" * code[0].count("\n"), content, flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)", prose_of(page), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    found = page.parent / name if name else page
    return found.exists() and (not anchor or anchor in anchors_of(found))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)) if "://" not in target]
    assert not [target for target in targets if not leads_somewhere(page, target)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_lines_of_prose_are_short(page: Path) -> None:
    lines = enumerate(prose_of(page).splitlines(), start=1)
    assert not [(n, len(line)) for n, line in lines if len(line) > 120 and not line.startswith(("|", "!["))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_on_command_lines_exist(page: Path) -> None:
    shell = "\n".join(block.text for block in blocks(page) if block.language == "bash")
    written = re.findall(r"(?<![\w.])\+{0,2}([a-z_]+(?:\.\w+)+)=", shell)
    assert not [key for key in written if not _exists(key)]


def shell_of(page: Path) -> str:
    """The page's commands: blocks for a shell, and what stands in backticks. A continued line is one."""
    told = [block.text for block in blocks(page) if block.language in ("bash", "text", "")]
    lines = "\n".join(told).replace("\\\n", " ")
    return lines + "\n" + "\n".join(re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose_of(page)))


def missing_option(words: Sequence[str]) -> str | None:
    """The first word of a `rally` command line that the program does not know."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if word.startswith("-"):
            given = word.partition("=")[0]
            if word == "--":
                return None
            if not any(given in (*p.opts, *p.secondary_opts) for p in command.params) and given not in ("-h", "--help"):
                return f"{command.name} {given}"
        elif hasattr(command, "commands"):
            if re.fullmatch(r"[A-Z.]+", word):  # a placeholder
                return None
            if word not in command.commands:
                return word
            command = command.commands[word]
    return None


@pytest.mark.parametrize("page", [page for page in TEXTS if page.name != "log.md"], ids=lambda page: page.name)
def test_commands_options_modules_and_targets_exist(page: Path) -> None:
    shell = shell_of(page)
    lines = re.findall(r"^(?:\$ |[A-Z_]+=\S+ )*rally ((?!=)[^#|>&;'\"\n]+)", shell, flags=re.MULTILINE)
    assert [told for line in lines if (told := missing_option(line.split()))] == []
    modules = re.findall(r"python3? -m ((?:benchmarks|rally|tests)\.[\w.]+)", shell)
    files = [ROOT / module.replace(".", "/") for module in modules]
    assert [f for f in files if not f.with_suffix(".py").exists() and not (f / "__main__.py").exists()] == []
    targets = re.findall(r"^make ([a-z][a-z -]*)", shell, flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = {word for target in targets for word in target.split()}
    assert [word for word in words if not re.search(rf"^{word}:", makefile, flags=re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_is_yaml_and_its_keys_exist(page: Path) -> None:
    sections = set(Config.model_fields)
    for block in blocks(page):
        if block.language != "yaml":
            continue
        tree = yaml.safe_load(block.text)
        if isinstance(tree, dict) and sections & tree.keys():
            kept = {key: value for key, value in tree.items() if key in sections}
            assert [key for key in leaves(kept) if not _exists(key)] == [], f"line {block.first_line}"


def leaves(tree: object, path: str = "") -> Iterator[str]:
    """The dotted keys of the values that are no mapping with keys of the schema."""
    if isinstance(tree, dict) and tree and not _exists(path):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path


@pytest.mark.parametrize("page", [page for page in TEXTS if page.name != "log.md"], ids=lambda page: page.name)
def test_modules_have_their_names_of_today(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    imported = {
        f"{m[1]}.{name.strip()}"
        for m in re.finditer(r"from ([\w.]+) import ([\w, ]+)", text)
        for name in m[2].split(",")
    }
    assert not [old for old in ALIASES if old in imported or re.search(rf"\b{re.escape(old)}\b", text)]


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
