"""Loads a configuration from a YAML file and `key=value` overrides, or raises one error that lists every mistake."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pydantic import ValidationError

from rally.config.aliases import SAME_AS, SFT_SAME_AS, resolve_aliases
from rally.config.base import Root
from rally.config.checks.consistency import CHECKS, SFT_CHECKS
from rally.config.checks.unsupported import SFT_UNSUPPORTED, UNSUPPORTED, Unsupported, unsupported_values
from rally.config.errors import ConfigError, not_a_section, sentence, shown
from rally.config.schema import Config
from rally.config.sft import SftConfig
from rally.config.verl_key_tables import HINTS, MOVES, SFT_HINTS, SFT_MOVES, hint_for
from rally.config.verl_keys import OWN_FILES, Dropped, Translation, group_choices, translate
from rally.config.yaml_files import (
    DEEPEST,
    Document,
    Notes,
    Tree,
    at,
    check_values,
    first_line,
    leaves,
    merge,
    put,
    read_document,
    without,
)
from rally.redact import learn_tree
from rally.util.checksums import UNREADABLE

C = TypeVar("C", bound=Root)
_KEY = re.compile(r"\w+(?:\.\w+)+|ulysses_sequence_parallel_size|\w+(?==)|(?<=unknown key )\w+")


def warn(text: str) -> None:
    """Report a note as a Python warning."""
    warnings.warn(text, stacklevel=4)


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = warn,
) -> Config:
    """The training configuration from `base`, the YAML file and the overrides; later sources win.

    Keys that are accepted and have no effect are reported to `note`, all in one text.
    """
    return _load(Config, (path, overrides, base), UNSUPPORTED, CHECKS, note)


def load_sft_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = warn,
) -> SftConfig:
    """The supervised fine-tuning configuration from `base`, the YAML file and the overrides; later sources win.

    Keys that are accepted and have no effect are reported to `note`, all in one text.
    """
    return _load(SftConfig, (path, overrides, base), SFT_UNSUPPORTED, SFT_CHECKS, note)


class LoadedConfig(NamedTuple):
    """A configuration with its problems. `config` is None if it could not be validated."""

    config: Config | None
    problems: tuple[str, ...]


def read_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Like `load_config`, but returns problems instead of raising, so that a caller can check further."""
    try:
        return LoadedConfig(*_read(Config, (path, overrides, None), UNSUPPORTED, CHECKS)[:2])
    except ConfigError as error:
        return LoadedConfig(None, error.problems)


Sources = tuple[str | Path | None, Sequence[str], Mapping[str, Any] | None]


def _load(
    schema: type[C],
    sources: Sources,
    rules: Sequence[Unsupported],
    checks: Sequence[Callable[[C], Iterator[str]]],
    note: Callable[[str], None],
) -> C:
    config, problems, translation = _read(schema, sources, rules, checks)
    if config is None or problems:
        raise ConfigError(problems)
    if text := "\n".join(filter(None, (without_effect(translation.dropped), *translation.remarks))):
        note(text)
    return config


def without_effect(dropped: Sequence[Dropped]) -> str:
    """One note for all keys that have no effect, by reason. Empty if there are none."""
    reasons: dict[str, list[str]] = {}
    for key, value, why in dropped:
        reasons.setdefault(why, []).append(f"{key}={shown(value)}")
    lines = (f"  {', '.join(keys)}: {why}" for why, keys in reasons.items())
    return "\n".join(("these keys have no effect here:", *lines)) if reasons else ""


class Explanation(NamedTuple):
    """What becomes of the keys of a command line of verl; `refused` are the keys that the problems are about."""

    dropped: tuple[Dropped, ...]
    moved: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    refused: tuple[str, ...]


def explain(schema: type[Root], path: str | Path | None, overrides: Sequence[str]) -> Explanation:
    """What becomes of each key. Files and devices, which another machine may have, are not checked."""
    translation, _, written = _translated(schema, (path, overrides, None))
    tree = resolve_aliases(translation.tree, SAME_AS if schema is Config else SFT_SAME_AS)
    rules = UNSUPPORTED if schema is Config else SFT_UNSUPPORTED
    _, found = _validated(schema, tree, rules, ())
    problems = _in_order((*translation.problems, *found), written)
    refused = [next((key for key in keys_in(problem) if key in written), None) for problem in problems]
    return Explanation(translation.dropped, translation.moved, problems, tuple(key for key in refused if key))


def _translated(schema: type[Root], sources: Sources) -> tuple[Translation, Notes, list[str]]:
    """The tree of all sources in the keys of the schema, the notes of the file, and the keys in the order written."""
    path, overrides, base = sources
    document, choices = _document(None if path is None else Path(path))
    layers = []
    written: list[str] = []
    malformed: list[str] = []
    composed: Any = None
    for layer in (base or {}, *document.layers, *_overrides(overrides)):
        if isinstance(layer, ConfigError):
            malformed += layer.problems
            written += layer.problems
            continue
        kept, chosen = group_choices(dict(layer))
        choices |= chosen
        composed = kept.pop("defaults", composed)  # its interpolations are Hydra's
        expanded = _expanded(kept)
        written += [key for key, _ in leaves(expanded)]
        # Before they are merged: a later layer would replace such a value, or the value the section, without a word.
        layers.append(_sections_only(expanded, schema, malformed))
    merged = _sections_only(_merged(layers, schema), schema, malformed)
    tree = merged if composed is None else {"defaults": composed, **merged}
    translation = translate(tree, schema, choices, sft=schema is SftConfig)
    problems = [*malformed, *translation.problems]
    tree = translation.tree
    for key, value in leaves(tree):
        if value == "???":
            problems.append(f"{key} is ???, which marks a required value; set it.")
            tree = without(tree, key)
    return translation._replace(tree=tree, problems=tuple(problems)), document.notes, written


def _document(path: Path | None) -> tuple[Document, dict[str, str]]:
    """The file, and what the name of a file of verl says that is not there."""
    if path is None or path.name == "":
        return Document([], Notes()), {}
    name = path.name.removesuffix(".yaml").removesuffix(".yaml")
    if not path.expanduser().exists() and is_own_file(path):
        return Document([], Notes()), {"--config-name": name} if "megatron" in name or "veomni" in name else {}
    return read_document(path), {}


def is_own_file(path: Path) -> bool:
    """Whether the name is that of a file of verl, whose place Rally's defaults take where it does not exist."""
    name = path.name.removesuffix(".yaml").removesuffix(".yaml")
    return name in OWN_FILES or "megatron" in name


def _read(
    schema: type[C], sources: Sources, rules: Sequence[Unsupported], checks: Sequence[Callable[[C], Iterator[str]]]
) -> tuple[C | None, tuple[str, ...], Translation]:
    translation, notes, written = _translated(schema, sources)
    tree = resolve_aliases(translation.tree, SAME_AS if schema is Config else SFT_SAME_AS)
    unmet = tuple(notes.unmet(tree))
    config, problems = _validated(schema, tree, rules, checks)
    if unmet:  # the checks would report the same files again, without the command
        return config, unmet, translation
    return config, _in_order((*translation.problems, *problems), written), translation


def _validated(
    schema: type[C], tree: Tree, rules: Sequence[Unsupported], checks: Sequence[Callable[[C], Iterator[str]]]
) -> tuple[C | None, list[str]]:
    """The configuration, or None, and all its problems. Those of the valid keys are found beside invalid ones."""
    try:
        config = schema.model_validate(tree)
        return config, _checked(config, rules, checks)
    except ValidationError as error:
        known = tuple(schema.keys())
        details = error.errors(include_url=False)
    problems = [sentence(detail, known) for detail in details]
    rest = _without(tree, [detail["loc"] for detail in details])
    try:
        found = _checked(schema.model_validate(rest), rules, checks)
    except ValidationError:
        return None, problems
    # A check that reads an invalid key, or a key that a misspelled one was meant to be, saw its default.
    doubtful = {key for problem in problems for key in keys_in(problem)}
    return None, problems + [problem for problem in found if not doubtful & set(keys_in(problem))]


def _checked(config: C, rules: Sequence[Unsupported], checks: Sequence[Callable[[C], Iterator[str]]]) -> list[str]:
    return [*unsupported_values(config, rules), *(problem for check in checks for problem in check(config))]


def keys_in(problem: str) -> list[str]:
    """The dotted keys that a sentence names."""
    return _KEY.findall(problem)


def _in_order(problems: Sequence[str], written: Sequence[str]) -> tuple[str, ...]:
    """The problems in the order in which their keys were written, without duplicates. Others follow."""
    last = {key: number for number, key in enumerate(written)}
    for key, number in list(last.items()):
        while (key := key.rpartition(".")[0]) and key not in last:
            last[key] = number  # a section stands where its first key stands

    def place(problem: str) -> int:
        return next((last[key] for key in (problem, *keys_in(problem)) if key in last), len(written))

    return tuple(sorted(dict.fromkeys(problems), key=place))


def _overrides(texts: Sequence[str]) -> Iterator[Tree | ConfigError]:
    """Each override as a layer, or the error that it is."""
    for text in texts:
        try:
            yield _override(text)
        except ConfigError as error:
            yield error


def _override(text: str) -> Tree:
    """`a.b=1`, `+a.b=1` and `++a.b=1` as a mapping. Hydra needs the plus signs for new keys; here they mean nothing."""
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("+").removeprefix("+").strip()
    if not equals or not all(key.split(".")) or key.count(".") >= DEEPEST:
        raise ConfigError(f"the override {shown(text)!r} is not of the form key=value, such as trainer.total_epochs=2.")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value.strip()}"]))
    except (yaml.YAMLError, OmegaConfBaseException, *UNREADABLE):
        if (hint := hint_for(key, (*HINTS, *SFT_HINTS))) and not hint.values:
            return {key: value}  # in Hydra's syntax, of a key without effect
        raise ConfigError(
            f"the value of the override {shown(text)!r} cannot be read; quote it and close every ${{."
        ) from None
    assert isinstance(parsed, dict)
    check_values(parsed, f"the override {shown(text)}", DEEPEST - key.count("."))
    return {key: _hydra_pairs(parsed["value"]) if value.strip().startswith("{") else parsed["value"]}


def _hydra_pairs(value: Any) -> Any:
    """A mapping in Hydra's syntax, `{a:1,b:x}`: without a space after the colon YAML reads the pair as one name."""
    if not isinstance(value, dict):
        return value
    pairs: Tree = {}
    for name, item in value.items():
        key, colon, text = str(name).partition(":")
        if item is None and colon and key:
            [pairs[key]] = _override(f"{key}={text}").values()
        else:
            pairs[name] = _hydra_pairs(item)
    return pairs


def _expanded(layer: Mapping[str, Any]) -> Tree:
    """The layer with dotted keys as nested sections, and `multi_turn: true` as `multi_turn: {enable: true}`."""
    full: Tree = {}
    for key, nested in layer.items():
        for part in reversed(str(key).split(".")):
            nested = {part: nested}
        full = merge(full, nested)
    rollout: Any = full
    for part in ("actor_rollout_ref", "rollout"):
        rollout = rollout.get(part) if isinstance(rollout, dict) else None
    if isinstance(rollout, dict) and isinstance(rollout.get("multi_turn"), bool):
        rollout["multi_turn"] = {"enable": rollout["multi_turn"]}
    return full


MAIN_KEYS: tuple[str, ...] = (
    *("path", "name", "train_files", "model.path", "adv_estimator", "default_agent_loop", "teacher_model.model_path"),
    *("backend", "tool_config_path", "optimizer", "default_local_dir"),
)
"""Keys that a text is probably meant for where it is written for their whole section, the likeliest first."""
SHORT = ("model", "actor", "rollout", "ref")
"""Sections that are written without the `actor_rollout_ref` above them by mistake."""
MAIN_SWITCHES = ("enable", "enabled")
MAIN_NUMBERS = ("lr", "kl_coef", "max_assistant_turns", "train_batch_size", "n")


def _sections_only(tree: Tree, schema: type[Root], problems: list[str]) -> Tree:
    """The tree without values that are written where a section stands; each is added to `problems`.

    Interpolations may become a section, and null is how YAML writes an empty one.
    """
    for key in _sections(schema):
        value = at(tree, key)
        if value is None or isinstance(value, dict) or "${" in str(value):
            continue
        problems.append(not_a_section(key, value, _meant(schema, key, value)))
        tree = without(tree, key)
    return tree


@functools.cache
def _sections(schema: type[Root]) -> tuple[str, ...]:
    """The sections of the schema, and those of verl whose keys have another place here."""
    own = tuple(schema.sections())
    moves, short = (MOVES, SHORT) if schema is Config else (SFT_MOVES, ())
    moved = [old for old, new in moves if new in own]
    above = [old[: dot.start()] for old, _ in moves for dot in re.finditer(r"\.", old)]
    return tuple(dict.fromkeys((*own, *moved, *above, *short)))


def _meant(schema: type[Root], key: str, value: Any) -> str | None:
    """The key in the section `key` that a value was probably meant for."""
    target = dict(MOVES if schema is Config else SFT_MOVES).get(key, key)
    target = f"actor_rollout_ref.{key}" if schema is Config and key in SHORT else target
    names = MAIN_KEYS
    if isinstance(value, bool):
        names = MAIN_SWITCHES
    elif isinstance(value, int | float):
        names = MAIN_NUMBERS
    known = set(schema.keys())
    return next((full for name in names if (full := f"{target}.{name}") in known and _fits(schema, full, value)), None)


def _fits(schema: type[Root], key: str, value: Any) -> bool:
    try:
        schema.model_validate(put({}, key, value))
    except ValidationError:
        return False
    return True


def _merged(layers: Sequence[Tree], schema: type[Root]) -> Tree:
    """The layers merged into one tree, with interpolations resolved. They may refer to any key, also to defaults."""
    written: Tree = functools.reduce(merge, layers)
    learn_tree(written)
    # OmegaConf is slow to wrap the hundreds of defaults, and only interpolations need them.
    whole = merge(schema().model_dump(mode="json"), written) if "${" in str(written) else written
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(whole), resolve=True)
    except InterpolationResolutionError as error:
        hint = "write full keys such as ${data.seed}, or ${oc.env:HOME} for an environment variable"
        raise ConfigError(f"{error.full_key}: {first_line(error)}; {hint}.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}.") from None
    tree: Tree = _as_written(resolved, written)
    return tree


def _as_written(resolved: Any, written: Any) -> Any:
    """The part of the resolved tree whose keys are in `written`."""
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {key: _as_written(resolved[key], value) for key, value in written.items()}
    return resolved


def _without(tree: Tree, locations: Sequence[tuple[int | str, ...]]) -> Tree:
    """The tree without the keys at the locations; an error inside a list removes the whole list."""

    def prune(node: Any, here: tuple[int | str, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        bad = {loc[len(here)] for loc in locations if loc[: len(here)] == here and len(loc) > len(here)}
        return {
            key: prune(value, (*here, key))
            for key, value in node.items()
            if key not in bad or (isinstance(value, dict) and (*here, key) not in locations)
        }

    pruned: Tree = prune(tree, ())
    return pruned
