"""`critic.*`: the value model that `gae` and `turn_gae` train beside the policy."""

from __future__ import annotations

from typing import Annotated

from rally.config.actor import CheckpointConfig, FsdpConfig, LossAggMode, OptimConfig, Strategy
from rally.config.base import Count, Only, Positive, Section, Texts
from rally.config.model import ModelConfig


class CriticOptim(OptimConfig):
    lr: Positive = 1e-5


class CriticModel(ModelConfig):
    custom_chat_template: Annotated[str | None, Only(None, because="the critic reads the policy's tokens")] = None
    spelled_tokens: Annotated[Texts, Only((), because="the critic reads the policy's tokens")] = ()


class CriticConfig(Section):
    enable: bool | None = None
    """None and true are on with gae and turn_gae."""
    strategy: Strategy = "single"
    """On one device there is nothing to shard, so fsdp and fsdp2 are the same as single."""
    optim: CriticOptim = CriticOptim()
    model: CriticModel = CriticModel()
    """Without a path of its own it begins as the policy does, a new scalar head in place of the output head."""
    ppo_mini_batch_size: Count | None = None
    """Prompts per optimizer step. None takes the actor's."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """At most so many episodes in one forward pass, besides the token budget."""
    forward_micro_batch_size_per_gpu: Count | None = None
    """The same for the values before the update."""
    use_dynamic_bsz: bool = True
    """False takes the token budgets away, so that the counts alone say how much a pass holds."""
    ppo_max_token_len_per_gpu: Count = 32768
    forward_max_token_len_per_gpu: Count = 32768
    ppo_epochs: Count = 1
    shuffle: bool = False
    cliprange_value: Positive = 0.5
    """A value gains nothing by moving further than this from the old one in one step."""
    loss_agg_mode: LossAggMode = "token-mean"
    grad_clip: Positive = 1.0
    fsdp_config: FsdpConfig = FsdpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
