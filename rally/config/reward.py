"""`custom_reward_function.*`, `reward.*`, `reward_model.*`, `reward_shaping.*`: how an episode earns its number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rally.config.base import Count, Float, Natural, NonNegative, Only, PathText, Positive, Section
from rally.config.rollout import OnError

Manager = Literal["naive", "dapo", "batch", "prime", "rate_limited", "remote", "gdpo"]


class CustomRewardFunction(Section):
    path: PathText | None = None
    """A Python file, or `pkg://module`."""
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)


class ManagerModule(Section):
    path: PathText | None = None
    name: str | None = None


class RewardManagerConfig(Section):
    source: Literal["register", "importlib"] = "register"
    name: Manager = "naive"
    module: ManagerModule = ManagerModule()


class SandboxFusion(Section):
    url: str | None = None
    max_concurrent: Count = 64
    memory_limit_mb: Count = 1024


class RewardModelWeights(Section):
    path: PathText | None = None
    external_lib: str | None = None
    trust_remote_code: bool = False


class OverlongBuffer(Section):
    enable: bool = False
    """Needs reward_manager=dapo."""
    len: Count = 512
    """The last so many tokens of the response budget cost a growing penalty."""
    penalty_factor: NonNegative = 1.0
    """What a response that fills the buffer loses."""
    log: bool = False


class RewardKwargs(Section):
    """Keys of the manager; all others are passed to the reward function, below custom_reward_function.reward_kwargs."""

    model_config = ConfigDict(extra="allow")

    max_resp_len: Count | None = None
    """Where the overlong buffer ends; null is the response budget."""
    overlong_buffer_cfg: OverlongBuffer = OverlongBuffer()


class RewardModelConfig(Section):
    reward_kwargs: RewardKwargs = RewardKwargs()
    num_workers: Count | None = None
    """The same as reward.num_workers."""
    reward_manager: Manager = "naive"
    """The same as reward_manager.name and reward.reward_manager.name. prime and remote are naive: a function of your
    own always runs in processes. rate_limited spaces calls out."""

    use_reward_loop: Annotated[bool, Only(True, because="episodes are scored as they finish")] = True
    launch_reward_fn_async: bool = False
    """Episodes are always scored as they finish, so both values are right."""

    enable: bool = False
    enable_resource_pool: bool = False
    n_gpus_per_node: Natural = 0
    nnodes: Natural = 0
    model: RewardModelWeights = RewardModelWeights()
    rollout: dict[str, Any] = Field(default_factory=dict)
    sandbox_fusion: SandboxFusion = SandboxFusion()
    reward_loop_source: Literal["register", "importlib"] = "register"
    reward_loop_module_path: PathText | None = None
    reward_loop_class_name: str | None = None
    max_concurrent: Count = 1
    """reward_manager=rate_limited: calls at a time, in place of reward.num_workers."""
    max_rpm: Count | None = None
    """reward_manager=rate_limited: calls a minute, evenly spaced. None is no limit."""
    max_tpm: Count | None = None
    """reward_manager=rate_limited: tokens a minute, at estimated_tokens_per_request each. None is no limit."""
    estimated_tokens_per_request: Count = 2000
    timeout: Positive = 300.0
    """reward_manager=rate_limited: seconds of one call, in place of reward.timeout."""

    @property
    def calls_per_minute(self) -> float | None:
        """What both limits leave."""
        by_tokens = self.max_tpm / self.estimated_tokens_per_request if self.max_tpm else None
        return min((limit for limit in (self.max_rpm, by_tokens) if limit), default=None)


class NewRewardModel(Section):
    enable: bool = False
    enable_resource_pool: bool = False
    n_gpus_per_node: Natural = 0
    nnodes: Natural = 0
    model_path: PathText | None = None
    rollout: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Section):
    num_workers: Count = 2
    """Processes that score episodes. The ecosystem's 8 is more than a laptop has."""
    timeout: Positive = 30.0
    """Seconds one episode's score may take."""
    on_error: OnError = "drop_group"
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()

    reward_manager: RewardManagerConfig = RewardManagerConfig()
    reward_model: NewRewardModel = NewRewardModel()
    sandbox_fusion: SandboxFusion = SandboxFusion()


class IntermediateRewards(Section):
    tool_call_success: Float = 0.0
    """For each call that the tool answered, repeated ones left out."""
    valid_reasoning: Float = 0.0
    """For each assistant turn that says something besides its calls."""


Penalty = Annotated[Float, Field(le=0)]


class Penalties(Section):
    invalid_tool_call: Penalty = 0.0
    """For each call that cannot be read, or names no tool, or has wrong arguments."""
    max_turns_exceeded: Penalty = 0.0
    """Once, when a turn limit ended the episode."""
    redundant_tool_call: Penalty = 0.0
    """For each call that was answered before, with the same arguments."""


class RewardShaping(Section):
    enable: bool | None = None
    """false switches all of it off; null is on where a value is not 0."""
    intermediate_rewards: IntermediateRewards = IntermediateRewards()
    penalties: Penalties = Penalties()
    tool_format_reward: Float = 0.0
    """Once, when there were calls and all of them were valid."""
