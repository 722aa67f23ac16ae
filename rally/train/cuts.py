"""How much a forward pass holds: tokens and episodes, from whichever keys of the configuration say so."""

from __future__ import annotations

import sys
from typing import NamedTuple

from rally.config import Config
from rally.config.actor import LogProbKeys

UNBOUND = sys.maxsize


class Cut(NamedTuple):
    """At most so many tokens and, unless None, so many rows."""

    max_tokens: int
    max_rows: int | None = None

    def within(self, other: Cut) -> Cut:
        """What keeps to both."""
        rows = [count for count in (self.max_rows, other.max_rows) if count is not None]
        return Cut(min(self.max_tokens, other.max_tokens), min(rows, default=None))


def cut_of(budget: int, rows: int | None, by_tokens: bool) -> Cut:
    return Cut(budget if by_tokens else UNBOUND, rows)


def update_cut(config: Config) -> Cut:
    """Of a pass with a gradient; the reference, where the loss asks it, sees the same micro-batches."""
    actor = config.actor
    own = cut_of(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz)
    return own.within(log_prob_cut(config, config.actor_rollout_ref.ref)) if actor.use_kl_loss else own


def log_prob_cut(config: Config, keys: LogProbKeys) -> Cut:
    """Of a pass that only asks for log-probabilities; what `keys` do not say is the actor's."""
    actor = config.actor
    dynamic = actor.use_dynamic_bsz if keys.log_prob_use_dynamic_bsz is None else keys.log_prob_use_dynamic_bsz
    return cut_of(
        keys.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        keys.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu,
        dynamic,
    )
