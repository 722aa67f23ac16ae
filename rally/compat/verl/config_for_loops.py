"""Converts a Config into the OmegaConf tree that loops written for verl read, with defaults filled in."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rally.config import Config


def config_for_loops(config: Config) -> DictConfig:
    """All keys, readable as attributes and with `get`. Lengths, turn limits and tool files are set under verl's names,
    also if the user set them by another key. Limits that have no default in Rally have verl's, which loops rely on."""
    tree = config.model_dump(mode="json")
    rollout = tree["actor_rollout_ref"]["rollout"]
    rollout |= {"prompt_length": config.prompt_length, "response_length": config.response_length}
    rollout["multi_turn"] |= {
        "max_assistant_turns": config.max_turns,
        "tool_config_path": config.tool_config_path,
        "function_tool_path": config.function_tool_path,
    }
    rollout["multi_turn"] |= {k: v for k, v in LIMITS.items() if rollout["multi_turn"].get(k) is None}
    rollout.setdefault("full_determinism", False)
    return as_written(tree)


LIMITS = {"max_parallel_calls": 1, "max_tool_response_length": 256, "tool_response_truncate_side": "middle"}


def as_written(tree: dict[str, Any]) -> DictConfig:
    """The keys as an OmegaConf tree, each value as the user wrote it."""
    keys: DictConfig = OmegaConf.create(_literal(tree))
    return keys


def _literal(value: Any) -> Any:
    """Escape `${`: values are already interpolated, so a remaining one is literal text."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
