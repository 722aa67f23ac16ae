"""What becomes of keys of verl that the schema does not have, or that have no effect here, as tables.

Hints are accepted without effect, each with its reason. Moves give the key that says the same. Sections that a switch
turns off are not validated. Refusals are sentences. `verl_keys.py` applies the tables.
"""

from __future__ import annotations

import functools
import re
from fnmatch import translate as glob
from typing import Any, NamedTuple

A, M, R, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout", "ref"))


class Hint(NamedTuple):
    """A key, as a pattern, that is accepted and has no effect; the reason, and the only values that this is true of."""

    pattern: str
    why: str
    values: tuple[Any, ...] = ()


def hint_for(key: str, hints: tuple[Hint, ...]) -> Hint | None:
    """The hint that a key is, or a section that it is part of."""
    found = _pattern(tuple(hint.pattern for hint in hints)).fullmatch(key)
    return hints[int(found.lastgroup.removeprefix("hint"))] if found and found.lastgroup else None


@functools.cache
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Matches what one of the patterns matches, or what is inside it; its group is the number of the first one."""
    return re.compile("|".join(f"(?P<hint{n}>{glob(text)}|{glob(text + '.*')})" for n, text in enumerate(patterns)))


UNSHARDED_OFFLOAD = (
    "one device holds the whole model, so nothing is gathered layer by layer; param_offload and optimizer_offload keep "
    "its weights and optimizer in main memory between uses"
)
SAMPLED = "the embedded engine samples from the trainer's weights, so they stay on the device"
ALWAYS_USED = "supervised steps follow each other, so weights are always in use"
WHOLE = "there is one GPU, so no sequence is divided among GPUs, which needs more memory and gives the same result"
JUDGED_WHOLE = "a conversation is never divided among GPUs, which gives the same score"
CHUNKS = "logits are always computed in chunks, and again in the backward pass"
PROFILER = "there is no profiler; timing_s/* reports the time of each part of a step"
NO_RAY = "it describes a Ray cluster, and this run starts none"
COMPILE = "the forward passes are not compiled by torch.compile"
KERNELS = "Rally has kernels of its own"
OWN_FOLDER = "files are read from their own folder"
FLOAT32 = (
    f"weights are updated in float32 and rounded to {M}.dtype for forward passes; updates in bfloat16 would lose small "
    "steps to rounding"
)
REFERENCE_DTYPE = f"the reference has the dtype of {M}.dtype; the difference is one of rounding"
MIXED = f"{M}.dtype sets the dtype of forward passes, and gradients are always summed in float32"
ACTIVATIONS = "enable_activation_offload moves all large activations to main memory"
PLACEMENT = "the place of the engine does not change a result"
ENGINES = "the engines of Rally do not need it"
MESSAGES = "loops render prompts from messages"
DEAD = "verl does not read it either"
JUDGE_PLACE = "a classifier runs in process, and a judge's server gets GPUs that the trainer leaves free"
JUDGE_ROLLOUT = "it changes no answer of the judge"
SCORED_BATCHES = "reward_model.micro_batch_size_per_gpu conversations are scored at once"
UNSHARDED = ("wrap_policy", "min_num_params", "fsdp_size", "forward_prefetch", "reshard_after_forward")
JUDGE_HINTS = (
    *("cudagraph_capture_sizes", "free_cache_engine", "data_parallel_size", "expert_parallel_size", "load_format"),
    *("pipeline_model_parallel_size", "layered_summon", "scheduling_policy", "multi_stage_wake_up", "limit_images"),
    *("enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats", "skip_tokenizer_init"),
    *("ignore_eos", "temperature", "top_k", "top_p", "do_sample", "n", "disaggregation"),
)
LORA = "merging adapters is a matter of how weights reach the engine"

FSDP: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("ulysses_sequence_parallel_size", WHOLE, ()),
    ("entropy_from_logits_with_chunking", CHUNKS, ()),
    ("entropy_checkpointing", CHUNKS, ()),
    ("use_torch_compile", COMPILE, ()),
    ("strategy", "one device holds the whole model, several share it by FSDP2", ("fsdp", "fsdp2")),
    ("model_dtype", FLOAT32, ("fp32", "float32", "bf16", "bfloat16")),
    ("dtype", "model.dtype sets it", ("bf16", "bfloat16")),
    ("seed", "trainer.seed sets it", (42, 0, None)),
    ("full_determinism", "it is off", (False, None)),
    ("mixed_precision", MIXED, (None, "bf16", "bfloat16", "fp32", "float32")),
    ("entropy_from_logits_chunk_size", CHUNKS, ()),
    ("pad_to_length*", "sequences are packed, so there is never any padding", ()),
    ("turbo_config", KERNELS, ()),
    ("activation_gpu_memory*", ACTIVATIONS, ()),
    ("use_no_sync_for_gradient_accumulation", "it concerns communication only", ()),
)
OLD_LOGPROBS = "the log-probabilities recorded when tokens were sampled are the old ones in any case"
DECOUPLED = {"use_rollout_log_probs": True, "compute_prox_log_prob": False}
"""Keys of verl's `async_training` that choose the old log-probabilities, and the values that mean the recorded ones."""
RAY = (
    *("num_cpus", "num_gpus", "address", "object_store_memory", "ignore_reinit_error", "log_to_driver", "_temp_dir"),
    *("include_dashboard", "dashboard_host", "dashboard_port", "namespace", "logging_level", "timeline_json_file"),
    *("runtime_env.py_executable", "runtime_env.config", "runtime_env.env_vars.RAY_*"),
    *(f"runtime_env.env_vars.{name}" for name in ("TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "TRANSFER_QUEUE_ENABLE")),
)
"""Keys of Ray that change no result. Others, such as variables of the environment, may."""
TRAINED, REFERENCE = (f"{A}.fsdp_config", "critic.fsdp_config"), f"{REF}.fsdp_config"

HINTS: tuple[Hint, ...] = (
    *(Hint(f"{section}.{name}", why, values) for section in TRAINED for name, why, values in FSDP),
    *(
        Hint(f"{REFERENCE}.{name}", REFERENCE_DTYPE if name == "model_dtype" else why, values)
        for name, why, values in FSDP
    ),
    *(
        Hint(f"{section}.{name}", "offload_policy, param_offload and optimizer_offload set what is offloaded")
        for section in (*TRAINED, REFERENCE)
        for name in ("cpu_offload", "offload_params")
    ),
    Hint(f"{REFERENCE}.optimizer_offload", "the reference has no optimizer"),
    Hint(f"{REFERENCE}.forward_only", "the reference is never trained"),
    *(Hint(f"{section}.ulysses_sequence_parallel_size", WHOLE) for section in (A, REF, "critic")),
    *(Hint(f"{REF}.{name}", CHUNKS) for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")),
    *(Hint(f"{section}.entropy_from_logits_chunk_size", CHUNKS) for section in (A, REF, "critic")),
    *(
        Hint(f"{section}.pad_to_length*", "sequences are packed, so nothing is padded")
        for section in (A, REF, "critic")
    ),
    *(Hint(f"{section}.optim.zero_indexed_step", "it is so", (True, None)) for section in (A, "critic")),
    *(Hint(f"{section}.checkpoint.strict", "a checkpoint is always loaded whole") for section in (A, "critic")),
    *(
        Hint(
            f"{section}.strategy",
            "its kernels belong to another device; the model is sharded with FSDP2",
            ("fsdp_turbo",),
        )
        for section in (A, REF, "critic")
    ),
    Hint("critic.data_loader_seed", "trainer.seed sets it", (None, 42)),
    Hint("critic.loss_scale_factor", "it is not set", (None,)),
    Hint("skip", "it is off", (None, False, {}, [])),
    *(
        Hint(f"algorithm.rollout_correction.{name}", "it is off", (None, False))
        for name in ("rollout_rs_threshold_lower", "rollout_token_veto_threshold", "use_policy_gradient")
    ),
    *(Hint(f"{section}.use_torch_compile", COMPILE) for section in (A, REF, "critic")),
    Hint(f"{A}.use_prefix_grouper", "prompts that several episodes share are computed once in any case"),
    Hint(f"{A}.sum_pi_squared_checkpointing", CHUNKS),
    Hint(f"{REF}.use_remove_padding", "sequences are packed, so there is never any padding"),
    Hint(f"{REF}.use_fused_kernels", KERNELS),
    Hint("*.rollout_n", f"{R}.n sets it", (None,)),
    *(Hint(f"{model}.{name}", KERNELS) for model in (M, "critic.model") for name in ("use_liger", "tiled_mlp.*")),
    *(Hint(f"{model}.fused_kernel_options.*", KERNELS) for model in (M, "critic.model")),
    *(Hint(f"{model}.use_shm", OWN_FOLDER) for model in (M, "critic.model", "data")),
    Hint(f"{M}.lora.merge", LORA),
    Hint("data.trust_remote_code", f"{M}.trust_remote_code also controls the tokenizer"),
    Hint("data.return_raw_input_ids", MESSAGES),
    Hint("data.return_full_prompt", MESSAGES),
    Hint("data.filter_prompts", "filter_overlong_prompts controls this"),
    Hint("data.min_response_length", DEAD),
    Hint("data.cache_dir", OWN_FOLDER),
    Hint("data.image_patch_size", "the model's image processor sets it"),
    Hint(f"{R}.mode", "every engine is asynchronous", ("sync",)),
    Hint(f"{R}.enable_chunked_prefill", "long prompts are always prefilled in chunks"),
    Hint(f"{R}.enable_prefix_caching", "prefixes are always cached"),
    Hint(f"{R}.scheduling_policy", "requests are served in order of arrival"),
    Hint(f"{R}.multi_stage_wake_up", ENGINES),
    Hint(f"{R}.sglang_engine_mode", ENGINES),
    Hint(f"{R}.sglang_rollout_mode", ENGINES),
    Hint(f"{R}.disable_log_stats", ENGINES),
    Hint(f"{R}.cudagraph_capture_sizes", "the engine captures the sizes that occur"),
    Hint(f"{R}.expert_parallel_size", PLACEMENT),
    Hint(f"{R}.moe_tensor_parallel_size", PLACEMENT),
    Hint(f"{R}.pipeline_model_parallel_size", PLACEMENT),
    Hint(f"{R}.micro_batch_size", DEAD),
    Hint(f"{R}.enable_memory_saver", ENGINES),
    Hint(f"{R}.checkpoint_engine.backend", "weights take the fastest way there is", ("nccl", "nixl", "hccl")),
    Hint(f"{R}.checkpoint_engine.engine_kwargs", "weights take the fastest way there is"),
    Hint(f"{R}.router_config_path", ENGINES),
    Hint(f"{R}.moe_load_balance_metrics_interval", "expert loads are reported at every step, as actor/moe_load_*"),
    Hint(f"{R}.prometheus.*", "engines of Rally do not report to Prometheus"),
    Hint(f"{R}.over_sample_rate", f"verl does not read it either; {R}.step_timeout bounds stragglers"),
    Hint(f"{R}.multi_turn.num_repeat_rollouts", DEAD),
    Hint("*.profiler", PROFILER),
    Hint("global_profiler.*", PROFILER),
    *(
        Hint(f"{section}.{name}", NO_RAY)
        for section in ("ray_kwargs.ray_init", "ray_init", "ray_kwargs")
        for name in RAY
    ),
    Hint("transfer_queue.*", "everything runs in one process"),
    Hint("trainer.use_legacy_worker_impl", "there is one worker implementation"),
    Hint("trainer.use_v1", "there is one trainer implementation"),
    Hint("trainer.v1.sync", "it has no options", (None, {})),
    Hint("async_training.use_trainer_do_validate", "servers validate in any case, with the weights of one version"),
    Hint("async_training.concurrent_samples_per_replica", f"{R}.server.max_in_flight limits requests at a server"),
    *(Hint(f"async_training.{name}", OLD_LOGPROBS, (asked,)) for name, asked in DECOUPLED.items()),
    Hint(f"{A}.use_rollout_log_probs", OLD_LOGPROBS, (True,)),
    Hint("trainer.v1.sampler.sync_refill_failed_groups", "failed groups follow rollout.on_error", (False,)),
    Hint("trainer.v1.sampler.custom_sampler.*", "it is not set", (None,)),
    Hint("trainer.v1.sampler.sampler_kwargs", "it is not set", (None, {})),
    Hint("trainer.esi_redundant_time", "there is no instance that expires"),
    Hint("trainer.ray_wait_register_center_timeout", NO_RAY),
    Hint("trainer.del_local_ckpt_after_load", "checkpoints are kept"),
    Hint("trainer.checkpoint_callback_class", "it is not set", (None,)),
    Hint("trainer.tensorboard_dir", f"{DEAD}; TensorBoard files are in the run folder"),
    Hint("trainer.rl_logging_board_dir", DEAD),
    Hint("critic.checkpoint.async_save", "the critic is saved with the policy"),
    Hint(f"{A}.checkpoint.mbridge_config", "it belongs to Megatron"),
    Hint("critic.checkpoint.mbridge_config", "it belongs to Megatron"),
    Hint("reward_model.use_reward_loop", "episodes are scored as they finish"),
    *(Hint(f"reward_model.{name}", JUDGE_PLACE) for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes")),
    Hint("reward_model.model.input_tokenizer", "conversations are rendered with the reward model's own template"),
    Hint("reward_model.model.use_remove_padding", "padding does not change a score"),
    Hint("reward_model.model.use_shm", OWN_FOLDER),
    *(Hint(f"reward_model.model.fsdp_config.{name}", "a reward model is not sharded") for name in UNSHARDED),
    Hint("reward_model.rollout.engine_kwargs", JUDGE_ROLLOUT, ({}, None)),
    *(Hint(f"reward_model.{name}", SCORED_BATCHES) for name in ("use_dynamic_bsz", "forward_max_token_len_per_gpu")),
    Hint("reward_model.ulysses_sequence_parallel_size", JUDGED_WHOLE),
    Hint("reward_model.strategy", "a reward model is not sharded"),
    *(Hint(f"reward_model.rollout.{name}", JUDGE_ROLLOUT) for name in JUDGE_HINTS),
    Hint("model_engine", "one device holds the whole model, several share it by FSDP2", ("dp", "fsdp", "fsdp2", None)),
    Hint(f"{A}.model_engine", "one device holds the whole model, several share it by FSDP2", ("dp", "fsdp", "fsdp2")),
)
SFT_HINTS: tuple[Hint, ...] = (
    *(Hint(f"model.fsdp_config.{name}", why, values) for name, why, values in FSDP),
    Hint("model.fsdp_config.param_offload", ALWAYS_USED),
    Hint("ulysses_sequence_parallel_size", WHOLE),
    Hint("model.use_liger", KERNELS),
    Hint("model.use_fused_kernels", KERNELS),
    Hint("model.fused_kernel_options.*", KERNELS),
    Hint("model.tiled_mlp.*", KERNELS),
    Hint("model.use_shm", OWN_FOLDER),
    Hint("data.use_shm", OWN_FOLDER),
    Hint("data.balance_dp_token", "micro-batches are always split by tokens"),
    Hint("data.ignore_input_ids_mismatch", "conversations are encoded as they would be sampled"),
    Hint("optim.optimizer_impl", "optim.optimizer names it", ("torch.optim", "torchao.optim", "bitsandbytes.optim")),
    Hint("trainer.balance_batch", "micro-batches are always split by tokens"),
    Hint("profiler", PROFILER),
    Hint("global_profiler.*", PROFILER),
    Hint("trainer.profile_interval", PROFILER),
    Hint("data.enable_thinking_default", "it is not set", (None, "none")),
    *(Hint(f"{section}.{name}", NO_RAY) for section in ("ray_kwargs.ray_init", "ray_kwargs") for name in RAY),
)

MOVES: tuple[tuple[str, str], ...] = (
    ("rollout.nnodes", f"{R}.nnodes"),
    ("rollout.n_gpus_per_node", f"{R}.n_gpus_per_node"),
    ("critic.model.fsdp_config", "critic.fsdp_config"),
    ("critic.fsdp", "critic.fsdp_config"),
    ("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
    ("critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu"),
    ("reward.reward_kwargs", "reward_model.reward_kwargs"),
    ("reward.reward_model.model_path", "reward_model.model.path"),
    ("reward.reward_model", "reward_model"),
    ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"),
    ("reward.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"),
    ("reward_model.reward_kwargs.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"),
    ("custom_reward_function.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"),
    (f"{R}.update_weights_bucket_megabytes", f"{R}.checkpoint_engine.update_weights_bucket_megabytes"),
    (f"{A}.loss_mode", f"{A}.policy_loss.loss_mode"),
    *((f"{A}.{name}", f"{A}.policy_loss.{name}") for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
    *((f"{A}.{name}", f"{A}.policy_loss.{name}") for name in ("kl_cov_ratio", "ppo_kl_coef")),
    *((f"{A}.policy_loss.{name}", f"{A}.{name}") for name in ("tau_pos", "tau_neg")),
    *((f"{M}.lora.{old}", f"{M}.lora_{old}") for old in ("rank", "alpha", "adapter_path")),
    *((f"{M}.lora.{name}", f"{M}.{name}") for name in ("target_modules", "exclude_modules")),
    (f"{M}.fused_kernel_options.impl", f"{M}.fused_kernel_options.impl_backend"),
    (f"{M}.torch_dtype", f"{M}.dtype"),
    ("sandbox_fusion", "reward.sandbox_fusion"),
    ("skip.rollout.enable", f"{R}.skip_rollout"),
    ("skip.rollout.dump_dir", f"{R}.skip_dump_dir"),
)
SFT_MOVES: tuple[tuple[str, str], ...] = (
    ("engine.strategy", "model.strategy"),
    ("engine", "model.fsdp_config"),
    ("checkpoint", "trainer.checkpoint"),
    ("optim.warmup_style", "optim.lr_scheduler"),
    ("optim.lr_scheduler_type", "optim.lr_scheduler"),
)

OFF: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("distillation", "enabled", ()),
    ("reward.reward_model", "enable", ()),
    *((f"{section}.module", "path", ()) for section in ("reward_manager", "reward.reward_manager")),
    *((section, "url", ()) for section in ("sandbox_fusion", "reward.sandbox_fusion", "reward_model.sandbox_fusion")),
    *((f"{section}.lora", "rank", ()) for section in (M, "critic.model", "model")),
    (f"{REF}.router_replay", "mode", ()),
    ("engine.qat", "enable", ()),
    (f"{R}.prometheus", "enable", ()),
    (f"{R}.disaggregation", "enabled", ()),
    (f"{R}.mtp", "enable", ()),
    (f"{R}.qat", "enable", ()),
    (f"{M}.mtp", "enable", ()),
    (f"{M}.tiled_mlp", "enabled", ()),
    ("critic.model.mtp", "enable", ()),
    ("critic.model.tiled_mlp", "enabled", ()),
    ("model.mtp", "enable", ()),
    ("model.tiled_mlp", "enabled", ()),
    *(
        (f"{section}.qat", "enable", ())
        for section in (*TRAINED, REFERENCE, "model.fsdp_config", "critic.model.fsdp_config", A)
    ),
    ("transfer_queue", "enable", ()),
    *(
        ("async_training", "use_dynamic_resource_scheduling", (f"dynamic_schedule_{name}",))
        for name in ("policy", "deactivate_ratio", "enable_rebalance")
    ),
    *((f"{section}.profiler", "enable", ()) for section in (A, REF, R, "critic", "reward_model")),
    ("profiler", "enable", ()),
    ("global_profiler", "tool", ()),
    (f"{R}.trace", "backend", ()),
    ("algorithm.pf_ppo", "../use_pf_ppo", ()),
    *((f"skip.{part}", "enable", ()) for part in ("rollout", "rollout_tq", "async_rollout")),
    (
        "reward_model",
        "enable",
        (
            *("model", "rollout", "enable_resource_pool", "n_gpus_per_node", "nnodes", "strategy", "micro_batch_size"),
            *("micro_batch_size_per_gpu", "max_length", "use_dynamic_bsz", "forward_max_token_len_per_gpu", "profiler"),
            *("ulysses_sequence_parallel_size", "input_tokenizer", "mini_batch_size"),
        ),
    ),
)
"""Sections, the key that switches each on, and its parts that belong to that switch (all, if none is named)."""
ASKED = (f"{R}.trace", "algorithm.pf_ppo")
"""Sections of which a key is an error if nothing switches the section off."""
SWITCHED_OFF = (None, False, "", "disabled")
NULLS = (
    *("custom_reward_function.name", "reward_model.reward_manager", "reward_model.reward_loop_source"),
    *("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches", "data.reward_fn_key"),
    *("reward.custom_reward_function.name", "reward_model.launch_reward_fn_async", "reward_model.num_workers"),
    *(f"{R}.agent.default_agent_loop", f"{R}.max_num_batched_tokens", f"{R}.multi_turn.format"),
    *(f"{section}.lr_warmup_steps" for section in (f"{A}.optim", "critic.optim", "optim")),
)
"""Keys that verl's own files set to null, which means that they are not set."""

REFUSED: tuple[tuple[str, str, str], ...] = (
    *(
        (f"{section}.qat", "enable", "asks for quantization-aware training, which is not built yet; leave qat.* out")
        for section in TRAINED
    ),
    (f"{R}.qat", "enable", "asks for quantization-aware training, which is not built yet; leave qat.* out"),
)
ASYNC_KEYS = (
    *(".use_trainer_do_validate", ".use_dynamic_resource_scheduling", ".dynamic_schedule_policy"),
    *(".dynamic_schedule_deactivate_ratio", ".dynamic_schedule_enable_rebalance", ".concurrent_samples_per_replica"),
    *(".use_rollout_log_probs", ".compute_prox_log_prob"),
)
"""Keys of verl's `async_training` that the schema does not have."""
ASYNC = (
    "asks for asynchronous training; set trainer.v1.trainer_mode=separate_async for servers on GPUs of their own, or "
    "colocate_async to sample batches ahead on the trainer's"
)
GROUPS = ("engine", "optim", "model", "model_engine", "critic", "algorithm", "reward_model", "checkpoint")
"""Keys that Hydra reads as the name of a file when their value is text."""
GROUP_FILES = (
    *("fsdp", "fsdp2", "dp", "hf_model", "default", "rollout_correction"),
    *("dp_critic", "dp_reward_model", "dp_reward_loop"),
)
"""Names of these files that ask for nothing but what Rally does."""
