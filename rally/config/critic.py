"""Schema of `critic.*`: the value model that `gae` and `turn_gae` train."""

from __future__ import annotations

from typing import Annotated

from rally.config.actor import CheckpointConfig, FsdpConfig, LossAggMode, OptimConfig, Strategy
from rally.config.base import Count, Natural, Only, PathText, Positive, Section, Texts
from rally.config.model import ModelConfig


class CriticOptim(OptimConfig):
    lr: Positive = 1e-5
    """The learning rate of the critic's AdamW, after warm-up."""


class CriticModel(ModelConfig):
    path: PathText | None = None
    """The model the critic starts from: a folder, a Hub name, or critic/ of a checkpoint. null takes the policy's."""
    tokenizer_path: PathText | None = None
    """Must be the policy's tokenizer, because the critic reads the policy's tokens. null takes it."""
    custom_chat_template: Annotated[str | None, Only(None, because="the critic reads the policy's tokens")] = None
    spelled_tokens: Annotated[Texts, Only((), because="the critic reads the policy's tokens")] = ()
    recompute_num_layers: Natural | None = None
    """With gradient checkpointing of the critic: how many of its layers are computed again. null takes the policy's
    value."""


class CriticConfig(Section):
    enable: bool | None = None
    """null and true train a critic with gae and turn_gae; no other estimator has one."""
    strategy: Strategy = "single"
    """single, fsdp and fsdp2 all mean the same, as for actor.strategy."""
    optim: CriticOptim = CriticOptim()
    model: CriticModel = CriticModel()
    """The model of the critic. Without a path it starts from the policy's, with a new scalar head instead of the output
    head."""
    ppo_mini_batch_size: Count | None = None
    """Prompts per optimizer step of the critic. null takes the actor's."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """The most episodes in one forward pass, in addition to the token budget. null sets no such limit."""
    forward_micro_batch_size_per_gpu: Count | None = None
    """The same for the passes that compute values before the update."""
    use_dynamic_bsz: bool = True
    """Limit forward passes by tokens. false limits them by the micro-batch sizes alone."""
    ppo_max_token_len_per_gpu: Count = 32768
    """The most tokens in one packed forward pass of the critic's update, on each GPU."""
    forward_max_token_len_per_gpu: Count = 32768
    """The most tokens in one forward pass that computes values before the update, on each GPU."""
    ppo_epochs: Count = 1
    """How many times the critic's update goes over the episodes of a step."""
    shuffle: bool = False
    """Draw the critic's mini-batches in random order, by trainer.seed. false keeps the order of the prompts."""
    cliprange_value: Positive = 0.5
    """Value clipping: a new value that is further than this from the old one gains nothing."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How value losses are averaged; the same choices as actor.loss_agg_mode."""
    grad_clip: Positive = 1.0
    """The norm that the critic's gradients are clipped to."""
    ulysses_sequence_parallel_size: Count = 1
    """The same as actor.ulysses_sequence_parallel_size, which applies to all models; 1 follows it."""
    fsdp_config: FsdpConfig = FsdpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
