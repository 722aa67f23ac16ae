"""`Config`: the whole configuration of a training run.

Its properties resolve settings that have several equivalent keys, so that readers need not know the spellings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from rally.config.actor import ActorConfig, RefConfig
from rally.config.algorithm import AlgorithmConfig
from rally.config.base import AsList, Count, Only, Root, Section, Texts, look_up
from rally.config.critic import CriticConfig
from rally.config.data import DataConfig
from rally.config.distillation import DistillationConfig
from rally.config.env import EnvConfig
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
from rally.config.trainer import (
    AsyncTraining,
    ColocateAsync,
    GlobalProfiler,
    RayKwargs,
    TrainerConfig,
    TransferQueue,
)

ROLLOUT = "actor_rollout_ref.rollout"
NO_HYDRA = "Rally has its own defaults and does not compose files with Hydra"

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
"""Groups of equivalent keys. Any one of a group may be set; different values in a group are an error."""


class Hydra(Section):
    """Keys of Hydra that verl's files hold; Rally does not use Hydra."""

    searchpath: Texts = ()
    """Accepted and has no effect: Rally does not compose files with Hydra."""


class ActorRolloutRef(Section):
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()

    hybrid_engine: bool = True
    """false: servers sample on devices of their own. It needs trainer.v1.trainer_mode=separate_async, which does so
    with either value."""
    nccl_timeout: Count = 600
    """Seconds that one of several GPUs waits for the others. No effect on one device."""


class Config(Root):
    """A training run: the sections as in verl, then properties derived from them."""

    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
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
    """The files that a verl configuration builds on. Rally's own defaults take their place."""

    reward_manager: RewardManagerConfig = RewardManagerConfig()
    critic: CriticConfig = CriticConfig()
    distillation: DistillationConfig = DistillationConfig()
    global_profiler: GlobalProfiler = GlobalProfiler()
    transfer_queue: TransferQueue = TransferQueue()
    ray_kwargs: RayKwargs = RayKwargs()
    async_training: AsyncTraining = AsyncTraining()

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
    def samples_in_ranks(self) -> bool:
        """Whether every rank of several samples with an engine of its own."""
        return self.rollout.name == "embedded" and self.trainer.world_size > 1 and not self.asynchronous

    @property
    def uses_loop_workers(self) -> bool:
        """Whether episodes are played by processes of their own."""
        served = self.rollout.name != "embedded" or self.samples_in_ranks
        return self.rollout.agent.num_workers > 1 and served

    @property
    def asynchronous(self) -> bool:
        """Whether batches are sampled ahead of the updates that train on them."""
        return self.trainer.v1.trainer_mode != "sync"

    @property
    def batches_ahead(self) -> float:
        """How many batches start before the update of the weights they begin with."""
        versions = self.trainer.v1.sampler.max_off_policy_threshold
        return self.batches_asked if versions is None else min(self.batches_asked, versions - 1)

    @property
    def batches_asked(self) -> float:
        """`batches_ahead` before the limit of versions that a trajectory may span."""
        threshold = self.async_training.staleness_threshold
        return self.async_mode.num_warmup_batches if threshold is None else threshold

    @property
    def async_mode(self) -> ColocateAsync:
        """The section of the asynchronous mode."""
        modes = self.trainer.v1
        return modes.separate_async if self.separate else modes.colocate_async

    @property
    def separate(self) -> bool:
        """Whether servers sample on devices that the trainer does not use."""
        return self.trainer.v1.trainer_mode == "separate_async"

    @property
    def fixed_lag(self) -> bool:
        """Whether each batch is sampled as a whole, one update ahead."""
        return self.asynchronous and self.async_mode.fixed_lag

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.trainer.run_dir

    @property
    def external_libs(self) -> tuple[tuple[str, str], ...]:
        """The user's modules to import at the start, each with its key."""
        keys = ("actor_rollout_ref.model", "critic.model", "reward_model.model")
        return tuple((f"{key}.external_lib", name) for key in keys for name in look_up(self, f"{key}.external_lib"))

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def prompt_length(self) -> int:
        """The most tokens of a prompt, by any of its keys."""
        return self.rollout.prompt_length or self.data.max_prompt_length

    @property
    def response_length(self) -> int:
        """The most tokens of a response, sampled and observed together."""
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
        """Whether the advantage estimator uses a critic."""
        return self.algorithm.adv_estimator in ("gae", "turn_gae")

    @property
    def tool_config_path(self) -> str | None:
        """The tool YAML, by any of its keys."""
        written: str | None = self.first_set(TOOL_CONFIG)
        return written

    @property
    def function_tool_path(self) -> str | None:
        """The file of `@function_tool` functions, by any of its keys."""
        written: str | None = self.first_set(FUNCTION_TOOLS)
        return written

    @property
    def max_turns(self) -> int | None:
        """The most assistant turns of an episode, by any of its keys; None is no limit."""
        written: int | None = self.first_set(MAX_TURNS)
        return written

    @property
    def history(self) -> Literal["append", "rerender"]:
        """How earlier turns enter a prompt: as sampled, or rendered anew."""
        multi_turn = self.rollout.multi_turn
        return "rerender" if multi_turn.use_inference_chat_template else multi_turn.history or "append"

    @property
    def agent_loop_name(self) -> str:
        """The loop for rows without `agent_name`: a dotted class path or a registered name.

        An environment selects the loop env_agent. Configured tools, configured users and multi_turn.enable select the
        tool loop, unless default_agent_loop names a loop other than its default. So configured tools are never silently
        unused.
        """
        rollout = self.rollout
        if rollout.agent_loop_class:
            return rollout.agent_loop_class
        wants_tools = self.tool_config_path or self.function_tool_path or rollout.agent_loop_config.tools
        wants_user = rollout.multi_turn.interaction_config_path
        multi_turn = wants_tools or wants_user or rollout.multi_turn.enable or rollout.use_agent_loop
        named = rollout.agent.default_agent_loop
        if self.env.entries and named == "single_turn_agent":
            return "env_agent"
        return "tool_agent" if multi_turn and named == "single_turn_agent" else named

    @property
    def reward_function(self) -> CustomRewardFunction:
        """The user's reward function, by either of its sections; its path is None for the built-in ones."""
        new = self.reward.custom_reward_function
        return new if new != CustomRewardFunction() else self.custom_reward_function

    @property
    def reward_kwargs(self) -> dict[str, Any]:
        """The extra keyword arguments of the reward function."""
        return {**(self.reward_model.reward_kwargs.model_extra or {}), **self.reward_function.reward_kwargs}

    @property
    def uses_classifier(self) -> bool:
        """Whether a sequence classifier scores the episodes."""
        return self.reward_model.enable and self.reward_function.path is None

    @property
    def uses_judge(self) -> bool:
        """Whether the reward function is given the address of a served reward model."""
        return self.reward_model.enable and self.reward_function.path is not None

    @property
    def reward_manager_name(self) -> Manager:
        """How episodes are scored, by any of its keys."""
        written: list[Manager] = [name for key in MANAGER if (name := look_up(self, key)) != "naive"]
        return written[0] if written else "naive"

    def require_training(self) -> None:
        """Raise a `ConfigError` that lists every required key that is not set."""
        rows = "data.val_files" if self.trainer.val_only else "data.train_files"
        missing = [
            f"{key} is not set; {what}."
            for key, what in (
                ("actor_rollout_ref.model.path", "set it to a model folder or a Hub name"),
                (rows, "set it to a .parquet or .jsonl file, or set env.name"),
            )
            if not look_up(self, key) and not (key == rows and self.env.entries)
        ]
        if missing:
            raise ConfigError(missing)
