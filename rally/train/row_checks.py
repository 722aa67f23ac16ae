"""What a row would get wrong in every one of its episodes is told before any weight is loaded."""

from __future__ import annotations

from rally.config import Config
from rally.data import TaskSet
from rally.interactions import Interactions
from rally.rewards import check_source
from rally.track import RunConsole

SCORED_BY_FUNCTIONS = ("tool_agent", "single_turn_agent")  # other loops may score their episodes themselves


def check_rows(config: Config, tasks: TaskSet, interactions: Interactions) -> None:
    """A row must not ask for a user who is not there, nor be one that no reward function knows."""
    rollout = config.rollout
    own_loops = rollout.agent_loop_class is not None or rollout.agent.agent_loop_config_path is not None
    built_in_rewards = config.reward_function.path is None and not own_loops
    for task in tasks:
        interactions.find(task)
        if built_in_rewards and (task.agent_name or config.agent_loop_name) in SCORED_BY_FUNCTIONS:
            check_source(task.data_source)


def warn_of_repeats(rows: int, batch_size: int, console: RunConsole) -> None:
    """A batch of more rows than there are is filled by further epochs."""
    if batch_size > rows:
        console.warn_once(
            "repeats",
            f"data.train_batch_size={batch_size} is more than the {rows} training rows, so a step takes rows more than "
            f"once; set it to {rows} or less, or bring more rows",
        )
