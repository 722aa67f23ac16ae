"""What is typed but not built yet is refused by name: each rule is one line, and lifting it is deleting the line.

A rule names a key or a whole section. Its defaults mean "not used"; any other value is refused, except those in
`works`; of a list, each item is held against `works`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rally.config.base import Root, Section, look_up
from rally.config.errors import shown


class Unbuilt(NamedTuple):
    key: str
    instead: str
    works: tuple[Any, ...] = ()


A, M, R = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
ONE_DEVICE = "leave it out to train on one device"
EMBEDDED = "leave it out to use the embedded engine"
SERVERS = "leave it out, it is for engines other than the embedded one"
NO_VIDEOS = "leave it out, rows hold text and images"
OUT = "leave it out"
RULE_REWARDS = "leave it out and score with custom_reward_function"
MANAGED, MANAGERS = "use naive, dapo or batch", ("dapo", "batch", "prime", "rate_limited", "remote")
LOGGERS = ("console", "file", "tensorboard", "mlflow", "wandb")
LOGGER = "use console, file, tensorboard, mlflow or wandb"
ESTIMATORS = (
    *("grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gigpo", "gae", "turn_gae"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gdpo"),
)
CRITIC_MODEL = (
    *("hf_config_path", "external_lib", "enable_activation_offload", "use_liger", "tiled_mlp"),
    *("fused_kernel_options", "mtp", "lora_rank", "lora_alpha", "lora_adapter_path"),
    *("target_modules", "exclude_modules"),
)
LOSS_MODES = ("gspo", "geo_mean", "gmpo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov")
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "k3", "low_var_kl", "k1+", "k2+", "k3+", "low_var_kl+")
STAYS = "leave it out, the model stays on the device"


def memory(section: str, model: str = M, **more: str) -> Iterator[Unbuilt]:
    """What an fsdp_config cannot say yet of how a model lies in memory."""
    told = {
        "offload_policy": ONE_DEVICE,
        "model_dtype": f"leave it out and set {model}dtype, beside which the optimizer keeps float32",
        "dtype": f"leave it out and set {model}dtype",
        "seed": "leave it out and set trainer.seed",
        "full_determinism": OUT if model != M else f"leave it out and set {R}deterministic=true",
        "forward_only": OUT,
    }
    return (Unbuilt(f"{section}.{name}", instead) for name, instead in {**told, **more}.items())


UNBUILT: tuple[Unbuilt, ...] = (
    # engines
    Unbuilt(f"{R}name", EMBEDDED, ("rally", "sglang", "sglang_async", "vllm", "vllm_async")),
    Unbuilt(f"{R}mode", "leave it out, every engine is asynchronous", ("standalone", "server")),
    Unbuilt(f"{R}engine_kwargs.trtllm", SERVERS),
    Unbuilt(f"{R}checkpoint_engine.backend", "leave it out, or use files, or ipc on one GPU", ("files", "ipc")),
    Unbuilt(f"{R}checkpoint_engine.engine_kwargs", SERVERS),
    Unbuilt(f"{R}checkpoint_engine.custom_backend_module", SERVERS),
    Unbuilt(f"{R}sglang_engine_mode", SERVERS),
    Unbuilt(f"{R}multi_stage_wake_up", SERVERS),
    Unbuilt(f"{R}router_config_path", SERVERS),
    Unbuilt(f"{R}disaggregation", SERVERS),
    Unbuilt(f"{R}prometheus", SERVERS),
    Unbuilt(f"{R}disable_log_stats", SERVERS),
    Unbuilt(f"{R}nnodes", SERVERS),
    Unbuilt(f"{R}n_gpus_per_node", SERVERS),
    Unbuilt(f"{R}agent.agent_loop_manager_class", SERVERS),
    Unbuilt(f"{R}agent.custom_async_server", SERVERS),
    Unbuilt(f"{R}expert_parallel_size", "leave it out, the engine runs on one device"),
    Unbuilt(f"{R}pipeline_model_parallel_size", "leave it out, the engine runs on one device"),
    Unbuilt(f"{R}limit_images", "leave it out, the token budgets bound images too"),
    # sampling
    Unbuilt(f"{R}repetition_penalty", "leave it out, what is sampled must be the policy that is trained"),
    Unbuilt(f"{R}over_sample_rate", f"leave it out, or bound stragglers with {R}step_timeout"),
    Unbuilt(f"{R}cudagraph_capture_sizes", "leave it out, the engine captures what it meets"),
    Unbuilt(f"{R}quantization", OUT),
    Unbuilt(f"{R}quantization_config_file", OUT),
    Unbuilt(f"{R}qat", OUT),
    Unbuilt(f"{R}custom", f"leave it out and write keys of your own under {R}agent_loop_config"),
    Unbuilt(f"{R}mtp", OUT),
    Unbuilt(f"{R}full_determinism", f"leave it out and set {R}deterministic=true"),
    Unbuilt(f"{R}enable_rollout_routing_replay", OUT),
    Unbuilt(f"{R}moe_load_balance_metrics_interval", OUT),
    Unbuilt(f"{R}trace.backend", "use mlflow or otel", ("mlflow", "otel")),
    Unbuilt(f"{R}profiler", OUT),
    Unbuilt(f"{R}multi_turn.num_repeat_rollouts", f"leave it out and set {R}n"),
    # advantages and losses
    Unbuilt("algorithm.adv_estimator", "leave it out to use grpo", ESTIMATORS),
    Unbuilt("algorithm.kl_penalty", "use kl", KL_KINDS),
    Unbuilt("algorithm.use_pf_ppo", OUT),
    Unbuilt("algorithm.pf_ppo", OUT),
    Unbuilt("algorithm.rollout_correction.loss_type", f"leave it out, or set {A}policy_loss.loss_mode=gpg"),
    Unbuilt("algorithm.filter_groups.max_inflight_gen_batches", "leave it out, prompts begin one by one"),
    Unbuilt("critic.strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    Unbuilt("critic.optim.override_optimizer_config", OUT),
    Unbuilt("critic.checkpoint.async_save", OUT),
    Unbuilt(f"{A}policy_loss.loss_mode", "leave it out to use the vanilla loss", LOSS_MODES),
    Unbuilt(f"{A}policy_loss.dro_beta", OUT),
    Unbuilt(f"{A}kl_loss_type", "use low_var_kl", KL_KINDS),
    Unbuilt(f"{A}calculate_sum_pi_squared", OUT),
    Unbuilt(f"{A}sum_pi_squared_checkpointing", OUT),
    Unbuilt(f"{A}use_prefix_grouper", OUT),
    Unbuilt(f"{A}router_replay", OUT),
    # where and how the model is trained
    *memory(f"{A}fsdp_config", param_offload="leave it out, the policy stays on the device"),
    *memory("critic.fsdp_config", param_offload="leave it out, the critic stays on the device"),
    *memory("actor_rollout_ref.ref.fsdp_config", optimizer_offload="leave it out, the reference has no optimizer"),
    Unbuilt(f"{A}strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    Unbuilt(f"{A}ulysses_sequence_parallel_size", ONE_DEVICE),
    Unbuilt(f"{A}use_torch_compile", OUT),
    Unbuilt(f"{A}optim.override_optimizer_config", OUT),
    Unbuilt("actor_rollout_ref.ref.strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    Unbuilt("actor_rollout_ref.ref.ulysses_sequence_parallel_size", ONE_DEVICE),
    Unbuilt("actor_rollout_ref.ref.use_torch_compile", OUT),
    Unbuilt(f"{M}hf_config_path", f"leave it out and use {M}override_config"),
    Unbuilt(f"{M}external_lib", OUT),
    Unbuilt(f"{M}enable_activation_offload", OUT),
    Unbuilt(f"{M}use_liger", OUT),
    Unbuilt(f"{M}fused_kernel_options", OUT),
    Unbuilt(f"{M}tiled_mlp", OUT),
    Unbuilt(f"{M}mtp", OUT),
    *(Unbuilt(f"critic.model.{name}", OUT) for name in CRITIC_MODEL),
    Unbuilt("trainer.nnodes", "set it to 1 to train on this machine"),
    Unbuilt("trainer.logger", LOGGER, LOGGERS),
    Unbuilt("trainer.default_hdfs_dir", "leave it out and set trainer.default_local_dir"),
    Unbuilt("trainer.esi_redundant_time", OUT),
    Unbuilt("trainer.del_local_ckpt_after_load", OUT),
    Unbuilt("trainer.ray_wait_register_center_timeout", OUT),
    Unbuilt("ray_kwargs", "leave it out, everything runs in one process"),
    Unbuilt("transfer_queue", "leave it out, everything runs in one process"),
    Unbuilt("global_profiler", OUT),
    # rewards
    Unbuilt("reward_manager.source", RULE_REWARDS),
    Unbuilt("reward_manager.name", MANAGED, MANAGERS),
    Unbuilt("reward_manager.module", RULE_REWARDS),
    Unbuilt("reward.reward_manager.source", RULE_REWARDS),
    Unbuilt("reward.reward_manager.name", MANAGED, MANAGERS),
    Unbuilt("reward.reward_manager.module", RULE_REWARDS),
    Unbuilt("reward.reward_model", RULE_REWARDS),
    Unbuilt("reward.sandbox_fusion", RULE_REWARDS),
    Unbuilt("reward_model.reward_manager", MANAGED, MANAGERS),
    Unbuilt("reward_model.enable", RULE_REWARDS),
    Unbuilt("reward_model.enable_resource_pool", RULE_REWARDS),
    Unbuilt("reward_model.n_gpus_per_node", RULE_REWARDS),
    Unbuilt("reward_model.nnodes", RULE_REWARDS),
    Unbuilt("reward_model.model", RULE_REWARDS),
    Unbuilt("reward_model.rollout", RULE_REWARDS),
    Unbuilt("reward_model.sandbox_fusion", RULE_REWARDS),
    Unbuilt("reward_model.reward_loop_source", RULE_REWARDS),
    Unbuilt("reward_model.reward_loop_module_path", RULE_REWARDS),
    Unbuilt("reward_model.reward_loop_class_name", RULE_REWARDS),
    # data
    Unbuilt("data.datagen", "leave it out, rows come from files"),
    Unbuilt("data.chat_template_func", f"leave it out and set {M}custom_chat_template"),
    Unbuilt("data.cache_dir", "leave it out, files are read where they lie"),
    Unbuilt("data.video_key", NO_VIDEOS),
    Unbuilt("data.audio_key", NO_VIDEOS),
    Unbuilt("data.image_patch_size", "leave it out, the model's image processor says it"),
)

SFT_UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("data.ignore_input_ids_mismatch", "leave it out, conversations are encoded as they would be sampled"),
    Unbuilt("data.chat_template", "leave it out and set model.custom_chat_template"),
    Unbuilt("data.custom_cls", "leave it out and write rows with a script"),
    Unbuilt("data.video_key", NO_VIDEOS),
    Unbuilt("model.strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    *memory("model.fsdp_config", "model.", **dict.fromkeys(("param_offload", "cpu_offload", "offload_params"), STAYS)),
    Unbuilt("model.external_lib", OUT),
    Unbuilt("model.use_liger", OUT),
    Unbuilt("trainer.nnodes", "set it to 1 to train on this machine"),
    Unbuilt("trainer.logger", LOGGER, LOGGERS),
    Unbuilt("trainer.default_hdfs_dir", "leave it out and set trainer.default_local_dir"),
    Unbuilt("ulysses_sequence_parallel_size", ONE_DEVICE),
)


def refusals(config: Root, rules: Sequence[Unbuilt]) -> Iterator[str]:
    """One sentence for each value that asks for something not built yet."""
    defaults = type(config)()
    for rule in rules:
        now, neutral = dict(_leaves(config, rule.key)), dict(_leaves(defaults, rule.key))
        for key, value in now.items():
            if value == neutral[key]:
                continue
            asked = value if isinstance(value, tuple) and rule.works else (value,)
            for item in asked:
                if item not in rule.works:
                    yield f"{key}={shown(item)} is not built yet; {rule.instead}."


def _leaves(config: Root, key: str) -> Iterator[tuple[str, Any]]:
    value = look_up(config, key)
    if isinstance(value, Section):
        yield from value.leaves(key + ".")
    else:
        yield key, value
