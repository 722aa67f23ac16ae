"""`Config` describes a training run fully, and answers every question that may be asked of it in several spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from rally.config.actor import ActorConfig, RefConfig
from rally.config.algorithm import AlgorithmConfig
from rally.config.base import AsList, Count, Only, Root, Section, Texts, look_up
from rally.config.critic import CriticConfig
from rally.config.data import DataConfig
from rally.config.errors import ConfigError
from rally.config.model import ModelConfig
from rally.config.reward import (
    CustomRewardFunction,
    Manager,
    RewardConfig,
    RewardManagerConfig,
    RewardModelConfig,
    RewardShaping,
)
from rally.config.rollout import RolloutConfig
from rally.config.trainer import GlobalProfiler, RayKwargs, TrainerConfig, TransferQueue

ROLLOUT = "actor_rollout_ref.rollout"
NO_HYDRA = "Rally brings its own defaults and reads one file, so there is nothing to compose"

TOOL_CONFIG = (
    f"{ROLLOUT}.multi_turn.tool_config_path",
    f"{ROLLOUT}.tool_kwargs.tools_config_file",
    "data.tool_config_path",
)
FUNCTION_TOOLS = (f"{ROLLOUT}.multi_turn.function_tool_path", "data.function_tool_path")
MAX_TURNS = (
    f"{ROLLOUT}.multi_turn.max_assistant_turns",
    f"{ROLLOUT}.multi_turn.max_turns",
    f"{ROLLOUT}.max_turns",
    f"{ROLLOUT}.agent_loop_config.max_turns",
)
MANAGER = ("reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name")
SPELLINGS = (TOOL_CONFIG, FUNCTION_TOOLS, MAX_TURNS)
"""Keys that mean the same. Any one of them may be written; two that differ are an error."""


class Hydra(Section):
    """Where and how Hydra composes; the file itself is all there is to read here."""

    searchpath: Texts = ()


class ActorRolloutRef(Section):
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()

    hybrid_engine: Annotated[bool, Only(True, because="policy and engine share their weights")] = True
    nccl_timeout: Count = 600
    """Seconds that one of several GPUs waits for the others; on one device nothing is sent."""


class Config(Root):
    """A training run. Sections as users of this field know them, then what follows from them."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRef = ActorRolloutRef()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    reward_shaping: RewardShaping = RewardShaping()
    trainer: TrainerConfig = TrainerConfig()

    hydra: Hydra = Hydra()
    defaults: Annotated[
        tuple[str, ...], AsList, Only((), ("_self_",), ("ppo_trainer",), ("ppo_trainer", "_self_"), because=NO_HYDRA)
    ] = ()
    """What a file of verl builds on; here that is Rally's own defaults, and the file goes over them."""

    reward_manager: RewardManagerConfig = RewardManagerConfig()
    critic: CriticConfig = CriticConfig()
    global_profiler: GlobalProfiler = GlobalProfiler()
    transfer_queue: TransferQueue = TransferQueue()
    ray_kwargs: RayKwargs = RayKwargs()

    @property
    def model(self) -> ModelConfig:
        return self.actor_rollout_ref.model

    @property
    def actor(self) -> ActorConfig:
        return self.actor_rollout_ref.actor

    @property
    def rollout(self) -> RolloutConfig:
        return self.actor_rollout_ref.rollout

    @property
    def run_dir(self) -> Path:
        """The folder that holds everything this run writes."""
        return self.trainer.run_dir

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def prompt_length(self) -> int:
        """Tokens a prompt may have, whichever way it was spelled."""
        return self.rollout.prompt_length or self.data.max_prompt_length

    @property
    def response_length(self) -> int:
        """Tokens a response may have, sampled and observed together."""
        return self.rollout.response_length or self.data.max_response_length

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest history that the engine holds."""
        return self.rollout.max_model_len or self.prompt_length + self.response_length

    @property
    def rollout_seed(self) -> int:
        """The seed of sampling."""
        return self.trainer.seed if self.rollout.seed is None else self.rollout.seed

    @property
    def needs_critic(self) -> bool:
        """Whether advantages come from values."""
        return self.algorithm.adv_estimator in ("gae", "turn_gae")

    @property
    def tool_config_path(self) -> str | None:
        """The tool YAML, whichever way it was spelled."""
        written: str | None = self.first_written(TOOL_CONFIG)
        return written

    @property
    def function_tool_path(self) -> str | None:
        """The file of `@function_tool` functions, whichever way it was spelled."""
        written: str | None = self.first_written(FUNCTION_TOOLS)
        return written

    @property
    def max_turns(self) -> int | None:
        """Assistant turns an episode may have, whichever way it was spelled; None is no limit."""
        written: int | None = self.first_written(MAX_TURNS)
        return written

    @property
    def history(self) -> Literal["append", "rerender"]:
        """What a turn is given of the turns before it."""
        multi_turn = self.rollout.multi_turn
        return "rerender" if multi_turn.use_inference_chat_template else multi_turn.history or "append"

    @property
    def agent_loop_name(self) -> str:
        """The loop for rows without `agent_name`: a dotted class, or a registered name.

        Tools and users that are configured are never silently unused, so they and multi_turn.enable choose the tool
        loop unless a loop other than the ecosystem's default was asked for by name.
        """
        rollout = self.rollout
        if rollout.agent_loop_class:
            return rollout.agent_loop_class
        wants_tools = self.tool_config_path or self.function_tool_path or rollout.agent_loop_config.tools
        wants_user = rollout.multi_turn.interaction_config_path
        multi_turn = wants_tools or wants_user or rollout.multi_turn.enable or rollout.use_agent_loop
        named = rollout.agent.default_agent_loop
        return "tool_agent" if multi_turn and named == "single_turn_agent" else named

    @property
    def reward_function(self) -> CustomRewardFunction:
        """The user's reward function, whichever way it was spelled; its path is None for the built-in ones."""
        new = self.reward.custom_reward_function
        return new if new != CustomRewardFunction() else self.custom_reward_function

    @property
    def reward_kwargs(self) -> dict[str, Any]:
        """The extra arguments of the reward function."""
        return {**(self.reward_model.reward_kwargs.model_extra or {}), **self.reward_function.reward_kwargs}

    @property
    def reward_manager_name(self) -> Manager:
        """How episodes are scored, whichever way it was spelled."""
        written: list[Manager] = [name for key in MANAGER if (name := look_up(self, key)) != "naive"]
        return written[0] if written else "naive"

    def require_training(self) -> None:
        """Raise unless everything is named without which no training can begin."""
        missing = [
            f"{key} is not set; {what}."
            for key, what in (
                ("actor_rollout_ref.model.path", "name a model folder or a Hub model"),
                ("data.val_files" if self.trainer.val_only else "data.train_files", "name a .parquet or .jsonl file"),
            )
            if not look_up(self, key)
        ]
        if missing:
            raise ConfigError(missing)
