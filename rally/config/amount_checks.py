"""What says how much a forward pass holds, and where rows come from, is whole: one sentence per contradiction."""

from __future__ import annotations

from collections.abc import Iterator

from rally.config.base import look_up
from rally.config.schema import ROLLOUT, Config
from rally.config.sft import SftConfig

ACTOR = "actor_rollout_ref.actor"


def by_count(config: Config) -> Iterator[str]:
    """Without a token budget a count must say how much a forward pass holds."""
    ref, per_gpu = "actor_rollout_ref.ref", "micro_batch_size_per_gpu"
    for key, count in (
        (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_{per_gpu}"),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_{per_gpu}"),
        (f"{ref}.log_prob_use_dynamic_bsz", f"{ref}.log_prob_{per_gpu}"),
        ("critic.use_dynamic_bsz", f"critic.ppo_{per_gpu}"),
    ):
        if look_up(config, key) is False and look_up(config, count) is None:
            yield f"{key}=false takes the token budget away; say in {count} how many episodes a pass may hold."


def sft_by_count(config: SftConfig) -> Iterator[str]:
    if not config.data.use_dynamic_bsz and config.data.micro_batch_size_per_gpu is None:
        told = "data.use_dynamic_bsz=false takes the token budget away"
        yield f"{told}; say in data.micro_batch_size_per_gpu how many conversations a pass may hold."


def custom_rows(config: Config) -> Iterator[str]:
    chosen = config.data.custom_cls
    if (chosen.path is None) != (chosen.name is None):
        yield "data.custom_cls.path and data.custom_cls.name together name a class; set both."
