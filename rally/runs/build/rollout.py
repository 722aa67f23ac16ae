"""Builds what produces episodes from a Config: engine settings, agent loops, sampling, rewards and the rollout."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rally.chat import ChatCodec
from rally.compat.verl.config_for_loops import config_for_loops
from rally.config import Config
from rally.config.rollout import SpeculativeConfig
from rally.engines import Engine
from rally.engines.embedded import EngineSettings, NgramSpeculation, RolloutDemand
from rally.engines.remote.engine import RemoteEngine
from rally.loops import AgentLoopBase, LoopError, LoopSettings, LoopSpec, Runner, find_loop, load_loop_config
from rally.loops.single_turn import SingleTurnAgentLoop
from rally.nodes import THIS_MACHINE, RunNodes
from rally.rewards import Overlong, RewardSpec, Shaping
from rally.rewards.judge_server import JudgeServer
from rally.rewards.worker_pool import RewardWorker, Scorer
from rally.runs.build.reward_model import classifier_scorer_of, judge_address_of, judge_server_of
from rally.runs.build.run_inputs import RunInputs
from rally.runs.build.update_settings import credit_settings_of
from rally.train.rollout.loop_workers import LoopWorkerPool, LoopWorkerRunner, LoopWorkerSettings
from rally.train.rollout.rollout import EpisodeScorer, FailurePolicy, NoScorer, Rollout, ValidationPass
from rally.train.rollout.rollout_cache import CachedRolloutRunner
from rally.types import SamplingParams
from rally.util.private_files import cache_folder, own_folder

MIN_JOBS = 16  # that a loop worker gets at a time
TURN_TOKENS = 64  # that a turn of a long episode is assumed to have at least


def engine_settings_of(config: Config, inputs: RunInputs | None = None) -> EngineSettings:
    """The settings of the run's engine. `inputs` are those of a run that trains with one engine."""
    rollout = config.rollout
    return EngineSettings(
        max_model_len=config.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        demand=None if inputs is None else rollout_demand_of(config, inputs),
        page_size=rollout.page_size,
        memory_share=rollout.gpu_memory_utilization,
        in_flight=rollout.in_flight,
        seed=config.rollout_seed,
        backend=rollout.attention_backend,
        eager=rollout.enforce_eager,
        deterministic=rollout.deterministic,
        lend_memory=lends_memory(config),
        speculation=speculation_of(rollout.speculative_config),
        return_routes=rollout.enable_rollout_routing_replay,
        quantization="fp8" if rollout.quantization == "fp8" else None,
    )


def rollout_demand_of(config: Config, inputs: RunInputs) -> RolloutDemand | None:
    """What the rollouts of a training run can use of the KV cache at once. None where nobody knows: without training,
    and with loops whose episodes may have several histories at a time."""
    specs = loops_of(config)
    names = {config.agent_loop_name, *(() if config.rollout.agent_loop_class else inputs.loops)}
    loops = [find_loop(name, specs).cls for name in names]
    if inputs.train_tasks is None or not all(loop.one_history for loop in loops):
        return None
    groups = max(config.data.train_batch_size, config.data.gen_batch_size or 0)
    if config.asynchronous and not config.fixed_lag:  # a fixed lag samples one batch at a time
        groups = math.ceil(groups * (1 + config.batches_ahead))
    seats = max(map(inputs.environments.seats, inputs.environments.labels), default=1)
    episodes = groups * (config.rollout.n + credit_settings_of(config).needs_greedy) * seats
    if inputs.val_tasks is not None:  # twice what can run at once, as on a CPU; what is more may be evicted
        rows = min(config.data.val_batch_size or len(inputs.val_tasks), len(inputs.val_tasks))
        samples = max(one.n for one in validation_passes(config, sampling_of(config, inputs.codec)))
        episodes = max(episodes, min(rows * samples, 2 * config.rollout.max_num_seqs))
    known = config.prompt_length + config.response_length if config.history == "append" else config.max_model_len
    tokens = min(config.max_model_len, known)
    most = 1 if all(issubclass(loop, SingleTurnAgentLoop) for loop in loops) else config.max_turns or tokens
    return RolloutDemand(episodes, tokens, min(most, max(1, tokens // TURN_TOKENS)))


def speculation_of(keys: SpeculativeConfig) -> NgramSpeculation | None:
    return None if keys.method is None else NgramSpeculation(**keys.model_dump(exclude={"method"}))


def lends_memory(config: Config) -> bool:
    """Whether the engine frees the memory of its KV cache during the update. Requests that go on across an update with
    their old KV need it."""
    rollout = config.rollout
    needed = config.asynchronous and not config.fixed_lag and rollout.in_flight == "keep"
    return rollout.free_cache_engine and rollout.enable_sleep_mode and not needed


def may_use_cuda_ipc(config: Config) -> bool:
    """Whether a server may read the trainer's weights from its GPU memory."""
    launched = config.rollout.mode != "server" and config.rollout.server_kind == "sglang"
    return config.rollout.checkpoint_engine.backend == "ipc" or (config.rollout.name != "embedded" and launched)


def loop_settings_of(config: Config) -> LoopSettings:
    rollout, multi_turn = config.rollout, config.rollout.multi_turn
    return LoopSettings(
        prompt_length=config.prompt_length,
        truncation=config.data.truncation,
        response_length=config.response_length,
        max_assistant_turns=config.max_turns,
        max_user_turns=multi_turn.max_user_turns,
        max_tool_response_tokens=multi_turn.max_tool_response_tokens,
        stop_on_tool_success=rollout.stop_on_tool_success,
        stop_on_correct=rollout.agent_loop_config.stop_on_correct,
        timeout_per_turn=rollout.timeout_per_turn,
        episode_timeout=rollout.episode_timeout,
        max_tool_failures=multi_turn.max_tool_failures,
        max_repeated_calls=multi_turn.max_repeated_calls,
        history=config.history,
        sanity_check=multi_turn.tokenization_sanity_check_mode,
    )


def loops_of(config: Config) -> dict[str, LoopSpec]:
    """Agent loops by name: those of agent_loop_config_path, and the default one with its options."""
    path = config.rollout.agent.agent_loop_config_path
    loops = load_loop_config(path) if path else {}
    name = config.agent_loop_name
    spec = find_loop(name, loops)
    loops[name] = LoopSpec(spec.cls, {**spec.options, **_loop_options(config, spec.cls)})
    for named, spec in loops.items():
        spec.cls.prepare(spec.options)
        if config.uses_loop_workers and (option := spec.cls.single_process(spec.options)) is not None:
            raise LoopError(
                f"the option {option} of the agent loop {named} does not work with rollout.agent.num_workers="
                f"{config.rollout.agent.num_workers}: every loop worker has a gateway of its own; set that to 1"
            )
    return loops


def _loop_options(config: Config, cls: type[AgentLoopBase]) -> dict[str, Any]:
    """The options from agent_loop_config for a loop class: free keys always, named ones if they are set and its
    __init__ accepts them."""
    section = config.rollout.agent_loop_config
    taken = inspect.signature(cls.__init__).parameters
    chosen = {name: getattr(section, name) for name in type(section).model_fields if name in taken}
    named = {name: value for name, value in chosen.items() if value != type(section).model_fields[name].default}
    return {**named, **(section.model_extra or {})}


def sampling_of(config: Config, codec: ChatCodec) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=config.response_length,
        stop_ids=() if rollout.ignore_eos else codec.stop_ids,
        stop=rollout.stop_strings,
        ignore_eos=rollout.ignore_eos,
    )


def validation_passes(config: Config, train: SamplingParams) -> list[ValidationPass]:
    """Greedy by default. If val_kwargs sample, that pass is the main one and a greedy pass is added."""
    kwargs = config.rollout.val_kwargs
    greedy = train.greedy()
    sample = kwargs.temperature > 0 if kwargs.do_sample is None else kwargs.do_sample
    if not sample:
        return [ValidationPass(greedy, 1)]
    sampled = replace(train, temperature=kwargs.temperature, top_p=kwargs.top_p, top_k=kwargs.top_k, min_p=0.0)
    return [ValidationPass(sampled, kwargs.n), ValidationPass(greedy, 1, "greedy")]


def failure_policy_of(config: Config) -> FailurePolicy:
    return FailurePolicy(
        loop=config.rollout.on_error,
        reward=config.reward.on_error,
        max_failed_share=config.rollout.max_failed_share,
        max_outage_share=config.rollout.max_outage_share,
    )


def reward_spec_of(config: Config, server: JudgeServer | None = None) -> RewardSpec:
    """The reward function. `server` is that of the reward model it asks."""
    function = config.reward_function
    return RewardSpec(
        path=function.path,
        name=function.name,
        kwargs=config.reward_kwargs,
        batch=config.reward_manager_name == "batch",
        judge=None if server is None else judge_address_of(config, server),
    )


def scores_in_batch(config: Config) -> bool:
    """Whether the episodes of a rollout are scored together, after the last has ended."""
    return config.uses_classifier or config.reward_manager_name == "batch"


def shaping_of(config: Config) -> Shaping:
    """The terms added to the score of the reward function: `reward_shaping` and DAPO's overlong buffer."""
    reward_kwargs = config.reward_model.reward_kwargs
    buffer = reward_kwargs.overlong_buffer_cfg
    overlong = Overlong(
        longest=reward_kwargs.max_resp_len or config.response_length,
        buffer=buffer.len,
        penalty_factor=buffer.penalty_factor,
        log=buffer.log,
    )
    shaping = config.reward_shaping
    weights = {
        **shaping.intermediate_rewards.model_dump(),
        **shaping.penalties.model_dump(),
        "tool_format_reward": shaping.tool_format_reward,
    }
    return Shaping(
        weights={} if shaping.enable is False else {name: weight for name, weight in weights.items() if weight},
        overlong=overlong if buffer.enable else None,
    )


def with_rollout_cache(runner: Runner, config: Config) -> Runner:
    """The runner, with a cache of sampled episodes if rollout.skip_rollout is set."""
    if not config.rollout.skip_rollout:
        return runner
    dump = rollout_cache_dir(config)
    for folder in (dump.parents[1], dump.parent, dump):
        own_folder(folder, "rollout.skip_dump_dir")
    return CachedRolloutRunner(**vars(runner), dump=dump)


def rollout_cache_dir(config: Config) -> Path:
    """The folder of cached episodes for runs with this configuration."""
    trainer, shape = config.trainer, f"GBS{config.data.train_batch_size}_N{config.rollout.n}"
    lengths = f"in{config.prompt_length}_out{config.response_length}"
    dump = Path(config.rollout.skip_dump_dir or cache_folder() / "rollout_dump")
    return dump / f"{trainer.experiment_name}_{trainer.project_name}" / f"{shape}_{lengths}_{_sampling_hash(config)}"


def _sampling_hash(config: Config) -> str:
    """A hash of everything else that changes tokens or their log-probabilities, such as tokenizer, template and
    temperature."""
    model, rollout = config.model, config.rollout
    tokens = (model.path, model.tokenizer_path, model.spelled_tokens)
    encoding = (tokens, model.custom_chat_template, dict(config.data.apply_chat_template_kwargs))
    sampling = (rollout.temperature, rollout.top_p, rollout.top_k, config.tool_config_path, config.agent_loop_name)
    numbers = (rollout.quantization,) if rollout.quantization else ()  # caches without it keep their names
    return hashlib.sha256(repr((encoding, sampling, *numbers)).encode()).hexdigest()[:8]


def runner_of(config: Config, inputs: RunInputs, engine: Engine) -> Runner:
    return Runner(
        engine=engine,
        codec=inputs.codec,
        toolbox=inputs.toolbox,
        interactions=inputs.interactions,
        environments=inputs.environments,
        settings=loop_settings_of(config),
        default_loop=config.agent_loop_name,
        override_rows=config.rollout.agent_loop_class is not None,
        loops=loops_of(config),
        max_retries=config.rollout.max_retries if config.rollout.on_error == "retry" else 0,
        run_config=functools.cache(lambda: config_for_loops(config)),  # takes 0.1 s, and few loops read it
    )


def scorer_of(config: Config) -> EpisodeScorer:
    """The scorer of a run: a classifier, or the reward function with the server of its judge."""
    if config.uses_classifier:
        return classifier_scorer_of(config)
    server = judge_server_of(config)
    spec, reward, limited = reward_spec_of(config, server), config.reward, config.reward_model
    if config.reward_manager_name == "rate_limited":
        return Scorer(spec, limited.max_concurrent, limited.timeout, limited.calls_per_minute, server)
    return Scorer(spec, reward.num_workers, reward.timeout, server=server)


def check_reward_function(config: Config) -> None:
    """Load the reward function in a process of its own, as its workers will. RewardError, before any weight is loaded,
    if that fails. A reward model is not loaded, nor a function that may ask its server while it is loaded."""
    if config.reward_function.path is None or config.uses_classifier or config.reward_model.enable:
        return
    worker = RewardWorker(reward_spec_of(config), config.reward.timeout)
    try:
        worker.wait_ready()
    finally:
        worker.close()


def scores_in_workers(config: Config) -> bool:
    """Whether loop workers score what they play. A reward model, which exists once, stays with the controller."""
    judged = config.uses_classifier or config.reward_model.enable
    return config.uses_loop_workers and not scores_in_batch(config) and not judged


def pool_of(config: Config, engine: RemoteEngine, nodes: RunNodes) -> LoopWorkerPool:
    """The loop workers of a run, over all its nodes."""
    count = config.rollout.agent.num_workers
    router = engine.settings.router
    running = len(engine.servers) * router.max_in_flight
    client = {name: value for name, value in vars(engine.servers[0].settings).items() if name != "decode"}
    settings = LoopWorkerSettings(
        count=count,
        max_jobs=max(MIN_JOBS, -(-2 * running // count)),
        servers=len(engine.servers),
        plan={
            "config": config.model_dump(mode="json"),
            "server_kind": engine.servers[0].api.name,
            "client": client,
            "router": vars(router),  # of all workers together
            "workers": count,
            "max_model_len": engine.max_model_len,
            "run": str(config.run_dir.absolute()),
        },
        run=config.run_dir.absolute(),
        heartbeat_seconds=config.trainer.node_heartbeat_timeout,
    )
    return LoopWorkerPool(settings, nodes.all, engine)


def rollout_of(
    config: Config,
    inputs: RunInputs,
    engine: Engine,
    nodes: RunNodes = THIS_MACHINE,
    *,
    in_worker: bool = False,
) -> Rollout:
    """The rollout of a run. `in_worker`: its part in a loop worker."""
    runner = with_rollout_cache(runner_of(config, inputs, engine), config)
    scores = scores_in_workers(config)
    if config.uses_loop_workers and not in_worker:
        assert isinstance(engine, RemoteEngine)
        pool = pool_of(config, engine, nodes)
        engine.clients = pool
        runner = LoopWorkerRunner(**vars(runner), pool=pool)
    return Rollout(
        runner=runner,
        scored_by_runner=scores and not in_worker,
        scorer=scorer_of(config) if scores == in_worker else NoScorer(),  # whoever scores starts its processes
        policy=failure_policy_of(config),
        seed=config.rollout_seed,
        shaping=shaping_of(config),
        step_timeout=config.rollout.step_timeout,
        in_batch=scores_in_batch(config),
    )
