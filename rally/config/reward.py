"""Schema of `custom_reward_function.*`, `reward.*`, `reward_model.*`, `reward_shaping.*`: how episodes are scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rally.config.base import Count, Float, Natural, NonNegative, Only, PathText, Positive, Section, Texts
from rally.config.rollout import OnError

Manager = Literal["naive", "dapo", "batch", "prime", "rate_limited", "remote", "gdpo"]


class CustomRewardFunction(Section):
    path: PathText | None = None
    """Your reward function's file, module, or `pkg://module`. null takes the built-in function of the row's data
    source."""
    name: str = "compute_score"
    """The function in path."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the reward function."""


class ManagerModule(Section):
    path: PathText | None = None
    name: str | None = None


class RewardManagerConfig(Section):
    source: Literal["register", "importlib"] = "register"
    name: Manager = "naive"
    """How episodes are scored; the same as reward_model.reward_manager."""
    module: ManagerModule = ManagerModule()


class SandboxFusion(Section):
    url: str | None = None
    max_concurrent: Count = 64
    memory_limit_mb: Count = 1024


class RewardModelMemory(Section):
    param_offload: bool = False
    """Keep the reward model in main memory while it does not score."""


class RewardModelWeights(Section):
    path: PathText | None = None
    """The reward model: a folder or a Hub name. Without custom_reward_function.path it is a sequence classifier with
    one label, and its logit is the reward. With it, it is a language model that is served to your function."""
    input_tokenizer: PathText | None = None
    """Accepted and has no effect: conversations are rendered with the reward model's own chat template."""
    external_lib: Texts = ()
    """Your modules to import at the start, as model.external_lib."""
    trust_remote_code: bool = False
    """Run code that the model's folder brings."""
    dtype: str = "auto"
    """The dtype of a classifier: auto is bfloat16 on a GPU that has it, else float32."""
    fsdp_config: RewardModelMemory = RewardModelMemory()


class JudgeServerKeys(Section):
    url: str | None = None
    """A running server with OpenAI's API, as http://HOST:PORT, for your reward function. null starts one."""
    python: PathText | None = None
    """The interpreter that has vLLM or SGLang. null is the run's own."""
    max_start_wait_time: Positive = 600.0
    """Seconds that the server may take to start."""


class JudgeRollout(Section):
    """The server that a run starts for a generative reward model."""

    name: Literal["rally", "vllm", "sglang"] = "rally"
    """Which server: Rally's own, vLLM or SGLang."""
    dtype: str = "auto"
    """The dtype of its weights."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.5
    """Its share of the GPU memory."""
    tensor_model_parallel_size: Count = 1
    """Its number of GPUs. More than 1 needs vLLM or SGLang."""
    max_model_len: Count | None = None
    """Tokens of a prompt and its answer. null is prompt_length + response_length."""
    prompt_length: Count = 2048
    """Tokens of a prompt."""
    response_length: Count = 2048
    """Tokens of an answer."""
    max_num_seqs: Count = 64
    """Requests that run at once."""
    max_num_batched_tokens: Count = 8192
    """Tokens of one step."""
    enforce_eager: bool = False
    """Run without CUDA graphs (vLLM, SGLang)."""
    seed: Natural = 0
    """The seed of requests that have none."""


class OverlongBuffer(Section):
    enable: bool = False
    """Penalise long responses as DAPO does. Needs reward_manager=dapo."""
    len: Count = 512
    """The penalty grows over this many last tokens of the response budget."""
    penalty_factor: NonNegative = 1.0
    """The penalty of a response that fills the buffer."""
    log: bool = False
    """Report the penalty as the metrics overlong_reward and overlong."""


class RewardKwargs(Section):
    """Keys of the reward manager. All other keys are arguments of the reward function, which
    custom_reward_function.reward_kwargs override."""

    model_config = ConfigDict(extra="allow")

    max_resp_len: Count | None = None
    """The length at which the overlong buffer ends. null is the response budget."""
    overlong_buffer_cfg: OverlongBuffer = OverlongBuffer()


class RewardModelConfig(Section):
    reward_kwargs: RewardKwargs = RewardKwargs()
    num_workers: Count | None = None
    """The same as reward.num_workers."""
    reward_manager: Manager = "naive"
    """How episodes are scored; the same as reward_manager.name and reward.reward_manager.name. prime and remote act as
    naive, since your function always runs in worker processes. rate_limited spaces out calls."""

    use_reward_loop: Annotated[bool, Only(True, because="episodes are scored as they finish")] = True
    launch_reward_fn_async: bool = False
    """Accepted and has no effect: episodes are always scored as they finish."""

    enable: bool = False
    """Score with a reward model: a classifier in process, or, with custom_reward_function.path, a served language
    model, whose address your function gets as reward_router_address."""
    enable_resource_pool: bool = False
    """Accepted and has no effect, like the two keys below: a judge's server gets GPUs that the trainer leaves free."""
    n_gpus_per_node: Natural = 0
    """See enable_resource_pool."""
    nnodes: Natural = 0
    """See enable_resource_pool."""
    model: RewardModelWeights = RewardModelWeights()
    micro_batch_size_per_gpu: Count | None = None
    """Conversations that a classifier scores at once. null is 8."""
    micro_batch_size: Count | None = None
    """The same as micro_batch_size_per_gpu."""
    max_length: Count | None = None
    """Tokens of the longest conversation that a classifier scores; a longer one is an error of its episode. null is
    the limit of the model."""
    rollout: JudgeRollout = JudgeRollout()
    server: JudgeServerKeys = JudgeServerKeys()
    sandbox_fusion: SandboxFusion = SandboxFusion()
    reward_loop_source: Literal["register", "importlib"] = "register"
    reward_loop_module_path: PathText | None = None
    reward_loop_class_name: str | None = None
    max_concurrent: Count = 1
    """reward_manager=rate_limited: concurrent calls, in place of reward.num_workers."""
    max_rpm: Count | None = None
    """reward_manager=rate_limited: calls per minute, evenly spaced. null is no limit."""
    max_tpm: Count | None = None
    """reward_manager=rate_limited: tokens per minute, at estimated_tokens_per_request per call. null is no limit."""
    estimated_tokens_per_request: Count = 2000
    """reward_manager=rate_limited: tokens that one call is assumed to use, for max_tpm."""
    timeout: Positive = 300.0
    """reward_manager=rate_limited: seconds for one call, in place of reward.timeout."""

    @property
    def calls_per_minute(self) -> float | None:
        """The stricter of max_rpm and max_tpm, in calls; None is no limit."""
        by_tokens = self.max_tpm / self.estimated_tokens_per_request if self.max_tpm else None
        return min((limit for limit in (self.max_rpm, by_tokens) if limit), default=None)


class RewardConfig(Section):
    num_workers: Count = 2
    """Processes that score episodes. verl's default of 8 is more than a laptop has."""
    timeout: Positive = 30.0
    """Seconds that scoring one episode may take."""
    on_error: OnError = "drop_group"
    """An episode that could not be scored: drop_group drops its group, retry tries once more before that, zero scores
    it 0, raise stops the run."""
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()

    reward_manager: RewardManagerConfig = RewardManagerConfig()
    sandbox_fusion: SandboxFusion = SandboxFusion()


class IntermediateRewards(Section):
    tool_call_success: Float = 0.0
    """Added for each call that the tool answered; repeated calls do not count."""
    valid_reasoning: Float = 0.0
    """Added for each assistant turn that contains text besides its tool calls."""


Penalty = Annotated[Float, Field(le=0)]


class Penalties(Section):
    invalid_tool_call: Penalty = 0.0
    """Added for each call that cannot be parsed, names no tool, or has wrong arguments."""
    max_turns_exceeded: Penalty = 0.0
    """Added once when a turn limit ended the episode."""
    redundant_tool_call: Penalty = 0.0
    """Added for each call that was already answered with the same arguments."""


class RewardShaping(Section):
    enable: bool | None = None
    """false switches all shaping off. null is on if any value is not 0."""
    intermediate_rewards: IntermediateRewards = IntermediateRewards()
    penalties: Penalties = Penalties()
    tool_format_reward: Float = 0.0
    """Added once when the episode made tool calls and all of them were valid."""
