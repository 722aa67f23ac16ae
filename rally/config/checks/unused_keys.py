"""Reports keys that have no effect with the other settings of a configuration.

Users reuse verl command lines that spell out defaults. So a value is reported only if it differs from Rally's default
and from verl's, and does not mean "none".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rally.config.base import look_up
from rally.config.errors import shown
from rally.config.model import ModelConfig
from rally.config.schema import Config
from rally.config.sft import SftConfig, SftModel

A = "actor_rollout_ref.actor"


class UnusedKey(NamedTuple):
    """A key without effect, the reason, and the values besides its default that are not reported."""

    key: str
    why: str
    allowed: tuple[Any, ...] = ()


def unused_keys(config: Config) -> Iterator[str]:
    optimizers = [f"{A}.optim", *(["critic.optim"] if config.needs_critic else [])]
    schedules = (idle for section in optimizers for idle in _schedule(config, section, "lr_scheduler_type"))
    model = [*_checkpointing(config.model, "actor_rollout_ref.model")]
    if config.needs_critic:
        model += _checkpointing(config.critic.model, "critic.model")
    yield from _reports(config, (*model, *_loss(config), *_reward(config), *schedules))
    yield from _loaded(config, f"{A}.checkpoint")
    if config.needs_critic and "hf_model" in config.critic.checkpoint.save_contents:
        yield "critic.checkpoint.save_contents=hf_model has no effect: a critic is not a language model; leave it out."


def sft_unused_keys(config: SftConfig) -> Iterator[str]:
    yield from _reports(config, _checkpointing(config.model, "model"))
    yield from _reports(config, _schedule(config, "optim", "lr_scheduler"))
    yield from _loaded(config, "trainer.checkpoint")


def _checkpointing(model: ModelConfig | SftModel, section: str) -> Iterator[UnusedKey]:
    if not model.enable_gradient_checkpointing:
        why = f"with {section}.enable_gradient_checkpointing=false; leave it out"
        yield UnusedKey(f"{section}.recompute_num_layers", why)


def _loss(config: Config) -> Iterator[UnusedKey]:
    if not config.rollout.skip_rollout:
        key = "actor_rollout_ref.rollout.skip_rollout"
        why = f"without {key}=true; set that, or leave it out"
        yield UnusedKey("actor_rollout_ref.rollout.skip_dump_dir", why, ("/tmp/rollout_dump",))
    if not config.actor.use_kl_loss:
        why = f"without {A}.use_kl_loss=true; set that, or leave it out"
        yield from (UnusedKey(f"{A}.kl_loss_coef", why, (0.0,)), UnusedKey(f"{A}.kl_loss_type", why))
    if not config.actor.shuffle:
        yield UnusedKey(f"{A}.data_loader_seed", f"without {A}.shuffle=true; set that, or leave it out", (42,))


def _reward(config: Config) -> Iterator[UnusedKey]:
    if config.reward_manager_name != "rate_limited":
        why = "without reward_model.reward_manager=rate_limited; set that, or leave it out"
        for name in ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout"):
            yield UnusedKey(f"reward_model.{name}", why)
    else:
        for key, ruling in (("reward.num_workers", "max_concurrent"), ("reward.timeout", "timeout")):
            yield UnusedKey(key, f"with reward_manager=rate_limited; leave it out and set reward_model.{ruling}")
    section = "reward_model.reward_kwargs"
    buffer = config.reward_model.reward_kwargs.overlong_buffer_cfg
    if not buffer.enable and "enable" not in buffer.model_fields_set:  # not with an explicit enable=false
        why = f"without {section}.overlong_buffer_cfg.enable=true; set that, or leave it out"
        for name in ("max_resp_len", *(f"overlong_buffer_cfg.{part}" for part in ("len", "penalty_factor", "log"))):
            yield UnusedKey(f"{section}.{name}", why)


def _schedule(config: Config | SftConfig, section: str, name: str) -> Iterator[UnusedKey]:
    optim = look_up(config, section)
    why = f"with {section}.{name}={optim.lr_scheduler_type}; leave it out, or set {name}=cosine"
    if optim.lr_scheduler_type == "constant":
        yield UnusedKey(f"{section}.min_lr_ratio", why)
    if optim.lr_scheduler_type != "cosine":
        yield UnusedKey(f"{section}.num_cycles", why)


def _reports(config: Config | SftConfig, keys: Iterable[UnusedKey]) -> Iterator[str]:
    defaults = type(config)()
    for key, why, allowed in keys:
        value = look_up(config, key)
        if value != look_up(defaults, key) and value not in allowed:
            yield f"{key}={shown(value)} has no effect {why}."


def _loaded(config: Config | SftConfig, section: str) -> Iterator[str]:
    """load_contents=hf_model. It passes where it equals save_contents, because that is verl's default."""
    loaded, saved = (look_up(config, f"{section}.{name}_contents") for name in ("load", "save"))
    if "hf_model" in loaded and loaded != saved:
        yield f"{section}.load_contents=hf_model has no effect: resuming reads the other parts only; leave it out."
