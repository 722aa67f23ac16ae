"""From a Config to the parts of a run: here, and in the `*_parts` beside it, keys meet the settings of the rooms."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rally.algos.correction import CorrectionSettings
from rally.algos.credit import CreditSettings
from rally.algos.surrogates import SurrogateSettings
from rally.chat import ChatCodec
from rally.config import Config
from rally.config.actor import OptimConfig
from rally.config.sft import SftOptim
from rally.config.trainer import GradientGuards
from rally.engines.embedded import EngineSettings
from rally.interactions import Interactions, load_interactions
from rally.loops import AgentLoopBase, LoopSettings, LoopSpec, find_loop, load_loop_config
from rally.rewards import Overlong, RewardSpec, Shaping
from rally.tools import BaseTool, ToolBox, ToolLimits, load_function_tools, load_tools
from rally.train.cuts import log_prob_cut, update_cut
from rally.train.dynamic import FilterSettings
from rally.train.guards import GradientLimits
from rally.train.lora import has_adapters
from rally.train.model_parts import model_of, patches_of
from rally.train.policy import OptimizerSettings
from rally.train.ranks import ranks_of
from rally.train.reference import BaseOfPolicy, FrozenModel, Reference
from rally.train.rollout import FailurePolicy
from rally.train.update import UpdateSettings
from rally.train.watch import WatchSettings
from rally.types import SamplingParams


def toolbox_of(config: Config) -> ToolBox:
    tools: list[BaseTool[Any]] = []
    if config.tool_config_path:
        tools += load_tools(config.tool_config_path)
    if config.function_tool_path:
        tools += load_function_tools(config.function_tool_path)
    offered = config.rollout.agent_loop_config.tools
    if offered:
        known = {tool.name for tool in tools}
        builtin = [{"name": name} for name in offered if name not in known]
        tools = [t for t in tools if t.name in offered] + (load_tools({"tools": builtin}) if builtin else [])
    multi_turn = config.rollout.multi_turn
    for tool in tools:
        tool.prepare()
    return ToolBox(
        tools,
        ToolLimits(
            timeout=multi_turn.tool_timeout,
            max_parallel=multi_turn.max_parallel_calls or 0,
            max_response_chars=multi_turn.max_tool_response_length,
            truncate_side=multi_turn.tool_response_truncate_side,
        ),
    )


def interactions_of(config: Config) -> Interactions:
    path = config.rollout.multi_turn.interaction_config_path
    return Interactions(load_interactions(path) if path else (), config.rollout.multi_turn.tool_timeout)


def codec_of(config: Config, tokenizer: PreTrainedTokenizerBase, toolbox: ToolBox) -> ChatCodec:
    return ChatCodec(
        tokenizer,
        config.rollout.multi_turn.format,
        toolbox.schemas(),
        template_kwargs=dict(config.data.apply_chat_template_kwargs),
        patches=patches_of(config),
    )


def engine_settings_of(config: Config) -> EngineSettings:
    rollout = config.rollout
    lengths = prompt_length(config) + response_length(config)
    return EngineSettings(
        max_model_len=rollout.max_model_len or lengths,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        page_size=rollout.page_size,
        memory_share=rollout.gpu_memory_utilization,
        in_flight=rollout.in_flight,
        seed=config.trainer.seed if rollout.seed is None else rollout.seed,
        backend=rollout.attention_backend,
        eager=rollout.enforce_eager,
        deterministic=rollout.deterministic,
        lend_memory=rollout.free_cache_engine and rollout.enable_sleep_mode,
    )


def cores() -> int:
    """That this process may use; all, on a system that does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prompt_length(config: Config) -> int:
    return config.rollout.prompt_length or config.data.max_prompt_length


def response_length(config: Config) -> int:
    return config.rollout.response_length or config.data.max_response_length


def loop_settings_of(config: Config) -> LoopSettings:
    rollout, multi_turn = config.rollout, config.rollout.multi_turn
    return LoopSettings(
        prompt_length=prompt_length(config),
        truncation=config.data.truncation,
        response_length=response_length(config),
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
    """Loops by name: those of agent_loop_config_path, and the default one with its own options."""
    path = config.rollout.agent.agent_loop_config_path
    loops = load_loop_config(path) if path else {}
    name = config.agent_loop_name
    spec = find_loop(name, loops)
    loops[name] = LoopSpec(spec.cls, {**spec.options, **_loop_options(config, spec.cls)})
    for spec in loops.values():
        spec.cls.prepare(spec.options)
    return loops


def _loop_options(config: Config, cls: type[AgentLoopBase]) -> dict[str, Any]:
    """agent_loop_config for a loop class: its free keys always, the named ones where its __init__ takes them."""
    section = config.rollout.agent_loop_config
    taken = inspect.signature(cls.__init__).parameters
    named = {name: getattr(section, name) for name in type(section).model_fields if name in taken}
    return {**named, **(section.model_extra or {})}


def sampling_of(config: Config, codec: ChatCodec) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=response_length(config),
        stop_ids=() if rollout.ignore_eos else codec.stop_ids,
        stop=rollout.stop_strings,
        ignore_eos=rollout.ignore_eos,
    )


@dataclass(frozen=True)
class ValidationPass:
    """One way to sample the validation set: `n` samples per prompt; `suffix` keeps its metrics apart."""

    sampling: SamplingParams
    n: int
    suffix: str = ""


def validation_passes(config: Config, train: SamplingParams) -> list[ValidationPass]:
    """Greedy alone by default; where val_kwargs sample, that pass is the main one and greedy runs beside it."""
    kwargs = config.rollout.val_kwargs
    greedy = train.greedy()
    sample = kwargs.temperature > 0 if kwargs.do_sample is None else kwargs.do_sample
    if not sample:
        return [ValidationPass(greedy, 1)]
    sampled = replace(train, temperature=kwargs.temperature, top_p=kwargs.top_p, top_k=kwargs.top_k, min_p=0.0)
    return [ValidationPass(sampled, kwargs.n), ValidationPass(greedy, 1, "greedy")]


def update_settings_of(config: Config) -> UpdateSettings:
    actor, cut = config.actor, update_cut(config)
    return UpdateSettings(
        mini_batch_groups=config.mini_batch_size,
        surrogate=surrogate_settings_of(config),
        correction=correction_settings_of(config),
        aggregation=actor.loss_agg_mode,
        loss_scale=actor.loss_scale_factor or float(response_length(config)),
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_kind=actor.kl_loss_type,
        epochs=actor.ppo_epochs,
        max_tokens=cut.max_tokens,
        max_rows=cut.max_rows,
        log_prob_cut=log_prob_cut(config, config.rollout),
        reference_cut=log_prob_cut(config, config.actor_rollout_ref.ref),
        temperature=config.rollout.temperature,
        deterministic=config.rollout.deterministic,
        shuffle_seed=_shuffle_seed(config),
    )


def surrogate_settings_of(config: Config) -> SurrogateSettings:
    actor, chosen = config.actor, config.actor.policy_loss
    return SurrogateSettings(
        mode=chosen.loss_mode,
        low=actor.clip_low,
        high=actor.clip_high,
        dual=actor.clip_ratio_c,
        tau_positive=actor.tau_pos,
        tau_negative=actor.tau_neg,
        marked_share=chosen.kl_cov_ratio if chosen.loss_mode == "kl_cov" else chosen.clip_cov_ratio,
        covariance_low=chosen.clip_cov_lb,
        covariance_high=chosen.clip_cov_ub,
        marked_kl=chosen.ppo_kl_coef,
    )


def credit_settings_of(config: Config) -> CreditSettings:
    algorithm = config.algorithm
    return CreditSettings(
        estimator=algorithm.adv_estimator,
        by_std=algorithm.norm_adv_by_std_in_grpo,
        turn_rewards=algorithm.turn_rewards,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        step_weight=algorithm.gigpo.step_advantage_w,
        components=algorithm.gdpo_reward_keys,
    )


def filter_settings_of(config: Config) -> FilterSettings | None:
    """DAPO's dynamic sampling, if it is on. A generation batch is as large as what a step begins with."""
    chosen = config.algorithm.filter_groups
    first = config.data.gen_batch_size or config.data.train_batch_size
    if not chosen.enable:
        return None
    return FilterSettings(metric=chosen.metric, first=first, most=chosen.max_num_gen_batches * first or None)


def correction_settings_of(config: Config) -> CorrectionSettings:
    correction = config.algorithm.rollout_correction
    return CorrectionSettings(
        level=correction.rollout_is,
        threshold=correction.rollout_is_threshold,
        rejections=correction.rejections,
        normalize=correction.rollout_is_batch_normalize,
    )


def reward_kl_coef(config: Config) -> float:
    algorithm = config.algorithm
    return algorithm.kl_ctrl.kl_coef if algorithm.use_kl_in_reward else 0.0


def _shuffle_seed(config: Config) -> int | None:
    own = config.actor.data_loader_seed
    return (config.trainer.seed if own is None else own) if config.actor.shuffle else None


def optimizer_settings_of(config: Config) -> OptimizerSettings:
    return optimizer_settings(config.actor.optim, config.actor.grad_clip, gradient_limits_of(config.trainer.guards))


def optimizer_settings(optim: OptimConfig | SftOptim, grad_clip: float, limits: GradientLimits) -> OptimizerSettings:
    return OptimizerSettings(
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        grad_clip=optim.clip_grad or grad_clip,
        schedule=optim.lr_scheduler_type,
        warmup_steps=optim.lr_warmup_steps,
        warmup_ratio=optim.lr_warmup_steps_ratio,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        limits=limits,
    )


def gradient_limits_of(guards: GradientGuards) -> GradientLimits:
    return GradientLimits(factor=guards.grad_norm_factor, highest=guards.max_grad_norm)


def watch_settings_of(config: Config) -> WatchSettings:
    guards = config.trainer.guards
    return WatchSettings(
        patience=guards.patience,
        entropy_share=guards.entropy_share,
        tool_share=guards.tool_share,
        clipped_share=guards.clipped_share,
    )


def failure_policy_of(config: Config) -> FailurePolicy:
    return FailurePolicy(
        loop=config.rollout.on_error,
        reward=config.reward.on_error,
        max_failed_share=config.rollout.max_failed_share,
    )


def reward_spec_of(config: Config) -> RewardSpec:
    function = config.reward_function
    in_batch = config.reward_manager_name == "batch"
    return RewardSpec(path=function.path, name=function.name, kwargs=config.reward_kwargs, batch=in_batch)


def shaping_of(config: Config) -> Shaping:
    """What is added to the score of the reward function: `reward_shaping` and DAPO's overlong buffer."""
    given = config.reward_model.reward_kwargs
    buffer = given.overlong_buffer_cfg
    overlong = Overlong(
        longest=given.max_resp_len or response_length(config),
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


def reference_of(config: Config, policy: PreTrainedModel) -> Reference | None:
    """The frozen starting policy, if a KL term asks for it; with LoRA the policy's own base."""
    if update_settings_of(config).kl_coef == 0 and reward_kl_coef(config) == 0:
        return None
    offload = config.actor_rollout_ref.ref.fsdp_config.param_offload
    if has_adapters(policy):
        return BaseOfPolicy(policy)
    return FrozenModel(model_of(config, ranks=ranks_of(policy)), offload=offload)
