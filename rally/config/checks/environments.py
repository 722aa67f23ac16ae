"""Checks of `env.*`: which other keys a run with environments cannot have, and keys that need an environment."""

from __future__ import annotations

from collections.abc import Iterator

from rally.config.base import look_up
from rally.config.env import EnvConfig
from rally.config.errors import shown
from rally.config.schema import FUNCTION_TOOLS, ROLLOUT, TOOL_CONFIG, Config

ROWS = "the rows are made from env.*; leave it out"
TOOLS = "the tools of an episode are those of its environment; leave it out"
NOT_WITH = {
    **dict.fromkeys(("data.train_files", "data.val_files", "data.custom_cls.path", "data.need_tools_kwargs"), ROWS),
    "data.train_max_samples": "set env.train_size instead",
    "data.val_max_samples": "set env.val_size instead",
    **dict.fromkeys((*TOOL_CONFIG, *FUNCTION_TOOLS, f"{ROLLOUT}.agent_loop_config.tools"), TOOLS),
    f"{ROLLOUT}.multi_turn.interaction_config_path": "the environment answers the policy; leave it out",
    f"{ROLLOUT}.skip_rollout": "cached episodes are found by the prompts of their rows; leave it out",
    "custom_reward_function.path": "the environment gives the reward; leave it out",
    "reward.custom_reward_function.path": "the environment gives the reward; leave it out",
}
"""Keys that must keep their default beside an environment."""
OTHER_LOOPS = ("tool_agent", "black_box", "rally.gateway.BlackBoxAgentLoop")


def environments(config: Config) -> Iterator[str]:
    env = config.env
    if not env.entries:
        for key, value in env:
            if value != getattr(EnvConfig(), key):
                yield f"env.{key}={shown(value)} has no effect without env.name or env.mixture; set one of them."
        return
    defaults = Config()
    for key, why in NOT_WITH.items():
        if (value := look_up(config, key)) != look_up(defaults, key):
            yield f"{key}={shown(value)} cannot be used with an environment: {why}."
    if config.agent_loop_name in OTHER_LOOPS:
        yield f"the agent loop {config.agent_loop_name} does not play environments; leave it out to use env_agent."
    if env.name is not None and env.mixture:
        yield "env.name and env.mixture both set the environments; keep one of them."
    labels = [entry.label or entry.name for entry in env.entries]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        yield f"env.mixture has {repeated[0]} more than once; give each entry a label of its own."
    if not any(entry.weight for entry in env.entries) and not config.trainer.val_only:
        advice = "raise one of them, or set trainer.val_only=true"
        yield f"env.mixture has only weights of 0, so there is nothing to train on; {advice}."
