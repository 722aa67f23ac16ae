"""`actor_rollout_ref.rollout.*`: how episodes are sampled, how long they may be, and what happens when one fails."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rally.config.actor import LogProbKeys
from rally.config.base import (
    Count,
    Float,
    Int,
    Limit,
    Natural,
    NonNegative,
    Only,
    PathText,
    Positive,
    Section,
    Share,
    Texts,
)
from rally.config.model import Dtype, MultiTokenPrediction

OnError = Literal["retry", "drop_group", "zero", "raise"]
TopP = Annotated[Float, Field(gt=0, le=1)]
MinP = Annotated[Float, Field(ge=0, lt=1)]


class ValKwargs(Section):
    n: Count = 1
    temperature: NonNegative = 0.0
    top_p: TopP = 1.0
    top_k: Limit = -1
    do_sample: bool | None = None
    """None samples when temperature is above 0."""


class MultiTurnConfig(Section):
    enable: bool = False
    max_assistant_turns: Count | None = None
    max_turns: Count | None = None
    """The same as max_assistant_turns."""
    max_user_turns: Count | None = None
    """Tool turns count as user turns."""
    tool_config_path: PathText | None = None
    function_tool_path: PathText | None = None
    max_parallel_calls: Count | None = None
    """Calls of one turn that run at the same time; further calls wait for their turn and are never dropped."""
    max_tool_response_length: Count = 256
    """In characters."""
    max_tool_response_tokens: Count | None = None
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """The side that is cut: left keeps the end, right keeps the beginning."""
    format: str = "hermes"
    use_inference_chat_template: bool = False
    """The same as history: rerender."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    history: Literal["append", "rerender"] | None = None
    """append keeps what was sampled, rerender follows the inference template. None is append."""
    tool_timeout: Positive = 30.0
    """Seconds for each call of a tool, and of a simulated user."""
    max_tool_failures: Natural = 3
    """Failed tool turns in a row that end an episode; 0 is off."""
    max_repeated_calls: Natural = 3
    """Equal tool turns in a row that end an episode; 0 is off."""
    interaction_config_path: PathText | None = None
    """The YAML of simulated users, which rows name in extra_info.interaction_kwargs."""

    num_repeat_rollouts: Count | None = None


class AgentLoopConfig(Section):
    """What a user's loop class is given; keys beyond the named ones are passed on to it."""

    model_config = ConfigDict(extra="allow")

    max_turns: Count | None = None
    tools: Texts = ()
    """Names of the tools to offer; empty offers all that are configured."""
    stop_on_correct: bool = False


class CustomServer(Section):
    path: PathText | None = None
    name: str | None = None


class AgentConfig(Section):
    default_agent_loop: str = "single_turn_agent"
    agent_loop_config_path: PathText | None = None

    num_workers: Count = 1
    """All loops run at the same time in one event loop, however many workers that would be; it only multiplies
    trace.max_samples_per_step_per_worker."""
    agent_loop_manager_class: str | None = None
    custom_async_server: CustomServer = CustomServer()


class ToolKwargs(Section):
    tools_config_file: PathText | None = None


class ServerConfig(Section):
    url: str | None = None
    """Where the server of rollout.mode=server runs, such as http://10.0.0.1:8000."""
    urls: Texts = ()
    """Where several run."""
    python: PathText | None = None
    """The Python that has vLLM or SGLang installed, for a server of our own. None is the one that runs Rally."""
    timeout: Positive = 600.0
    """Seconds of one generation, the server's queue included."""
    max_attempts: Count = 3
    """How often a server of our own that died is started again."""
    retry_delay: NonNegative = 2.0
    """Seconds before it is."""
    max_connections: Count = 1000
    max_start_wait_time: Positive = 300.0
    max_in_flight: Count | None = None
    """Requests at one server at a time; more wait in the router. None is max_num_seqs and a quarter more."""
    max_tries: Count = 4
    """How many servers may fail under one request before its episode does."""
    give_up_after: Positive = 120.0
    """Seconds that requests wait while no server answers and none is being started again."""
    health_every: Positive = 2.0
    """Seconds between two health checks of a server."""


class CheckpointEngine(Section):
    backend: Literal["naive", "files", "ipc", "nccl", "nixl", "hccl"] = "naive"
    """How weights get to servers: files, in memory if there is room; ipc by CUDA IPC to a server of our own on the
    trainer's GPU; naive is ipc for SGLang where that is possible, else files."""
    update_weights_bucket_megabytes: Count = 2048
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    custom_backend_module: str | None = None


class TraceConfig(Section):
    backend: Literal["mlflow", "otel", "weave", "trackio"] | None = None
    """Episodes as traces: in MLflow, or sent by OpenTelemetry."""
    token2text: bool = False
    """Adds token ids as text."""
    max_samples_per_step_per_worker: Natural | None = None
    """Prompts of a step that are traced, each with all of its episodes, times agent.num_workers. None is all."""
    project_name: str | None = None
    """None is trainer.project_name."""
    experiment_name: str | None = None
    """None is trainer.experiment_name."""


class PrometheusConfig(Section):
    enable: bool = False
    port: Count = 9090
    file: PathText | None = None
    served_model_name: str | None = None


class ProfilerConfig(Section):
    tool: str | None = None
    enable: bool = False
    all_ranks: bool = False
    ranks: tuple[Int, ...] = ()
    save_path: PathText | None = None
    tool_config: dict[str, Any] | None = None


class EngineKwargs(Section):
    vllm: dict[str, Any] = Field(default_factory=dict)
    sglang: dict[str, Any] = Field(default_factory=dict)
    trtllm: dict[str, Any] = Field(default_factory=dict)


class Disaggregation(Section):
    enabled: bool = False
    prefill_replicas: Count = 1
    decode_replicas: Count = 1
    decode_tensor_model_parallel_size: Count | None = None
    transfer_backend: str | None = None
    bootstrap_port: Count | None = None
    ib_device: str | None = None


class RolloutConfig(LogProbKeys):
    name: Literal["embedded", "rally", "sglang", "sglang_async", "vllm", "vllm_async", "trtllm", "hf"] = "embedded"
    mode: Literal["async", "sync", "standalone", "server"] = "async"
    n: Count = 8
    """Episodes per prompt. The ecosystem's 1 leaves a group with nothing to compare."""
    temperature: NonNegative = 1.0
    top_p: TopP = 1.0
    top_k: Limit = -1
    min_p: MinP = 0.0
    prompt_length: Count | None = None
    """The same as data.max_prompt_length."""
    response_length: Count | None = None
    """The same as data.max_response_length."""
    max_model_len: Count | None = None
    """Tokens of context. None takes prompt_length + response_length."""
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192
    gpu_memory_utilization: Annotated[Float, Field(gt=0, lt=1)] = 0.5
    page_size: Count = 16
    attention_backend: Literal["auto", "paged", "gather"] = "auto"
    """How the engine reads KV pages: our kernels (auto on a GPU in half precision), or plain torch."""
    enforce_eager: bool = False
    """Without CUDA graphs and fused layers: slower, and easier to look into."""
    free_cache_engine: bool = True
    """On a GPU, KV memory goes back to the device while weights are updated; a server of our own on the trainer's GPU
    gives back its weights as well."""
    enable_sleep_mode: bool = True
    """The same as free_cache_engine; false in either keeps the memory."""
    deterministic: bool = False
    """The same command gives the same bits. On a GPU rollout and training agree to the last bit as well."""
    ignore_eos: bool = False
    dtype: Dtype | None = None
    """The same as model.dtype: the engine runs the trainer's own weights."""
    seed: Int | None = None
    """None takes trainer.seed."""
    val_kwargs: ValKwargs = ValKwargs()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """`multi_turn: true` is short for `multi_turn: {enable: true}`."""
    agent: AgentConfig = AgentConfig()
    use_agent_loop: bool = False
    agent_loop_class: str | None = None
    agent_loop_config: AgentLoopConfig = AgentLoopConfig()
    tool_kwargs: ToolKwargs = ToolKwargs()
    max_turns: Count | None = None
    stop_on_tool_success: bool = False
    stop_strings: Texts = ()
    timeout_per_turn: Positive | None = None
    episode_timeout: Positive | None = None
    step_timeout: Positive | None = None
    """Seconds for the rollout of a training step; episodes that still run then end as deadline, with what they have."""
    on_error: OnError = "retry"
    max_retries: Natural = 1
    max_failed_share: Share = 0.1
    """A step in which more episodes than this share fail stops the run."""
    in_flight: Literal["abort", "keep", "recompute"] = "keep"
    mismatch_alarm: Positive = 0.01
    """The run says so when rollout and training disagree by more than this KL."""

    calculate_log_probs: bool = True
    """Log-probs of sampled tokens are always recorded, so both values are right."""
    do_sample: Annotated[bool, Only(True, because="training always samples; val_kwargs sets validation")] = True
    enable_chunked_prefill: Annotated[bool, Only(True, because="prefill is always chunked")] = True
    enable_prefix_caching: Annotated[bool, Only(True, because="prefixes are always shared")] = True
    layered_summon: bool = False
    """On one device there is nothing to gather, so both values are right."""
    load_format: Literal["dummy", "auto", "hf", "safetensors"] = "dummy"
    """Engines begin with the trainer's own weights, so all values are right."""
    logprobs_mode: Annotated[
        str, Only("processed_logprobs", because="log-probs are those of the policy at the sampling temperature")
    ] = "processed_logprobs"
    scheduling_policy: Annotated[str, Only("fcfs", because="requests are served in order of arrival")] = "fcfs"
    skip_tokenizer_init: bool = True
    """Engines are given token ids and give them back, so both values are right."""

    port_start: Count | None = None
    log_level: str | None = None
    server: ServerConfig = ServerConfig()
    tensor_model_parallel_size: Count = 1
    data_parallel_size: Count = 1
    expert_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    repetition_penalty: Positive = 1.0
    cudagraph_capture_sizes: tuple[Count, ...] | None = None
    disable_log_stats: bool = True
    over_sample_rate: Share = 0.0
    multi_stage_wake_up: bool = False
    engine_kwargs: EngineKwargs = EngineKwargs()
    skip_rollout: bool = False
    """Training episodes that were sampled once, by a run of the same name, prompts and lengths, are taken from
    skip_dump_dir instead: for work on what comes after the rollout."""
    skip_dump_dir: PathText | None = None
    """None is rollout_dump in the folder for temporary files."""
    enable_rollout_routing_replay: bool = False
    quantization: str | None = None
    quantization_config_file: PathText | None = None
    limit_images: Count | None = None
    custom: dict[str, Any] | None = None
    mtp: MultiTokenPrediction = MultiTokenPrediction()
    sglang_engine_mode: str = "local"
    checkpoint_engine: CheckpointEngine = CheckpointEngine()
    trace: TraceConfig = TraceConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    nnodes: Natural = 0
    n_gpus_per_node: Count | None = None
    full_determinism: bool = False
    router_config_path: PathText | None = None
    moe_load_balance_metrics_interval: Natural = 0
    qat: dict[str, Any] | None = None
    disaggregation: Disaggregation = Disaggregation()

    @property
    def server_kind(self) -> str:
        """The engine without the ecosystem's suffix: sglang_async is sglang."""
        return self.name.removesuffix("_async")

    @property
    def server_urls(self) -> tuple[str, ...]:
        """Where running servers are, by either key."""
        return (*((self.server.url,) if self.server.url else ()), *self.server.urls)
