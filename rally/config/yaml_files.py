"""Reads a YAML file and the files it is based on as layers of one configuration, the deepest base first.

Two top-level keys describe the file itself and are not part of the schema. `base: train.yaml` names a file in the same
folder whose keys this file inherits and may override; a base may have a base. `recipe:` describes the purpose of the
file and what it needs. In every text `${here}` is the folder of the file that contains it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError

from rally.config.base import Section
from rally.config.errors import ConfigError, sentence
from rally.util.checksums import UNREADABLE

Tree = dict[str, Any]
HERE = "${here}"
DEEPEST = 50
"""Levels of a configuration. OmegaConf fails at about a hundred."""
LONGEST_BITS = 8192
"""Of a whole number. Python does not print one of more than 4300 digits."""


class Notes(Section):
    """The `recipe:` section of a file."""

    about: str = ""
    """A description in one line."""
    hardware: str = ""
    needs: dict[str, str] = Field(default_factory=dict)
    """Paths that the run reads, each with the command that creates it."""

    def read_by(self, tree: Tree) -> dict[str, str]:
        """The entries of `needs` that the configuration reads; overrides may have replaced others."""
        texts = list(_texts(tree))
        return {path: command for path, command in self.needs.items() if any(_below(text, path) for text in texts)}

    def paths_below(self, need: str, tree: Tree) -> list[str]:
        """The paths that a configuration reads of one of its needs."""
        return [text for text in _texts(tree) if _below(text, need)]

    def unmet(self, tree: Tree) -> list[str]:
        """One sentence for each needed path that does not exist, or that lacks a file the configuration reads."""
        texts = list(_texts(tree))
        missing = {
            (path if not Path(path).exists() else lacking[0]): command
            for path, command in self.read_by(tree).items()
            if (lacking := [text for text in texts if _below(text, path) and not Path(text).exists()])
        }
        return [f"{path} does not exist; make it with: {command}" for path, command in missing.items()]


class Document(NamedTuple):
    layers: list[Tree]
    notes: Notes

    @property
    def merged(self) -> Tree:
        whole: Tree = functools.reduce(merge, self.layers)
        return whole


def merge(below: Any, above: Any) -> Any:
    """`above` merged over `below`: mappings merge, other values replace.

    OmegaConf's own merge fails where a mapping meets a list.
    """
    if not isinstance(above, dict):
        return above
    below = below if isinstance(below, dict) else {}
    return below | {key: merge(below.get(key), value) for key, value in above.items()}


def read_document(path: Path) -> Document:
    """The file with its bases. Its notes override those of its bases."""
    chain = _chain(path.expanduser())
    notes_of_files = [_notes(tree.pop("recipe", None), path) for tree in chain]
    merged = {key: value for notes in notes_of_files for key, value in notes.model_dump(exclude_unset=True).items()}
    needs = {need: command for notes in notes_of_files for need, command in notes.needs.items()}
    return Document(chain, Notes(**{**merged, "needs": needs}))


def _notes(section: Any, path: Path) -> Notes:
    try:
        return Notes.model_validate(section)
    except ValidationError as error:
        known = tuple(Notes.keys())
        problems = [f"{path}, recipe: {sentence(detail, known)}" for detail in error.errors(include_url=False)]
        raise ConfigError(problems) from None


def _chain(path: Path) -> list[Tree]:
    chain: list[Tree] = []
    seen: list[Path] = []
    following: Path | None = path
    while following is not None:
        if following.resolve() in seen:
            raise ConfigError(f"{path} is based on itself: {' -> '.join(f.name for f in (*seen, following))}.")
        seen.append(following.resolve())
        tree = _read(following)
        base = tree.pop("base", None)
        if not isinstance(base, str | None) or "\0" in (base or ""):
            raise ConfigError(f"{following}: base is {base!r}; set it to the name of a YAML file, such as train.yaml.")
        chain.insert(0, tree)
        following = following.parent / base if base else None
    return chain


def _read(path: Path) -> Tree:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; check the path of the configuration file.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or ""
        advice = "; indent with spaces if it is a tab, else quote it" if "cannot start any token" in problem else ""
        raise ConfigError(f"{path}{where}: this is not valid YAML ({problem}){advice}.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {first_line(error)}.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name the YAML file in it{_example(path)}.") from None
    except UnicodeDecodeError:
        advice = "pass rows as data.train_files=... and a model by its path key"
        raise ConfigError(f"{path} is not UTF-8 text, as a YAML file must be; {advice}.") from None
    except RecursionError:
        raise ConfigError(_too_deep(str(path))) from None
    except (yaml.YAMLError, *UNREADABLE) as error:  # the last for values that their tags do not fit
        raise ConfigError(f"{path} cannot be read as a YAML file: {first_line(error)}.") from None
    check_values(tree, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping such as `data: ...`, not a list or a single value.")
    return {str(key): _with_here(value, str(path.parent)) for key, value in tree.items()}


def check_values(value: Any, where: str, levels: int = DEEPEST) -> None:
    """ConfigError for a value that is nested so deeply, or a number that is so long, that libraries fail on it."""
    if isinstance(value, int) and value.bit_length() > LONGEST_BITS:
        raise ConfigError(f"{where} has a number of more than {LONGEST_BITS} bits; write a smaller one.")
    if not isinstance(value, (dict, list)):
        return
    if not levels:
        raise ConfigError(_too_deep(where))
    for inner in value.values() if isinstance(value, dict) else value:
        check_values(inner, where, levels - 1)


def _too_deep(where: str) -> str:
    return f"{where} is nested deeper than {DEEPEST} levels; write it with fewer."


def _example(folder: Path) -> str:
    return f", such as {folder / 'config.yaml'}" if (folder / "config.yaml").is_file() else ""


def _with_here(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_here(below, folder) for key, below in value.items()}
    if isinstance(value, list):
        return [_with_here(item, folder) for item in value]
    return value.replace(HERE, folder) if isinstance(value, str) else value


def _below(text: str, path: str) -> bool:
    return text == path or text.startswith(f"{path}/")


def _texts(value: Any) -> Iterator[str]:
    """All texts that may be a path to read. Keys that end in _dir are written to and left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from () if str(key).endswith("_dir") else _texts(below)
    elif isinstance(value, list):
        for below in value:
            yield from _texts(below)


def first_line(error: Exception) -> str:
    """The first line of a library's error, without its full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def at(tree: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key of the tree, or `default` if it is not set."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree


def put(tree: Tree, key: str, value: Any) -> Tree:
    """The tree with the value at a dotted key."""
    head, _, rest = key.partition(".")
    below = tree.get(head)
    return {**tree, head: put(below if isinstance(below, dict) else {}, rest, value) if rest else value}


def without(tree: Tree, key: str) -> Tree:
    """The tree without a dotted key, and without the sections that this leaves empty."""
    head, _, rest = key.partition(".")
    if head not in tree:
        return tree
    below = tree[head]
    if rest and not isinstance(below, dict):
        return tree  # a value stands where the key's section would be
    kept = without(below, rest) if rest else None
    if kept:
        return {**tree, head: kept}
    return {name: value for name, value in tree.items() if name != head}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the tree with its value; an empty mapping is a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from leaves(value, key + ".")
        else:
            yield key, value
