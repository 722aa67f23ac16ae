"""Keys that the schema accepts but Rally does not support yet, and the errors for them.

A rule names a key or a whole section, one rule per line. Any value but the default is an error, except those in
`supported`; the items of a list are compared with `supported` one by one. To support a key, delete its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rally.config.base import Root, Section, look_up
from rally.config.errors import shown
from rally.config.rollout import BROADCAST


class Unsupported(NamedTuple):
    """A key or section, what to do instead, and the values that are supported besides the default."""

    key: str
    advice: str
    supported: tuple[Any, ...] = ()


A, M, R = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
ONE_DEVICE = "leave it out to train on one device"
EMBEDDED = "leave it out to use the embedded engine"
SERVERS = "leave it out: no engine of Rally uses it"
NO_VIDEOS = "leave it out, rows hold text and images"
OUT = "leave it out"
RULE_REWARDS = "leave it out and score with custom_reward_function"
LOGGERS = ("console", "file", "tensorboard", "mlflow", "wandb")
LOGGER = "use console, file, tensorboard, mlflow or wandb"
CRITIC_MODEL = (
    *("hf_config_path", "mtp", "lora_rank", "lora_alpha", "lora_adapter_path"),
    *("target_modules", "exclude_modules", "target_parameters"),
)
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "k3", "low_var_kl", "k1+", "k2+", "k3+", "low_var_kl+")


def memory(section: str, model: str = M, **more: str | None) -> Iterator[Unsupported]:
    """Rules for the keys of an `fsdp_config`."""
    rules = {
        "model_dtype": f"leave it out and set {model}dtype; the optimizer keeps float32 weights",
        "dtype": f"leave it out and set {model}dtype",
        "seed": "leave it out and set trainer.seed",
        "full_determinism": OUT if model != M else f"leave it out and set {R}deterministic=true",
        "forward_only": OUT,
    }
    return (Unsupported(f"{section}.{name}", advice) for name, advice in {**rules, **more}.items() if advice)


UNSUPPORTED: tuple[Unsupported, ...] = (
    # engines
    Unsupported(f"{R}name", EMBEDDED, ("rally", "sglang", "sglang_async", "vllm", "vllm_async")),
    Unsupported(f"{R}mode", "leave it out, every engine is asynchronous", ("standalone", "server")),
    Unsupported(f"{R}engine_kwargs.trtllm", SERVERS),
    Unsupported(
        f"{R}checkpoint_engine.backend",
        "leave it out, or use files, delta, nccl, or ipc on one GPU",
        ("files", "ipc", "delta", "delta_sharded", BROADCAST),
    ),
    Unsupported(f"{R}checkpoint_engine.custom_backend_module", SERVERS),
    Unsupported(f"{R}disaggregation", SERVERS),
    Unsupported(f"{R}agent.agent_loop_manager_class", SERVERS),
    Unsupported(f"{R}agent.custom_async_server", SERVERS),
    Unsupported(f"{R}limit_images", "leave it out: the token budgets also limit images"),
    # sampling
    Unsupported(f"{R}repetition_penalty", "leave it out: the sampled distribution must be that of the trained policy"),
    Unsupported(f"{R}quantization", "use fp8", ("fp8",)),
    Unsupported(f"{R}quantization_config_file", OUT),
    Unsupported(f"{R}qat", OUT),
    Unsupported(f"{R}custom", f"leave it out and write keys of your own under {R}agent_loop_config"),
    Unsupported(f"{R}mtp", OUT),
    Unsupported(f"{R}full_determinism", f"leave it out and set {R}deterministic=true"),
    Unsupported(f"{R}trace.backend", "use mlflow or otel", ("mlflow", "otel")),
    # advantages and losses
    Unsupported("algorithm.kl_penalty", "use kl", KL_KINDS),
    Unsupported("algorithm.filter_groups.max_inflight_gen_batches", "leave it out: prompts start one by one"),
    Unsupported("critic.strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    Unsupported("critic.optim.override_optimizer_config", OUT),
    Unsupported(f"{A}kl_loss_type", "use low_var_kl", KL_KINDS),
    Unsupported(f"{A}router_replay.record_file", OUT),
    Unsupported(f"{A}router_replay.replay_file", OUT),
    # where and how the model is trained
    *memory(f"{A}fsdp_config"),
    *memory("critic.fsdp_config"),
    *memory("actor_rollout_ref.ref.fsdp_config", forward_only=None),
    Unsupported(f"{A}strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    Unsupported(f"{A}optim.override_optimizer_config", OUT),
    Unsupported("actor_rollout_ref.ref.strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    Unsupported(f"{M}hf_config_path", f"leave it out and use {M}override_config"),
    Unsupported(f"{M}mtp", OUT),
    *(Unsupported(f"critic.model.{name}", OUT) for name in CRITIC_MODEL),
    Unsupported("trainer.logger", LOGGER, LOGGERS),
    Unsupported("trainer.default_hdfs_dir", "leave it out and set trainer.default_local_dir"),
    # rewards
    Unsupported("reward_manager.source", RULE_REWARDS),
    Unsupported("reward_manager.module", RULE_REWARDS),
    Unsupported("reward.reward_manager.source", RULE_REWARDS),
    Unsupported("reward.reward_manager.module", RULE_REWARDS),
    Unsupported("reward.sandbox_fusion", RULE_REWARDS),
    Unsupported("reward_model.sandbox_fusion", RULE_REWARDS),
    Unsupported("reward_model.reward_loop_source", RULE_REWARDS),
    Unsupported("reward_model.reward_loop_module_path", RULE_REWARDS),
    Unsupported("reward_model.reward_loop_class_name", RULE_REWARDS),
    # data
    Unsupported("data.datagen", "leave it out, rows come from files"),
    Unsupported("data.chat_template_func", f"leave it out and set {M}custom_chat_template"),
    Unsupported("data.video_key", NO_VIDEOS),
    Unsupported("data.audio_key", NO_VIDEOS),
)

SFT_UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported("data.chat_template", "leave it out and set model.custom_chat_template"),
    Unsupported("data.custom_cls", "leave it out and write rows with a script"),
    Unsupported("data.video_key", NO_VIDEOS),
    Unsupported("model.strategy", ONE_DEVICE, ("fsdp", "fsdp2")),
    *memory("model.fsdp_config", "model."),
    Unsupported("trainer.logger", LOGGER, LOGGERS),
    Unsupported("trainer.default_hdfs_dir", "leave it out and set trainer.default_local_dir"),
)


def unsupported_values(config: Root, rules: Sequence[Unsupported]) -> Iterator[str]:
    """One sentence for each value that is not supported yet."""
    defaults = type(config)()
    for rule in rules:
        current, default = dict(_leaves(config, rule.key)), dict(_leaves(defaults, rule.key))
        for key, value in current.items():
            if value == default[key]:
                continue
            items = value if isinstance(value, tuple) and rule.supported else (value,)
            for item in items:
                if item not in rule.supported:
                    yield f"{key}={shown(item)} is not built yet; {rule.advice}."


def _leaves(config: Root, key: str) -> Iterator[tuple[str, Any]]:
    value = look_up(config, key)
    if isinstance(value, Section):
        yield from value.leaves(key + ".")
    else:
        yield key, value
