"""Brings a configuration written for verl into the keys of the schema, before it is validated.

Keys that have another place here are moved. Parts that are switched off are dropped. Hints about placement, memory and
speed, which change no result, are dropped with a reason; `load_config` collects them in one note. What asks for a
feature that is not built is refused in one sentence. Nothing here reads a value that the run depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pydantic import ValidationError

from rally.config.base import Root, expand, look_up, missing_file
from rally.config.errors import shown
from rally.config.yaml_files import Tree

A, M, R, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout", "ref"))
OWN_FILES = (
    *("ppo_trainer", "sft_trainer", "sft_trainer_engine", "ppo_megatron_trainer", "ppo_veomni_trainer"),
    *("dapo_trainer", "dapo_megatron_trainer", "_generated_ppo_trainer"),
)
"""Configuration files that belong to verl. Where they do not exist, Rally's own defaults take their place."""
FREE = (
    "engine_kwargs",
    "override_config",
    "reward_kwargs",
    "agent_loop_config",
    "apply_chat_template_kwargs",
    "custom",
)
"""Mappings whose keys are the user's."""


class Hint(NamedTuple):
    """A key, as a pattern, that is accepted and has no effect; the reason, and the only values that this is true of."""

    pattern: str
    why: str
    values: tuple[Any, ...] = ()


class Dropped(NamedTuple):
    """A key of the command line that has no effect, with its value and the reason."""

    key: str
    value: Any
    why: str


class Translation(NamedTuple):
    """The tree in the keys of the schema, and what became of the others."""

    tree: Tree
    dropped: tuple[Dropped, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


STAYS = "weights stay on the device, which needs more memory and gives the same result"
WHOLE = "a sequence is never split over GPUs, which needs more memory and gives the same result"
CHUNKS = "logits are always computed in chunks, and again in the backward pass"
PROFILER = "there is no profiler; timing_s/* reports the time of each part of a step"
NO_RAY = "Rally does not run on Ray"
COMPILE = "the forward passes are not compiled by torch.compile"
KERNELS = "Rally has kernels of its own"
OWN_FOLDER = "files are read from their own folder"
FLOAT32 = (
    f"weights are updated in float32 and rounded to {M}.dtype for forward passes; updates in bfloat16 would lose small "
    "steps to rounding"
)
REFERENCE_DTYPE = f"the reference has the dtype of {M}.dtype; the difference is one of rounding"
MIXED = f"{M}.dtype sets the dtype of forward passes, and gradients are always summed in float32"
ACTIVATIONS = "activations stay on the device or are computed again, which needs more memory and gives the same result"
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
    ("offload_policy", STAYS, ()),
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
    ("param_offload", STAYS, ()),
    ("cpu_offload", STAYS, ()),
    ("offload_params", STAYS, ()),
    ("activation_gpu_memory*", ACTIVATIONS, ()),
    ("use_no_sync_for_gradient_accumulation", "it concerns communication only", ()),
)
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
        if name != "param_offload"
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
    *(Hint(f"{model}.enable_activation_offload", ACTIVATIONS) for model in (M, "critic.model")),
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
    Hint(f"{R}.nnodes", PLACEMENT),
    Hint(f"{R}.n_gpus_per_node", PLACEMENT),
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
    Hint("trainer.v1.separate_async.*", "the mode separate_async is not used"),
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
    Hint("reward_model.ulysses_sequence_parallel_size", WHOLE),
    Hint("reward_model.strategy", "a reward model is not sharded"),
    *(Hint(f"reward_model.rollout.{name}", JUDGE_ROLLOUT) for name in JUDGE_HINTS),
    Hint("model_engine", "one device holds the whole model, several share it by FSDP2", ("dp", "fsdp", "fsdp2", None)),
    Hint(f"{A}.model_engine", "one device holds the whole model, several share it by FSDP2", ("dp", "fsdp", "fsdp2")),
)
SFT_HINTS: tuple[Hint, ...] = (
    *(Hint(f"model.fsdp_config.{name}", why, values) for name, why, values in FSDP),
    Hint("ulysses_sequence_parallel_size", WHOLE),
    Hint("model.use_liger", KERNELS),
    Hint("model.use_fused_kernels", KERNELS),
    Hint("model.fused_kernel_options.*", KERNELS),
    Hint("model.tiled_mlp.*", KERNELS),
    Hint("model.enable_activation_offload", ACTIVATIONS),
    Hint("model.use_shm", OWN_FOLDER),
    Hint("data.use_shm", OWN_FOLDER),
    Hint("data.balance_dp_token", "micro-batches are always split by tokens"),
    Hint("data.ignore_input_ids_mismatch", "conversations are encoded as they would be sampled"),
    Hint("optim.optimizer", "it is torch's AdamW", ("AdamW",)),
    Hint("optim.optimizer_impl", "it is torch's AdamW", ("torch.optim",)),
    Hint("trainer.balance_batch", "micro-batches are always split by tokens"),
    Hint("profiler", PROFILER),
    Hint("global_profiler.*", PROFILER),
    Hint("trainer.profile_interval", PROFILER),
    Hint("data.enable_thinking_default", "it is not set", (None, "none")),
    *(Hint(f"{section}.{name}", NO_RAY) for section in ("ray_kwargs.ray_init", "ray_kwargs") for name in RAY),
)

MOVES: tuple[tuple[str, str], ...] = (
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
SEPARATE_ONLY = (
    *(".use_trainer_do_validate", ".use_dynamic_resource_scheduling", ".dynamic_schedule_policy"),
    *(".dynamic_schedule_deactivate_ratio", ".dynamic_schedule_enable_rebalance", ".concurrent_samples_per_replica"),
    *(".use_rollout_log_probs", ".compute_prox_log_prob"),
)
"""Keys of verl's `async_training` that are for separate GPUs."""
ASYNC = (
    "asks for a trainer and a rollout on separate GPUs, which is not built yet; set "
    "trainer.v1.trainer_mode=colocate_async to sample batches ahead on one GPU"
)
GROUPS = ("engine", "optim", "model", "model_engine", "critic", "algorithm", "reward_model", "checkpoint")
"""Keys that Hydra reads as the name of a file when their value is text."""
BACKENDS = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed", "mindspeed_mm", "mlite")
BACKEND_NAMES = {"megatron": "Megatron", "veomni": "VeOmni", "mlite": "Megatron Lite"}
MEGATRON_OPTIM = (
    *("lr_decay_style", "lr_decay_steps", "lr_warmup_init", "min_lr", "weight_decay_incr_style", "lr_wsd_decay_style"),
    *("lr_wsd_decay_steps", "use_checkpoint_opt_param_scheduler", "override_optimizer_config"),
    *("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "name", "eps"),
    *("decay_type", "min_lr_factor", "lr_min", "lr_start", "lr_decay_ratio", "optimizer"),
    "use_layer_wise_distributed_optimizer",
)
"""Keys of `optim` that belong to another backend than FSDP, with those that begin with `muon_`."""
BACKEND_ONLY = ("load_weight", "nccl_timeout", "layer_name_map")
"""Keys that verl's files have for Megatron alone."""
SAME_IN_FSDP = {
    "param_offload": "{0}.fsdp_config.param_offload",
    "optimizer_offload": "{0}.fsdp_config.optimizer_offload",
    "grad_offload": "{0}.fsdp_config.optimizer_offload",
    "tensor_model_parallel_size": "trainer.n_gpus_per_node",
    "pipeline_model_parallel_size": "trainer.n_gpus_per_node",
    "context_parallel_size": "trainer.n_gpus_per_node",
    "expert_model_parallel_size": "trainer.n_gpus_per_node",
    "expert_parallel_size": "trainer.n_gpus_per_node",
    "fsdp_size": "{0}.fsdp_config.fsdp_size",
    "lr_decay_style": "{0}.optim.lr_scheduler_type",
    "min_lr": "{0}.optim.min_lr_ratio",
    "tp": "trainer.n_gpus_per_node",
    "ep": "trainer.n_gpus_per_node",
    "seed": "trainer.seed",
    "dtype": f"{M}.dtype",
}


def at(tree: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key of the tree, or `default` if it is not set."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree


def put(tree: Tree, key: str, value: Any) -> Tree:
    """The tree with the value at a dotted key."""
    head, _, rest = key.partition(".")
    below = tree.get(head)
    return {**tree, head: put(below if isinstance(below, dict) else {}, rest, value) if rest else value}


def without(tree: Tree, key: str) -> Tree:
    """The tree without a dotted key, and without the sections that this leaves empty."""
    head, _, rest = key.partition(".")
    if head not in tree:
        return tree
    below = tree[head]
    kept = without(below, rest) if rest and isinstance(below, dict) else None
    if kept:
        return {**tree, head: kept}
    return {name: value for name, value in tree.items() if name != head}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the tree with its value; an empty mapping is a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from leaves(value, key + ".")
        else:
            yield key, value


def group_choices(layer: Tree) -> tuple[Tree, dict[str, str]]:
    """A layer without the choices of Hydra's groups, such as `engine=fsdp`, and those choices."""
    chosen = {key: value for key, value in layer.items() if (key in GROUPS or "@" in key) and isinstance(value, str)}
    return {key: value for key, value in layer.items() if key not in chosen}, chosen


def translate(tree: Tree, schema: type[Root], choices: Mapping[str, str], sft: bool) -> Translation:
    """The tree in the keys of the schema, with everything that has no effect taken out."""
    work = _Work(_without_targets(tree), schema, sft)
    for step in STEPS:
        step(work, choices)
    lists = (tuple(work.dropped), tuple(work.moved), tuple(work.problems), tuple(work.remarks))
    return Translation(work.tree, *lists)


class _Work:
    """A tree while it is translated."""

    def __init__(self, tree: Tree, schema: type[Root], sft: bool) -> None:
        self.tree, self.schema, self.sft = tree, schema, sft
        self.defaults = schema()
        self.known = set(schema.keys())
        self.dropped: list[Dropped] = []
        self.moved: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.remarks: list[str] = []

    def drop(self, key: str, why: str) -> None:
        """Take a key or section out. What asks for nothing is not reported."""
        value = at(self.tree, key)
        written = leaves(value, key + ".") if isinstance(value, dict) else ((key, value),)
        self.dropped += [Dropped(name, item, why) for name, item in written if not self._asks_nothing(name, item)]
        self.tree = without(self.tree, key)

    def is_default(self, key: str, value: Any) -> bool:
        if key not in self.known:
            return False
        default = look_up(self.defaults, key)
        return bool(value == (list(default) if isinstance(default, tuple) else default))

    def _asks_nothing(self, key: str, value: Any) -> bool:
        if key in self.known:
            nothing = value is None or (value == 0 and not isinstance(value, bool))
            return bool(nothing or self.is_default(key, value))
        return value is not True and value in (None, False, 1, "", -1, {}, [])


def _without_targets(tree: Any) -> Any:
    """The tree without `_target_: verl...`, by which Hydra finds the class of a section."""
    if not isinstance(tree, dict):
        return tree
    kept = {}
    for name, value in tree.items():
        if name == "_target_" and isinstance(value, str) and value.startswith(("verl.", "recipe.")):
            continue
        kept[name] = value if name in FREE and name != "reward_kwargs" else _without_targets(value)
    return kept


def _defaults(work: _Work, choices: Mapping[str, str]) -> None:
    """`defaults:` of a file of verl names verl's own files, whose place Rally's defaults take."""
    named = work.tree.get("defaults")
    if isinstance(named, list) and len(named) > 1 and not any(name in str(named) for name in BACKENDS):
        composed = any(isinstance(name, dict) and "actor@actor_rollout_ref.actor" in name for name in named)
        own = composed or all(isinstance(name, dict) or name in (*OWN_FILES, "_self_") for name in named)
        work.tree = without(work.tree, "defaults") if own else work.tree


def _backend(work: _Work, choices: Mapping[str, str]) -> None:
    """One sentence for a command line of Megatron or another engine, with the keys of FSDP that say the same."""
    written = dict(leaves(work.tree))
    found: dict[str, str] = {}
    for key, value in written.items():
        names = [part for part in key.split(".") if part in BACKENDS]
        chosen = [value] if key.endswith(("strategy", "model_engine")) and value in BACKENDS else []
        for name in (*names, *chosen):
            found[key] = name
    for key, value in choices.items():
        for name in BACKENDS:
            if name in value:
                found[key] = name
    listed = [str(name) for name in work.tree.get("defaults") or () if any(name_ in str(name) for name_ in BACKENDS)]
    if listed:
        found["defaults"] = next(name for name in BACKENDS if name in listed[0])
    if not found:
        return
    backend = next(iter(found.values()))
    optim = [key for key in written if _of_backend(key)]
    instead: dict[str, None] = {}
    for key in (*found, *optim):
        head, _, _ = key.partition(f".{backend}.")[0].partition(".engine.")
        section = head if head != key else key.partition(".optim.")[0]
        if (name := SAME_IN_FSDP.get(key.rpartition(".")[2])) is not None:
            instead[name.format(section if "." in section or section == "critic" else A)] = None
    same = ", ".join(instead) or f"{A}.strategy=fsdp2, {A}.fsdp_config.* and trainer.n_gpus_per_node"
    first = next(iter(found))
    key = f"{first}={shown(written[first])}" if first in written else f"{first}={choices.get(first, listed)}"
    name = BACKEND_NAMES.get(backend, backend)
    work.problems.append(
        f"{key} asks for {name}, but Rally shards with FSDP2; leave the keys of {name} out, set {A}.strategy=fsdp2, "
        f"and say the same with {same}."
    )
    for key in (*found, *optim):
        work.tree = without(work.tree, key)


def _of_backend(key: str) -> bool:
    """Whether a key beside those of a backend's own section belongs to it."""
    optim = f".{key}".partition(".optim.")[2].partition(".")[0]
    if optim in MEGATRON_OPTIM or optim.startswith("muon_") or key.startswith(f"{REF}.optim."):
        return True
    inside = any(f".{key}".startswith(f".{section}.engine.") for section in (A, REF, "critic"))
    return (
        inside
        or ".model.lora." in f".{key}"
        or ".mbridge_config" in key
        or not set(BACKEND_ONLY).isdisjoint(key.split("."))
    )


def _moved(work: _Work, choices: Mapping[str, str]) -> None:
    for old, new in SFT_MOVES if work.sft else MOVES:
        value = at(work.tree, old)
        if value is None:
            work.tree = without(work.tree, old) if old not in work.known else work.tree
            continue
        if old in work.known:
            continue
        written = leaves(value) if isinstance(value, dict) and value else (("", value),)
        work.tree = without(work.tree, old)
        for name, item in written:
            source, target = (f"{old}.{name}", f"{new}.{name}") if name else (old, new)
            there = at(work.tree, target)
            if there is not None and item is None:
                continue  # null is not set
            if there is not None and there != item:
                problem = f"{source}={shown(item)} and {target}={shown(there)} set the same thing to different values"
                work.problems.append(f"{problem}; keep one of them.")
                continue
            work.tree = put(work.tree, target, item)
            work.moved.append((source, target))


def _switches(work: _Work, choices: Mapping[str, str]) -> None:
    """Sections that are off are not validated. Some that are on are refused in one sentence."""
    refused = {(section, switch): text for section, switch, text in REFUSED}
    for section, switch, parts in OFF:
        if not isinstance(at(work.tree, section), dict):
            continue
        key = f"{section.rpartition('.')[0]}.{switch[3:]}" if switch.startswith("../") else f"{section}.{switch}"
        value = at(work.tree, key)
        if value not in SWITCHED_OFF:
            if (section, switch) not in refused:
                continue
            work.problems.append(f"{key}={shown(value)} {refused[section, switch]}.")
        named = [f"{section}.{part}" for part in parts] if parts else [section]
        explicit = at(work.tree, key, "???") != "???"
        if section in ASKED and not explicit:
            continue
        for name in named:
            if at(work.tree, name, "???") != "???":
                work.tree = without(work.tree, name) if explicit else work.tree
                if not explicit:
                    work.drop(name, f"{key} is not set")
        work.tree = without(work.tree, key) if value not in SWITCHED_OFF else work.tree
    mode = at(work.tree, "trainer.v1.trainer_mode")
    if mode == "separate_async":
        work.problems.append(f"trainer.v1.trainer_mode=separate_async {ASYNC}.")
        work.tree = without(work.tree, "trainer.v1.trainer_mode")
    if "async_training" in work.tree and mode in (None, "sync"):
        pairs = list(leaves(work.tree["async_training"], "async_training."))
        pairs = [(key, value) for key, value in pairs if key in work.known or key.endswith(SEPARATE_ONLY)]
        asked = [f"{key}={shown(value)} {ASYNC}." for key, value in pairs if not work.is_default(key, value)]
        work.problems += asked[:1]
        for key, _ in pairs:
            work.tree = without(work.tree, key)


def _estimator(work: _Work, choices: Mapping[str, str]) -> None:
    """Without a critic, the critic's section is off."""
    estimator = at(work.tree, "algorithm.adv_estimator", "grpo")
    if work.sft or estimator in ("gae", "turn_gae"):
        return
    why = f"{estimator} needs no critic"
    for key in ("algorithm.lam", "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"):
        if at(work.tree, key) is not None:
            work.drop(key, why)
    for name in list(at(work.tree, "critic") or ()) if isinstance(at(work.tree, "critic"), dict) else ():
        if name != "enable":
            work.drop(f"critic.{name}", why)


def _losses(work: _Work, choices: Mapping[str, str]) -> None:
    if work.sft:
        return
    mode, aggregation = at(work.tree, f"{A}.policy_loss.loss_mode"), f"{A}.loss_agg_mode"
    if mode in ("gspo", "geo_mean", "gmpo") and at(work.tree, aggregation, "token-mean") == "token-mean":
        if written := at(work.tree, aggregation):  # told although it is the default: another mean is taken
            work.dropped.append(Dropped(aggregation, written, f"{mode} always averages over sequences"))
        work.tree = put(work.tree, aggregation, "seq-mean-token-mean")
    if at(work.tree, f"{A}.use_kl_loss") is False:
        for name in ("kl_loss_coef", "kl_loss_type"):
            if at(work.tree, f"{A}.{name}") is not None:
                work.drop(f"{A}.{name}", f"{A}.use_kl_loss is false")
    if at(work.tree, "algorithm.use_kl_in_reward") is False:
        for name in ("algorithm.kl_penalty", "algorithm.kl_ctrl"):
            if at(work.tree, name) is not None:
                work.drop(name, "algorithm.use_kl_in_reward is false")


def _teachers(work: _Work, choices: Mapping[str, str]) -> None:
    """Keys of a teacher's servers and GPUs: teachers are loaded in process."""
    section = "distillation"
    why = "teachers are loaded in process"
    for name in ("n_gpus_per_node", "nnodes"):
        if at(work.tree, f"{section}.{name}") is not None:
            work.drop(f"{section}.{name}", why)
    for name in at(work.tree, f"{section}.teacher_models") or {}:
        teacher = f"{section}.teacher_models.{name}"
        for key in at(work.tree, f"{teacher}.inference") or {}:
            if key != "dtype":
                work.drop(f"{teacher}.inference.{key}", why)
        if at(work.tree, f"{teacher}.num_replicas") is not None:
            work.drop(f"{teacher}.num_replicas", why)
    loss = f"{section}.distillation_loss"
    mode = at(work.tree, f"{loss}.loss_mode", "k3")
    for name in ("topk", "log_prob_min_clamp"):
        if mode != "forward_kl_topk" and at(work.tree, f"{loss}.{name}") is not None:
            work.drop(f"{loss}.{name}", f"loss_mode={mode} does not use it")


def _reward_model(work: _Work, choices: Mapping[str, str]) -> None:
    """Keys of the kind of reward model that is not used."""
    section = "reward_model"
    if work.sft or at(work.tree, f"{section}.enable") is not True:
        return
    judged = any(at(work.tree, f"{name}custom_reward_function.path") for name in ("", "reward."))
    why = "a reward model beside a reward function is served to it"
    names: tuple[str, ...] = ("micro_batch_size", "micro_batch_size_per_gpu", "max_length", "model.fsdp_config")
    if not judged:
        names, why = ("rollout",), "a reward model without a reward function is a classifier, which runs in process"
    for name in names:
        if at(work.tree, f"{section}.{name}") is not None:
            work.drop(f"{section}.{name}", why)


GREEDY = (
    "do_sample=false validates greedily, once per prompt; verl does not read do_sample and validates with these "
    "values, for which do_sample=true stands here"
)


def _validation(work: _Work, choices: Mapping[str, str]) -> None:
    if work.sft:
        return
    settings = f"{R}.val_kwargs"
    if at(work.tree, f"{settings}.do_sample") is False:
        for name in ("temperature", "top_p", "top_k", "n"):
            if at(work.tree, f"{settings}.{name}") is not None:
                work.drop(f"{settings}.{name}", GREEDY)
    same = at(work.tree, f"{R}.n", 8)
    for key in (f"{A}.rollout_n", f"{REF}.rollout_n", "critic.rollout_n"):
        if at(work.tree, key) == same:
            work.tree = without(work.tree, key)


def _nulls(work: _Work, choices: Mapping[str, str]) -> None:
    """null is false for a switch that is off by default, and nothing for keys of verl that are null by default."""
    for key, value in list(leaves(work.tree)):
        if value is None and key in work.known and (key in NULLS or look_up(work.defaults, key) is False):
            work.tree = without(work.tree, key)


def _engine(work: _Work, choices: Mapping[str, str]) -> None:
    """The embedded engine takes the place of an engine that is not built. Keys of another engine are dropped."""
    if work.sft:
        return
    name, why = str(at(work.tree, f"{R}.name", "embedded")), "it belongs to another engine"
    if name in ("hf", "trtllm"):
        work.drop(f"{R}.name", "there is no such engine here; the embedded engine samples from the same policy")
        for key in ("engine_kwargs", "checkpoint_engine", "server", "data_parallel_size", "tensor_model_parallel_size"):
            if at(work.tree, f"{R}.{key}") is not None:
                work.drop(f"{R}.{key}", why)
        return
    kwargs = at(work.tree, f"{R}.engine_kwargs")
    for engine in list(kwargs) if isinstance(kwargs, dict) else ():
        if engine in ("vllm", "sglang", "trtllm") and engine != name.removesuffix("_async"):
            work.drop(f"{R}.engine_kwargs.{engine}", why)


def _adapters(work: _Work, choices: Mapping[str, str]) -> None:
    for model in ("model",) if work.sft else (M, "critic.model"):
        if at(work.tree, f"{model}.lora_rank") == 0 and at(work.tree, f"{model}.lora_adapter_path") is None:
            for name in ("lora_alpha", "target_modules", "exclude_modules", "target_parameters"):
                if at(work.tree, f"{model}.{name}") is not None:
                    work.drop(f"{model}.{name}", f"{model}.lora_rank is 0")


def _checkpoints(work: _Work, choices: Mapping[str, str]) -> None:
    """A checkpoint holds more than `save_contents` may ask for, and is loaded as it was saved."""
    for section in ("trainer.checkpoint",) if work.sft else (f"{A}.checkpoint", "critic.checkpoint"):
        saved, loaded = (at(work.tree, f"{section}.{name}_contents") for name in ("save", "load"))
        if isinstance(saved, list) and saved and set(saved) <= {"model", "optimizer", "extra", "hf_model"}:
            for name in ("save", "load") if loaded == saved else ("save",):
                if not set(saved) >= {"model", "optimizer", "extra"}:
                    work.drop(f"{section}.{name}_contents", "a checkpoint always holds all that resuming needs")
    path = at(work.tree, "trainer.resume_from_path")
    if path in (False, ""):
        work.tree = without(work.tree, "trainer.resume_from_path")
    elif (
        isinstance(path, str) and at(work.tree, "trainer.resume_mode", "auto") == "auto" and missing_file(expand(path))
    ):
        why = "there is no such folder; resume_mode=auto resumes from the run folder"
        work.drop("trainer.resume_from_path", why)


def _micro_batches(work: _Work, choices: Mapping[str, str]) -> None:
    """A full file of verl sets both limits of a forward pass to none; the token budget then stays."""
    for switch, size in (
        (f"{A}.use_dynamic_bsz", f"{A}.ppo_micro_batch_size_per_gpu"),
        (f"{R}.log_prob_use_dynamic_bsz", f"{R}.log_prob_micro_batch_size_per_gpu"),
        (f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu"),
        ("critic.use_dynamic_bsz", "critic.ppo_micro_batch_size_per_gpu"),
    ):
        both_off = at(work.tree, switch) is False and at(work.tree, size, "") is None
        if both_off and at(work.tree, size.removesuffix("_per_gpu")) is None:
            work.drop(switch, f"{size} is null, so the token budget limits a forward pass")


OLD_TESTS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _correction(work: _Work, choices: Mapping[str, str]) -> None:
    """Earlier names of rejection tests, and their lower bound, in the names of today."""
    section = "algorithm.rollout_correction"
    test, high, low = (at(work.tree, f"{section}.rollout_rs{end}") for end in ("", "_threshold", "_threshold_lower"))
    if test in OLD_TESTS:
        work.tree = put(work.tree, f"{section}.rollout_rs", OLD_TESTS[test])
        work.moved.append((f"{section}.rollout_rs={test}", f"{section}.rollout_rs={OLD_TESTS[test]}"))
    if low is not None and high is not None:
        work.tree = put(
            without(work.tree, f"{section}.rollout_rs_threshold_lower"),
            f"{section}.rollout_rs_threshold",
            f"{low}_{high}",
        )
        work.moved.append((f"{section}.rollout_rs_threshold_lower", f"{section}.rollout_rs_threshold={low}_{high}"))
    if (veto := at(work.tree, f"{section}.rollout_token_veto_threshold")) is not None:
        tests = [at(work.tree, f"{section}.rollout_rs"), "seq_min_k1"]
        bounds = [at(work.tree, f"{section}.rollout_rs_threshold"), f"{veto}_inf"]
        work.tree = without(work.tree, f"{section}.rollout_token_veto_threshold")
        work.tree = put(work.tree, f"{section}.rollout_rs", ",".join(text for text in tests if text))
        work.tree = put(work.tree, f"{section}.rollout_rs_threshold", ",".join(str(b) for b in bounds if b is not None))
        work.moved.append((f"{section}.rollout_token_veto_threshold", f"{section}.rollout_rs=seq_min_k1"))
    bypass, loss = at(work.tree, f"{section}.bypass_mode"), at(work.tree, f"{section}.loss_type", "ppo_clip")
    if bypass is True and loss == "ppo_clip":
        for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"):
            if at(work.tree, f"{section}.{name}") is not None:
                work.drop(f"{section}.{name}", "with bypass_mode the clipped ratio is the correction")


def _frequencies(work: _Work, choices: Mapping[str, str]) -> None:
    """false and 0 switch validation and checkpoints between steps off, as -1 does."""
    for key in ("trainer.test_freq", "trainer.save_freq"):
        if at(work.tree, key) in (False, 0):
            work.tree = put(work.tree, key, -1)


def _switched_parts(work: _Work, choices: Mapping[str, str]) -> None:
    """Sections that are switched off in a place of their own are not validated."""
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if not work.sft and at(work.tree, f"{overlong}.enable") is False:
        work.tree = put(work.tree, overlong, {"enable": False})
    if work.sft and at(work.tree, "data.multiturn.enable") is False and at(work.tree, "data.prompt_key") is not None:
        for key in ("data.multiturn", "data.messages_key"):
            if at(work.tree, key) is not None:
                work.drop(key, "data.multiturn.enable is false, so rows are of data.prompt_key and data.response_key")


def _groups(work: _Work, choices: Mapping[str, str]) -> None:
    started, trained = (at(work.tree, f"data.{name}_batch_size") for name in ("gen", "train"))
    if started is not None and started == trained and at(work.tree, "algorithm.filter_groups.enable") is not True:
        work.drop("data.gen_batch_size", "it equals data.train_batch_size")
    estimator = at(work.tree, "algorithm.adv_estimator", "grpo")
    if not work.sft and at(work.tree, f"{R}.n") == 1 and estimator in ("grpo", "grpo_vectorized"):
        work.remarks.append(f"{R}.n=1 leaves {estimator} no group: the advantage of an episode is its reward.")


def _loggers(work: _Work, choices: Mapping[str, str]) -> None:
    from rally.config.checks.unsupported import LOGGERS

    key = "trainer.logger"
    written = at(work.tree, key)
    named = written if isinstance(written, list) else [written]
    unbuilt = [name for name in named if name in ("swanlab", "vemlp_wandb", "clearml", "trackio", "rl_insight")]
    if unbuilt:
        why = "this tracker is not built; metrics go to metrics.jsonl in the run folder"
        work.dropped += [Dropped(key, name, why) for name in unbuilt]
        work.tree = put(work.tree, key, [name for name in named if name in LOGGERS] or ["console", "file"])


def _ray(work: _Work, choices: Mapping[str, str]) -> None:
    """What Ray would give its workers is given to the run itself."""
    section = "ray_kwargs.ray_init.runtime_env"
    for key, value in list(leaves(at(work.tree, section) or {}, f"{section}.")):
        name = key.removeprefix(f"{section}.").removeprefix("env_vars.")
        if value is None or hint_for(key, HINTS) is not None:
            continue
        if ".env_vars." in key:
            work.problems.append(
                f"{key}={shown(value)} sets a variable of Ray's workers, and Rally does not run on Ray; leave it out "
                f"and set {name} in the environment of the run."
            )
            work.tree = without(work.tree, key)
        elif name in ("working_dir", "py_modules"):
            work.problems.append(
                f"{key}={shown(value)} says where Ray's workers find files, and Rally does not run on Ray; leave it "
                "out and start the run in that folder."
            )
            work.tree = without(work.tree, key)


def _hints(work: _Work, choices: Mapping[str, str]) -> None:
    for key, value in list(leaves(work.tree)):
        hint = hint_for(key, SFT_HINTS if work.sft else HINTS)
        if hint is None or (hint.values and value not in hint.values):
            continue
        if key in work.known and value == look_up(work.defaults, key):
            continue
        if key in work.known and not hint.values and not _fits(work, key, value):
            continue
        work.drop(key, hint.why)


def hint_for(key: str, hints: Sequence[Hint]) -> Hint | None:
    """The hint that a key is, or a section that it is part of."""
    for hint in hints:
        if fnmatchcase(key, hint.pattern) or fnmatchcase(key, f"{hint.pattern}.*"):
            return hint
    return None


def _fits(work: _Work, key: str, value: Any) -> bool:
    """Whether the value has the type of its key. One of a wrong type is reported and not dropped."""
    try:
        work.schema.model_validate(put({}, key, value))
    except ValidationError as error:
        return all(detail["type"] == "only" for detail in error.errors())
    return True


STEPS: tuple[Callable[[_Work, Mapping[str, str]], None], ...] = (
    *(_defaults, _backend, _switches, _moved, _switches, _estimator, _losses, _teachers, _reward_model, _validation),
    *(_micro_batches, _nulls, _engine, _adapters, _checkpoints, _correction, _groups, _frequencies, _switched_parts),
    *(_loggers, _ray, _hints),
)
