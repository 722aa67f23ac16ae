"""A loop written for verl reads the keys of the run where it looks for them, with what was left out filled in."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from rally.config import Config
from rally.train.parts import prompt_length, response_length


def config_for_loops(config: Config) -> DictConfig:
    """All keys as such a loop reads them: attributes and `get`; lengths, turns and the tool file are never left out
    because they were spelled otherwise."""
    tree = config.model_dump(mode="json")
    rollout = tree["actor_rollout_ref"]["rollout"]
    rollout |= {"prompt_length": prompt_length(config), "response_length": response_length(config)}
    rollout["multi_turn"] |= {
        "max_assistant_turns": config.max_turns,
        "tool_config_path": config.tool_config_path,
        "function_tool_path": config.function_tool_path,
    }
    return OmegaConf.create(tree)
