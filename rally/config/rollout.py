"""Schema of `actor_rollout_ref.rollout.*`: engine, sampling, multi-turn limits, servers and failure handling."""

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
    """Samples per validation prompt, if validation samples."""
    temperature: NonNegative = 0.0
    """The temperature of validation. 0 is greedy."""
    top_p: TopP = 1.0
    """Nucleus sampling of validation. 1 keeps all tokens."""
    top_k: Limit = -1
    """Sample validation from the k most likely tokens. -1 keeps all."""
    do_sample: bool | None = None
    """Whether validation samples. null samples if temperature is above 0."""


class MultiTurnConfig(Section):
    enable: bool = False
    """Use the tool loop for rows without agent_name. Configured tools or users have the same effect."""
    max_assistant_turns: Count | None = None
    """The most assistant turns of an episode. null is no limit."""
    max_turns: Count | None = None
    """The same as max_assistant_turns."""
    max_user_turns: Count | None = None
    """The most user and tool turns of an episode. null is no limit."""
    tool_config_path: PathText | None = None
    """The tool YAML (docs/tools.md). null configures no tools."""
    function_tool_path: PathText | None = None
    """A Python file of @function_tool functions. null configures none."""
    max_parallel_calls: Count | None = None
    """Calls of one turn that run at the same time. Further calls wait; none is dropped. null is no limit."""
    max_tool_response_length: Count = 256
    """The most characters of a tool response."""
    max_tool_response_tokens: Count | None = None
    """The most tokens of a tool response, applied after max_tool_response_length; the beginning is kept. null is no
    limit."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """The side of a long tool response that is removed: left keeps the end, right keeps the beginning."""
    format: str = "auto"
    """How the model writes tool calls: auto (what the chat template shows), hermes, qwen3_coder, llama3_json, mistral
    or another name in docs/chat.md, a name that format_path registers, or the dotted path of a class."""
    format_path: PathText | None = None
    """A Python file, or pkg:// and a module, that registers tool-call formats with @register_format. null is none."""
    use_inference_chat_template: bool = False
    """The same as history: rerender."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """How an episode is compared with what the chat template renders: strict, ignore_strippable (ignores whitespace) or
    disable."""
    history: Literal["append", "rerender"] | None = None
    """append keeps the sampled tokens of earlier turns, rerender renders each prompt with the chat template. null is
    append."""
    tool_timeout: Positive = 30.0
    """Seconds for each call of a tool or a simulated user."""
    on_tool_outage: Literal["mask", "drop_group", "count"] = "mask"
    """An episode in which a tool was unavailable (its server, sandbox or session failed, or it did not answer in time):
    mask keeps it out of the loss and of its group's baseline, drop_group drops its group, count trains on it.
    on_outage of an entry in the tool YAML overrides it for one tool."""
    max_tool_failures: Natural = 3
    """Consecutive failed tool turns that end an episode. 0 is no limit."""
    max_repeated_calls: Natural = 3
    """Consecutive equal tool turns that end an episode. 0 is no limit."""
    interaction_config_path: PathText | None = None
    """The YAML of simulated users, which rows select in extra_info.interaction_kwargs."""

    num_repeat_rollouts: Count | None = None


class AgentLoopConfig(Section):
    """Options of the agent loop. Keys other than these are passed to its `__init__`."""

    model_config = ConfigDict(extra="allow")

    max_turns: Count | None = None
    """The same as multi_turn.max_assistant_turns."""
    tools: Texts = ()
    """Names of the tools to offer. Empty offers all that are configured."""
    stop_on_correct: bool = False
    """End an episode when a tool reports the metric correct=true."""


class CustomServer(Section):
    path: PathText | None = None
    name: str | None = None


class AgentConfig(Section):
    default_agent_loop: str = "single_turn_agent"
    """The agent loop of rows without agent_name: a registered name, a dotted class path, or a name from
    agent_loop_config_path."""
    agent_loop_config_path: PathText | None = None
    """A YAML list of agent loops: name, _target_ (the class) and options of its __init__."""

    num_workers: Count = 1
    """With rollout servers or several GPUs: processes that play and score episodes, over all nodes (docs/cluster.md). 1
    plays them in the process of rank 0. It also multiplies trace.max_samples_per_step_per_worker."""
    agent_loop_manager_class: str | None = None
    custom_async_server: CustomServer = CustomServer()


class ToolKwargs(Section):
    tools_config_file: PathText | None = None
    """The tool YAML. The same as multi_turn.tool_config_path."""


class ServerConfig(Section):
    url: str | None = None
    """mode=server: the address of the server, such as http://10.0.0.1:8000."""
    urls: Texts = ()
    """mode=server: the addresses of several servers."""
    python: PathText | None = None
    """The Python executable with vLLM or SGLang installed, for servers that the run launches. null is the one that runs
    Rally."""
    timeout: Positive = 600.0
    """Seconds for one generation, including its time in the server's queue."""
    max_attempts: Count = 3
    """How often a launched server that died is started again."""
    retry_delay: NonNegative = 2.0
    """Seconds before a launched server is started again."""
    max_connections: Count = 1000
    """The most HTTP connections to one server at a time."""
    max_start_wait_time: Positive = 300.0
    """Seconds within which a server must answer after its start."""
    join_timeout: Positive = 120.0
    """Seconds within which a server that joined must load weights and pass its check. One that needs longer leaves, so
    that it does not hold up the run. Raise it for models that take longer to load."""
    max_in_flight: Count | None = None
    """Requests at one server at a time; further ones wait in the router. null is 1.25 times max_num_seqs."""
    max_tries: Count = 4
    """How many servers may fail during one request before its episode fails."""
    give_up_after: Positive = 120.0
    """Seconds that requests wait while no server answers and none is being restarted."""
    health_every: Positive = 2.0
    """Seconds between two health checks of a server."""


BROADCAST = "nccl"
"""The value of checkpoint_engine.backend that broadcasts weights to servers."""


class CheckpointEngine(Section):
    backend: Literal["naive", "files", "ipc", "delta", "delta_sharded", "nccl", "nixl", "hccl"] = "naive"
    """How weights reach servers. files writes them, to memory if it has space. delta writes what changed, for servers
    of Rally's own (rollout.name=rally); delta_sharded, verl's name, is the same here. ipc uses CUDA IPC to a launched
    server on the trainer's GPU. nccl broadcasts to all servers at once, over NCCL, or gloo on CPUs: to Rally's own
    and to a launched vLLM, on GPUs of their own. naive is ipc for SGLang where that is possible, else files."""
    folder: PathText | None = None
    """The folder through which weights reach servers as files or deltas; servers on other machines must see it under
    the same path. null is shared memory if all servers are on this machine, else weights in the run folder."""
    full_every: Count = 10
    """backend=delta: every so many versions a full one is written, from which servers that join later start."""
    update_weights_bucket_megabytes: Count = 2048
    """The largest size of one weight file, in MB, when weights reach servers as files."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    custom_backend_module: str | None = None


class TraceConfig(Section):
    backend: Literal["mlflow", "otel", "weave", "trackio"] | None = None
    """Export episodes as traces to MLflow, or by OpenTelemetry. null exports none."""
    token2text: bool = False
    """Add token ids to traces as text."""
    max_samples_per_step_per_worker: Natural | None = None
    """Prompts traced per step, each with all its episodes, times agent.num_workers. null traces all."""
    project_name: str | None = None
    """The project of the traces. null is trainer.project_name."""
    experiment_name: str | None = None
    """The name of the run in the traces. null is trainer.experiment_name."""


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
    """Extra flags of a launched vLLM server, by name."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Extra flags of a launched SGLang server, by name."""
    trtllm: dict[str, Any] = Field(default_factory=dict)


class SpeculativeConfig(Section):
    method: Literal["ngram"] | None = None
    """Speculative decoding in the embedded engine: ngram drafts what followed the latest tokens of a request when they
    occurred in it before. The sampled tokens are those without it. null is off."""
    num_speculative_tokens: Count = 4
    """The most tokens that are drafted for a request in one step."""
    prompt_lookup_max: Count = 4
    """The longest sequence of latest tokens that is looked up; shorter ones follow."""
    prompt_lookup_min: Count = 2
    """The shortest sequence of latest tokens that is looked up."""
    disable_by_batch_size: Count = 32
    """Nothing is drafted while more requests than this run."""


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
    """The engine: embedded runs in the trainer's process; rally, vllm and sglang are servers (docs/servers.md). The
    suffix _async has no effect."""
    mode: Literal["async", "sync", "standalone", "server"] = "async"
    """For servers: async and standalone launch them, server uses running ones at server.url."""
    n: Count = 8
    """Episodes per prompt. verl's default of 1 leaves a group with nothing to compare."""
    temperature: NonNegative = 1.0
    """The sampling temperature of training."""
    top_p: TopP = 1.0
    """Nucleus sampling: sample from the most likely tokens of this total probability. 1 keeps all."""
    top_k: Limit = -1
    """Sample from the k most likely tokens. -1 keeps all."""
    min_p: MinP = 0.0
    """Drop tokens less likely than min_p times the most likely one. 0 keeps all."""
    prompt_length: Count | None = None
    """The same as data.max_prompt_length."""
    response_length: Count | None = None
    """The same as data.max_response_length."""
    max_model_len: Count | None = None
    """The context window of the engine, in tokens. null takes prompt_length + response_length."""
    max_num_seqs: Count = 256
    """The most sequences that the engine generates at the same time."""
    max_num_batched_tokens: Count = 8192
    """The most tokens in one engine step, decode and prefill together. Longer prompts are prefilled in chunks."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, lt=1)] = 0.5
    """The share of memory for the engine: of what is free at its start for the embedded engine, of the whole GPU for
    vLLM and SGLang."""
    page_size: Count = 16
    """Tokens per page of the embedded engine's KV cache."""
    attention_backend: Literal["auto", "paged", "gather"] = "auto"
    """How the embedded engine reads the KV cache: paged uses Rally's kernels, gather plain torch. auto is paged on a
    GPU in half precision."""
    enforce_eager: bool = False
    """Run without CUDA graphs and fused layers: slower, and easier to debug."""
    free_cache_engine: bool = True
    """On a GPU, release the KV cache's memory while weights are updated. A launched server on the trainer's GPU
    releases its weights as well."""
    enable_sleep_mode: bool = True
    """The same as free_cache_engine. false in either keeps the memory."""
    deterministic: bool = False
    """Make two runs of the same command equal bit by bit. On one GPU rollout and training then also compute identical
    log-probabilities."""
    ignore_eos: bool = False
    """Do not stop a turn at its end-of-turn token."""
    dtype: Dtype | None = None
    """The same as model.dtype: the engine runs the trainer's own weights."""
    seed: Int | None = None
    """The seed of sampling. null takes trainer.seed."""
    val_kwargs: ValKwargs = ValKwargs()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """`multi_turn: true` is short for `multi_turn: {enable: true}`."""
    agent: AgentConfig = AgentConfig()
    use_agent_loop: bool = False
    """Use the tool loop for rows without agent_name, as multi_turn.enable does."""
    agent_loop_class: str | None = None
    """The agent loop of all rows, whatever their agent_name: a registered name or a dotted class path."""
    agent_loop_config: AgentLoopConfig = AgentLoopConfig()
    tool_kwargs: ToolKwargs = ToolKwargs()
    max_turns: Count | None = None
    """The same as multi_turn.max_assistant_turns."""
    stop_on_tool_success: bool = False
    """End an episode after a turn whose tool calls all succeeded."""
    stop_strings: Texts = ()
    """Texts that end a turn when they are generated, after the token that completes one."""
    timeout_per_turn: Positive | None = None
    """Seconds for one turn. A turn that takes longer ends its episode as deadline. null is no limit."""
    episode_timeout: Positive | None = None
    """Seconds for one episode, which then ends as deadline. null is no limit."""
    step_timeout: Positive | None = None
    """Seconds for the rollout of a training step. Episodes that still run then end as deadline and keep what they have.
    null is no limit."""
    on_error: OnError = "retry"
    """An episode whose agent loop failed: retry runs it again up to max_retries times and then drops its group,
    drop_group drops it at once, zero scores it 0 and trains on it, raise stops the run. If the code of a loop or agent
    failed on what the policy wrote, retry scores the episode after its retries instead of dropping its group."""
    max_retries: Natural = 1
    """on_error=retry: how often a failed episode is run again."""
    max_failed_share: Share = 0.1
    """A step in which a larger share of the episodes fails stops the run. Failures by the policy's fault do not
    count."""
    max_outage_share: Share = 0.5
    """A step in which a larger share of the episodes is lost because a tool was unavailable stops the run."""
    in_flight: Literal["abort", "keep", "recompute"] = "keep"
    """Requests that run during a weight update: abort ends them, keep goes on with the old KV cache, recompute goes on
    after computing it again."""
    mismatch_alarm: Positive = 0.01
    """Warn when the KL between rollout and training log-probabilities exceeds this."""
    mismatch_limit: Positive | None = 0.3
    """Stop the run, before the step is applied, when that KL exceeds this: the episodes cannot have been sampled from
    the policy that is trained. null is no limit."""

    calculate_log_probs: bool = True
    """Accepted and has no effect: log-probabilities of sampled tokens are always recorded."""
    do_sample: Annotated[bool, Only(True, because="training always samples; val_kwargs sets validation")] = True
    enable_chunked_prefill: Annotated[bool, Only(True, because="prefill is always chunked")] = True
    enable_prefix_caching: Annotated[bool, Only(True, because="prefixes are always cached")] = True
    layered_summon: bool = False
    """Accepted and has no effect: weights are always gathered in buckets of bounded size."""
    load_format: Literal["dummy", "auto", "hf", "safetensors"] = "dummy"
    """Accepted and has no effect: engines always start from the trainer's weights."""
    logprobs_mode: Annotated[
        str, Only("processed_logprobs", because="log-probs are those of the policy at the sampling temperature")
    ] = "processed_logprobs"
    scheduling_policy: Annotated[str, Only("fcfs", because="requests are served in order of arrival")] = "fcfs"
    skip_tokenizer_init: bool = True
    """Accepted and has no effect: engines receive and return token ids."""

    port_start: Count | None = None
    """The first port to try for launched servers. null takes any free port."""
    log_level: str | None = None
    """The log level of launched vLLM and SGLang servers. null keeps their default."""
    server: ServerConfig = ServerConfig()
    tensor_model_parallel_size: Count = 1
    """GPUs that each launched server shards the model over."""
    data_parallel_size: Count = 1
    """The number of servers to launch."""
    expert_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    repetition_penalty: Positive = 1.0
    cudagraph_capture_sizes: tuple[Count, ...] | None = None
    disable_log_stats: bool = True
    over_sample_rate: Share = 0.0
    multi_stage_wake_up: bool = False
    engine_kwargs: EngineKwargs = EngineKwargs()
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    skip_rollout: bool = False
    """Store training episodes in skip_dump_dir, and reuse those that an earlier run of the same name, prompts and
    lengths stored. For work on rewards, advantages and the update."""
    skip_dump_dir: PathText | None = None
    """The folder of skip_rollout. null is ~/.cache/rally/rollout_dump (or below XDG_CACHE_HOME). A folder of another
    user is refused."""
    enable_rollout_routing_replay: bool = False
    """Record the expert choices of a mixture-of-experts model in rollout, for actor.router_replay.mode=R3. Servers
    that already run must have been started to return them."""
    quantization: str | None = None
    """fp8: the embedded engine multiplies by 8-bit copies of the linear layers' weights, while training stays in
    model.dtype (docs/engine.md). Correct the difference with algorithm.rollout_correction. null is off."""
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
    """Nodes of a Ray cluster for the rollout servers, beside the trainer's. Without Ray, 1 is this machine
    (trainer_mode=separate_async). 0 starts the servers on the trainer's nodes."""
    n_gpus_per_node: Count | None = None
    """GPUs of each rollout node. Without data_parallel_size they all get servers. Without nnodes they are GPUs of this
    machine, for trainer_mode=separate_async."""
    full_determinism: bool = False
    router_config_path: PathText | None = None
    moe_load_balance_metrics_interval: Natural = 0
    qat: dict[str, Any] | None = None
    disaggregation: Disaggregation = Disaggregation()

    @property
    def server_kind(self) -> str:
        """The engine without the suffix _async."""
        return self.name.removesuffix("_async")

    @property
    def server_urls(self) -> tuple[str, ...]:
        """Addresses of running servers, from server.url and server.urls."""
        return (*((self.server.url,) if self.server.url else ()), *self.server.urls)
