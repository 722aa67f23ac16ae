"""Schema of `actor_rollout_ref.{actor,ref}.*`: the policy update, the optimizer, and the reference model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rally.config.base import AsList, Count, Float, Int, Natural, NonNegative, Only, PathText, Positive, Section, Share

Strategy = Literal["single", "fsdp", "fsdp2", "megatron", "veomni"]
OptimizerName = Literal["AdamW", "AdamW8bit"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full", "k1+", "k2+", "k3+", "low_var_kl+"]

Part = Literal["model", "optimizer", "extra", "hf_model"]
Parts = Annotated[
    tuple[Part, ...],
    AsList,
    Only(
        ("model", "optimizer", "extra"),
        ("model", "optimizer", "extra", "hf_model"),
        because="a checkpoint always holds everything that resuming needs, with weights in the Hugging Face format",
    ),
]


class OptimConfig(Section):
    lr: Positive = 1e-6
    """The learning rate of AdamW, after warm-up."""
    lr_warmup_steps: Annotated[Int, Field(ge=-1)] = -1
    """Steps of linear warm-up. -1 takes lr_warmup_steps_ratio of all steps."""
    lr_warmup_steps_ratio: Share = 0.0
    """The share of all steps that is warm-up, if lr_warmup_steps is -1."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's two moment coefficients."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after warm-up: constant, or falling by a cosine or a line until the last step."""
    min_lr_ratio: Share = 0.0
    """The lowest learning rate of cosine and linear, as a share of lr."""
    num_cycles: Positive = 0.5
    """Cosine periods over the run. 0.5 falls once, from lr to min_lr_ratio times lr."""
    clip_grad: Positive | None = None
    """The same as grad_clip of the actor, or of the critic."""
    warmup_style: Literal["constant", "cosine", "linear"] | None = None
    """The same as lr_scheduler_type."""

    optimizer: OptimizerName = "AdamW"
    """AdamW8bit stores the two moments of a parameter in 2 bytes instead of 8 (docs/training.md)."""
    optimizer_impl: Literal["torch.optim", "torchao.optim", "bitsandbytes.optim"] = "torch.optim"
    """Accepted and has no effect: AdamW is torch's, and AdamW8bit is Rally's own."""
    total_training_steps: Annotated[Int, Only(-1, because="trainer.total_training_steps sets it")] = -1

    override_optimizer_config: dict[str, Any] | None = None


class WrapPolicy(Section):
    min_num_params: Natural = 0
    """Accepted and has no effect: FSDP always wraps each decoder layer."""


class FsdpConfig(Section):
    """Sharding and offloading of a model and its optimizer."""

    wrap_policy: WrapPolicy = WrapPolicy()
    param_offload: bool = False
    """Keep the weights in main memory while nothing uses them: those of the policy and the critic outside of their
    updates, those of the reference outside of its forward passes. On one GPU the policy's stay on the device with
    the embedded engine, which samples from them."""
    optimizer_offload: bool = False
    """Keep optimizer states and float32 weights in main memory. The optimizer step moves them through the device bucket
    by bucket, so the device never holds all of them."""
    offload_policy: bool = False
    """On several GPUs: FSDP2's CPUOffloadPolicy. Weights, gradients and optimizer states are in main memory, a layer's
    weights are copied to the device while it is computed, and the optimizer steps on the CPU. No effect on one GPU."""
    reshard_after_forward: bool = True
    """On several GPUs: free a layer's gathered weights after the forward pass and gather them again for the backward
    pass. No effect on one GPU."""
    fsdp_size: Annotated[Int, Field(ge=-1)] = -1
    """On several GPUs: how many consecutive ones shard a model; the others hold replicas (HSDP). It divides the number
    of GPUs; -1 is all of them. The actor's applies to all models. No effect on one GPU."""
    ulysses_sequence_parallel_size: Count = 1
    """The same as the key of this name beside fsdp_config."""
    forward_prefetch: bool = False
    """Accepted and has no effect: layers are always gathered ahead of time."""
    model_dtype: str = "fp32"
    dtype: str = "bfloat16"
    use_orig_params: bool = False
    """Accepted and has no effect: FSDP2 always keeps the model's own parameters."""
    seed: Int = 42
    full_determinism: bool = False
    forward_only: bool = False


class CheckpointConfig(Section):
    save_contents: Parts = ("model", "optimizer", "extra")
    load_contents: Parts = ("model", "optimizer", "extra")
    async_save: bool = True
    """Write a checkpoint in the background, from a copy in main memory, while training goes on."""


LOSS_MODES = (
    *("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "gmpo", "cispo"),
    *("dppo_tv", "dppo_kl", "dro"),
)


class PolicyLossConfig(Section):
    loss_mode: str = "vanilla"
    """The policy objective: vanilla (PPO's clipped loss), gspo, sapo, gpg, clip_cov, kl_cov, geo_mean (or gmpo), cispo,
    dppo_tv, dppo_kl or dro (docs/methods.md), or the name under which a module of model.external_lib registers
    yours."""
    loss_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of a loss of your own. One written for verl reads them as config.policy_loss.<name>."""
    clip_cov_ratio: Share = 2e-4
    """loss_mode=clip_cov: the share of tokens whose loss is set to 0."""
    clip_cov_lb: Float = 1.0
    """loss_mode=clip_cov: the lowest covariance of advantage and log-probability at which a token may be chosen."""
    clip_cov_ub: Float = 5.0
    """loss_mode=clip_cov: the highest covariance at which a token may be chosen."""
    kl_cov_ratio: Share = 2e-4
    """loss_mode=kl_cov: the share of tokens, those of the highest covariance, that pay a KL penalty."""
    ppo_kl_coef: Float = 0.1
    """loss_mode=kl_cov: the weight of that KL penalty."""
    dro_beta: Positive | None = None
    """loss_mode=dro: the weight of the squared log-ratio. It has no default."""


class RouterReplay(Section):
    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """Whose expert choices the update of a mixture-of-experts model uses. disabled: its routers' own. R2: those of a
    forward over the episodes before the first update. R3: those of the rollout, which needs
    rollout.enable_rollout_routing_replay."""
    record_file: PathText | None = None
    replay_file: PathText | None = None


class ActorConfig(Section):
    ppo_mini_batch_size: Count | None = None
    """Prompts per optimizer step. null takes data.train_batch_size, which is one optimizer step per batch."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """The most episodes in one forward pass, in addition to the token budget. null sets no such limit."""
    ppo_micro_batch_size: Count | None = None
    """The same as ppo_micro_batch_size_per_gpu on one device; an error on several."""
    use_dynamic_bsz: bool = True
    """Limit a forward pass by ppo_max_token_len_per_gpu tokens. false limits it by ppo_micro_batch_size_per_gpu
    alone."""
    ppo_max_token_len_per_gpu: Count = 16384
    """The most tokens in one packed forward pass of the update, on each GPU."""
    ppo_epochs: Count = 1
    """How many times the update goes over the episodes of a step."""
    shuffle: bool = False
    """Draw the mini-batches of each epoch in random order. false keeps the order of the prompts."""
    data_loader_seed: Int | None = None
    """The seed of shuffle. null takes trainer.seed."""
    clip_ratio: Positive = 0.2
    """PPO's clip range: the ratio of new to old probability is clipped to 1 - clip_ratio and 1 + clip_ratio."""
    clip_ratio_low: Positive | None = None
    """The clip range below 1. null takes clip_ratio."""
    clip_ratio_high: Positive | None = None
    """The clip range above 1. null takes clip_ratio."""
    clip_ratio_c: Annotated[Float, Field(gt=1)] = 3.0
    """Dual clip: for a negative advantage A the loss of a token is at most clip_ratio_c times -A."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are averaged: over all tokens; or over sequences, each as the sum or the mean of its tokens, or
    as the sum divided by loss_scale_factor."""
    loss_scale_factor: Positive | None = None
    """The divisor of seq-mean-token-sum-norm. null takes data.max_response_length."""
    entropy_coeff: Float = 0.0
    """The weight of the entropy bonus in the loss. 0 adds none."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """The weight of the KL term of use_kl_loss."""
    kl_loss_type: KlKind = "low_var_kl"
    """The KL estimator of use_kl_loss: k1 (kl), k2 (mse), k3 (low_var_kl) or abs. A trailing + takes the gradient of
    k2."""
    grad_clip: Positive = 1.0
    """The norm that gradients are clipped to."""
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    strategy: Strategy = "single"
    """single, fsdp and fsdp2 all mean the same: one device holds the whole model, several share it by FSDP2."""

    rollout_n: Annotated[Count | None, Only(None, because="actor_rollout_ref.rollout.n sets it")] = None
    use_remove_padding: bool = True
    """Accepted and has no effect: sequences are packed, so there is never any padding."""
    calculate_entropy: bool = True
    """Accepted and has no effect: the entropy is always computed and logged."""
    entropy_from_logits_with_chunking: bool = True
    """Accepted and has no effect: logits are always computed in chunks."""

    policy_loss: PolicyLossConfig = PolicyLossConfig()
    tau_pos: Positive = 1.0
    """loss_mode=sapo: the temperature of the soft clip for positive advantages."""
    tau_neg: Positive = 1.05
    """loss_mode=sapo: the temperature of the soft clip for negative advantages."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower of a model that takes images."""
    use_prefix_grouper: bool = False
    use_torch_compile: bool = False
    ulysses_sequence_parallel_size: Count = 1
    """On several GPUs: how many consecutive ones divide the tokens of each micro-batch (Ulysses, docs/cluster.md). It
    divides the number of GPUs and the attention heads. One value applies to the policy, the reference and the critic.
    No effect on one GPU."""
    entropy_checkpointing: bool = False
    """Accepted and has no effect: the backward pass always recomputes logits, chunk by chunk."""
    calculate_sum_pi_squared: bool = False
    """Accepted and has no effect: the optimal token baseline always computes it, and nothing else needs it."""
    sum_pi_squared_checkpointing: bool = False
    use_fused_kernels: bool = False
    """The same as model.use_fused_kernels."""
    router_replay: RouterReplay = RouterReplay()
    fsdp_config: FsdpConfig = FsdpConfig()

    @property
    def sequence_parallel_size(self) -> int:
        """GPUs that divide the tokens of a micro-batch, by either key."""
        return max(self.ulysses_sequence_parallel_size, self.fsdp_config.ulysses_sequence_parallel_size)

    @property
    def clip_low(self) -> float:
        """The clip range below 1, by either key."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The clip range above 1, by either key."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class LogProbKeys(Section):
    """Limits of the forward passes that compute log-probabilities without gradients."""

    log_prob_max_token_len_per_gpu: Count | None = None
    """The most tokens in one forward pass that computes log-probabilities. null takes
    actor.ppo_max_token_len_per_gpu."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """The most episodes in such a pass, in addition to the token budget. null takes
    actor.ppo_micro_batch_size_per_gpu."""
    log_prob_micro_batch_size: Count | None = None
    """The same as log_prob_micro_batch_size_per_gpu on one device; an error on several."""
    log_prob_use_dynamic_bsz: bool | None = None
    """false removes the token budget. null takes actor.use_dynamic_bsz."""


class RefConfig(LogProbKeys):
    strategy: Strategy = "single"
    """single, fsdp and fsdp2 all mean the same, as for actor.strategy."""

    use_torch_compile: bool = False
    ulysses_sequence_parallel_size: Count = 1
    """The same as actor.ulysses_sequence_parallel_size, which applies to all models; 1 follows it."""
    fsdp_config: FsdpConfig = FsdpConfig()
