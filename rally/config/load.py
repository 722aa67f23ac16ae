"""Loads a configuration from a YAML file and `key=value` overrides, or raises one error that lists every mistake."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from rally.config.aliases import SAME_AS, SFT_SAME_AS, resolve_aliases
from rally.config.base import Root
from rally.config.checks.consistency import CHECKS, SFT_CHECKS
from rally.config.checks.unsupported import SFT_UNSUPPORTED, UNSUPPORTED, Unsupported, unsupported_values
from rally.config.errors import ConfigError, sentence, shown
from rally.config.schema import Config
from rally.config.sft import SftConfig
from rally.config.yaml_files import DEEPEST, Document, Notes, Tree, check_values, first_line, merge, read_document
from rally.redact import learn_tree
from rally.util.checksums import UNREADABLE

C = TypeVar("C", bound=Root)


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """The training configuration from `base`, the YAML file and the overrides; later sources win."""
    return _load(Config, (path, overrides, base), UNSUPPORTED, CHECKS)


def load_sft_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> SftConfig:
    """The supervised fine-tuning configuration from `base`, the YAML file and the overrides; later sources win."""
    return _load(SftConfig, (path, overrides, base), SFT_UNSUPPORTED, SFT_CHECKS)


class LoadedConfig(NamedTuple):
    """A configuration with its problems. `config` is None if it could not be validated."""

    config: Config | None
    problems: tuple[str, ...]


def read_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Like `load_config`, but returns problems instead of raising, so that a caller can check further."""
    try:
        return LoadedConfig(*_read(Config, (path, overrides, None), UNSUPPORTED, CHECKS))
    except ConfigError as error:
        return LoadedConfig(None, error.problems)


Sources = tuple[str | Path | None, Sequence[str], Mapping[str, Any] | None]


def _load(
    schema: type[C], sources: Sources, rules: Sequence[Unsupported], checks: Sequence[Callable[[C], Iterator[str]]]
) -> C:
    config, problems = _read(schema, sources, rules, checks)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _read(
    schema: type[C], sources: Sources, rules: Sequence[Unsupported], checks: Sequence[Callable[[C], Iterator[str]]]
) -> tuple[C | None, tuple[str, ...]]:
    path, overrides, base = sources
    document = read_document(Path(path)) if path is not None else Document([], Notes())
    layers = [_expanded(base or {}), *map(_expanded, document.layers), *_overrides(overrides)]
    tree = resolve_aliases(_merged(layers, schema), SAME_AS if schema is Config else SFT_SAME_AS)
    unmet = tuple(document.notes.unmet(tree))
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        known = tuple(schema.keys())
        problems = [sentence(detail, known) for detail in error.errors(include_url=False)]
        rest = _without(tree, [detail["loc"] for detail in error.errors()])
        return None, unmet or _unique(problems + _unsupported_among_valid(schema, rest, rules))
    if unmet:  # the checks would report the same files again, without the command
        return config, unmet
    return config, _unique(
        [*unsupported_values(config, rules), *(problem for check in checks for problem in check(config))]
    )


def _overrides(texts: Sequence[str]) -> list[Tree]:
    layers: list[Tree] = []
    problems: list[str] = []
    for text in texts:
        try:
            layers.append(_expanded(_override(text)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return layers


def _override(text: str) -> Tree:
    """`a.b=1`, `+a.b=1` and `++a.b=1` as a mapping. Hydra needs the plus signs for new keys; here they mean nothing."""
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("+").removeprefix("+").strip()
    if not equals or not all(key.split(".")) or key.count(".") >= DEEPEST:
        raise ConfigError(f"the override {shown(text)!r} is not of the form key=value, such as trainer.total_epochs=2.")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value.strip()}"]))
    except (yaml.YAMLError, OmegaConfBaseException, *UNREADABLE):
        raise ConfigError(
            f"the value of the override {shown(text)!r} cannot be read; quote it and close every ${{."
        ) from None
    assert isinstance(parsed, dict)
    check_values(parsed, f"the override {shown(text)}", DEEPEST - key.count("."))
    return {key: parsed["value"]}


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


def _merged(layers: Sequence[Tree], schema: type[Root]) -> Tree:
    """The layers merged into one tree, with interpolations resolved. They may refer to any key, also to defaults."""
    written: Tree = functools.reduce(merge, layers)
    learn_tree(written)
    # OmegaConf is slow to wrap the hundreds of defaults, and only interpolations need them.
    whole = merge(schema().model_dump(mode="json"), written) if "${" in str(written) else written
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(whole), resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is ???, which marks a required value; set it.") from None
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


def _unsupported_among_valid(schema: type[Root], rest: Tree, rules: Sequence[Unsupported]) -> list[str]:
    """The unsupported keys among the valid ones, so that one error reports both kinds."""
    try:
        return list(unsupported_values(schema.model_validate(rest), rules))
    except ValidationError:
        return []


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


def _unique(problems: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(problems))
