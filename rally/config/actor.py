"""`actor_rollout_ref.{actor,ref}.*`: how the policy is updated and what the reference costs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rally.config.base import AsList, Count, Float, Int, Natural, NonNegative, Only, PathText, Positive, Section, Share

Strategy = Literal["single", "fsdp", "fsdp2", "megatron", "veomni"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full", "k1+", "k2+", "k3+", "low_var_kl+"]

Part = Literal["model", "optimizer", "extra", "hf_model"]
Parts = Annotated[
    tuple[Part, ...],
    AsList,
    Only(
        ("model", "optimizer", "extra"),
        ("model", "optimizer", "extra", "hf_model"),
        because="a checkpoint always holds everything that resuming needs, weights in the Hugging Face format",
    ),
]


class OptimConfig(Section):
    lr: Positive = 1e-6
    lr_warmup_steps: Annotated[Int, Field(ge=-1)] = -1
    """-1 takes lr_warmup_steps_ratio of all steps."""
    lr_warmup_steps_ratio: Share = 0.0
    weight_decay: NonNegative = 0.01
    betas: tuple[Share, Share] = (0.9, 0.999)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: Share = 0.0
    num_cycles: Positive = 0.5
    clip_grad: Positive | None = None
    """The same as actor.grad_clip."""
    warmup_style: Literal["constant", "cosine", "linear"] | None = None
    """The same as lr_scheduler_type."""

    optimizer: Annotated[str, Only("AdamW", because="AdamW is the optimizer")] = "AdamW"
    optimizer_impl: Annotated[str, Only("torch.optim", because="AdamW comes from torch")] = "torch.optim"
    total_training_steps: Annotated[Int, Only(-1, because="trainer.total_training_steps sets it")] = -1

    override_optimizer_config: dict[str, Any] | None = None


class WrapPolicy(Section):
    min_num_params: Natural = 0
    """It is always the layers that are sharded, so all values are right."""


class FsdpConfig(Section):
    """How a model lies in memory."""

    wrap_policy: WrapPolicy = WrapPolicy()
    param_offload: bool = False
    """Of the reference model: it waits in main memory, and is on the device only while it is asked."""
    optimizer_offload: bool = False
    """What the optimizer keeps of each weight waits in main memory, and is on the device only during the update."""
    offload_policy: bool = False
    reshard_after_forward: bool = True
    """On several GPUs: a layer's weights are gathered again for the backward pass. On one nothing is sharded."""
    fsdp_size: Int = -1
    """On several GPUs -1 or their number; on one nothing is sharded."""
    forward_prefetch: bool = False
    """Layers are gathered ahead of time in any case, so both values are right."""
    model_dtype: str = "fp32"
    dtype: str = "bfloat16"
    use_orig_params: bool = False
    """Parameters are always the model's own, so both values are right."""
    seed: Int = 42
    full_determinism: bool = False
    forward_only: bool = False


class CheckpointConfig(Section):
    save_contents: Parts = ("model", "optimizer", "extra")
    load_contents: Parts = ("model", "optimizer", "extra")
    async_save: bool = True
    """Training goes on while a checkpoint is written, from a copy of the state in main memory."""


class PolicyLossConfig(Section):
    loss_mode: Literal[
        "vanilla",
        "gspo",
        "sapo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "geo_mean",
        "gmpo",
        "cispo",
        "bypass_mode",
        "dppo_tv",
        "dppo_kl",
        "dro",
    ] = "vanilla"
    clip_cov_ratio: Share = 2e-4
    clip_cov_lb: Float = 1.0
    clip_cov_ub: Float = 5.0
    kl_cov_ratio: Share = 2e-4
    ppo_kl_coef: Float = 0.1
    dro_beta: Float | None = None


class RouterReplay(Section):
    mode: Literal["disabled", "R2", "R3"] = "disabled"
    record_file: PathText | None = None
    replay_file: PathText | None = None


class ActorConfig(Section):
    ppo_mini_batch_size: Count | None = None
    """Prompts per optimizer step. None takes data.train_batch_size: one optimizer step per batch."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """At most so many episodes in one forward pass, besides the token budget."""
    ppo_micro_batch_size: Count | None = None
    """The same on one device; refused on several."""
    use_dynamic_bsz: bool = True
    """False takes the token budget away, so that ppo_micro_batch_size_per_gpu alone says how much a pass holds."""
    ppo_max_token_len_per_gpu: Count = 16384
    ppo_epochs: Count = 1
    shuffle: bool = False
    data_loader_seed: Int | None = None
    """None takes trainer.seed."""
    clip_ratio: Positive = 0.2
    clip_ratio_low: Positive | None = None
    """None takes clip_ratio."""
    clip_ratio_high: Positive | None = None
    """None takes clip_ratio."""
    clip_ratio_c: Annotated[Float, Field(gt=1)] = 3.0
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: Positive | None = None
    """What seq-mean-token-sum-norm divides by. None takes data.max_response_length."""
    entropy_coeff: Float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: NonNegative = 0.001
    kl_loss_type: KlKind = "low_var_kl"
    grad_clip: Positive = 1.0
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    strategy: Strategy = "single"
    """One device has nothing to shard and several are FSDP2's, so single, fsdp and fsdp2 are the same."""

    rollout_n: Annotated[Count | None, Only(None, because="actor_rollout_ref.rollout.n sets it")] = None
    use_remove_padding: bool = True
    """There is never any padding, so both values are right."""
    calculate_entropy: bool = True
    """The entropy is always computed and logged, so both values are right."""
    entropy_from_logits_with_chunking: bool = True
    """Logits are never all in memory at once, so both values are right."""

    policy_loss: PolicyLossConfig = PolicyLossConfig()
    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05
    freeze_vision_tower: bool = False
    use_prefix_grouper: bool = False
    use_torch_compile: bool = False
    ulysses_sequence_parallel_size: Count = 1
    entropy_checkpointing: bool = False
    """The backward pass always computes logits again, part by part, so both values are right."""
    calculate_sum_pi_squared: bool = False
    sum_pi_squared_checkpointing: bool = False
    use_fused_kernels: bool = False
    """The same as model.use_fused_kernels."""
    router_replay: RouterReplay = RouterReplay()
    fsdp_config: FsdpConfig = FsdpConfig()

    @property
    def clip_low(self) -> float:
        """The clip range below 1, whichever way it was given."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The clip range above 1, whichever way it was given."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class LogProbKeys(Section):
    """How much a forward pass holds that only asks for log-probabilities."""

    log_prob_max_token_len_per_gpu: Count | None = None
    """None takes actor.ppo_max_token_len_per_gpu."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """At most so many episodes, besides the tokens. None takes actor.ppo_micro_batch_size_per_gpu."""
    log_prob_micro_batch_size: Count | None = None
    """The same on one device; refused on several."""
    log_prob_use_dynamic_bsz: bool | None = None
    """False takes the token budget away. None takes actor.use_dynamic_bsz."""


class RefConfig(LogProbKeys):
    strategy: Strategy = "single"

    use_torch_compile: bool = False
    ulysses_sequence_parallel_size: Count = 1
    fsdp_config: FsdpConfig = FsdpConfig()
