"""A loop written for verl reads the keys of the run where it looks for them, with what was left out filled in."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rally.config import Config


def config_for_loops(config: Config) -> DictConfig:
    """All keys as such a loop reads them: attributes and `get`; lengths, turns and the tool file are never left out
    because they were spelled otherwise."""
    tree = config.model_dump(mode="json")
    rollout = tree["actor_rollout_ref"]["rollout"]
    rollout |= {"prompt_length": config.prompt_length, "response_length": config.response_length}
    rollout["multi_turn"] |= {
        "max_assistant_turns": config.max_turns,
        "tool_config_path": config.tool_config_path,
        "function_tool_path": config.function_tool_path,
    }
    return as_written(tree)


def as_written(tree: dict[str, Any]) -> DictConfig:
    """Keys that code written for verl reads, each as the user wrote it."""
    keys: DictConfig = OmegaConf.create(_literal(tree))
    return keys


def _literal(value: Any) -> Any:
    """What the user wrote was interpolated before: a ${ that is left is text, and must be read as such."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
