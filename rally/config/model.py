"""`actor_rollout_ref.model.*`: which weights, tokenizer and template the policy is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rally.config.base import Count, Float, Natural, Only, PathText, Section, Texts

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class FusedKernels(Section):
    impl_backend: Literal["torch", "triton"] = "torch"


class TiledMlp(Section):
    enabled: bool = False
    num_shards: Count = 4


class MultiTokenPrediction(Section):
    enable: bool = False
    enable_train: bool = False
    enable_rollout: bool = False
    detach_encoder: bool = False
    mtp_loss_scaling_factor: Float = 0.1


class LoraKeys(Section):
    """What every trained model may have: small matrices that are trained instead of its weights."""

    lora_rank: Natural = 0
    """Width of the LoRA matrices; 0 trains all weights."""
    lora_alpha: Count = 16
    """What the matrices' product is multiplied by, times 1 / lora_rank."""
    target_modules: Texts = ("all-linear",)
    """Ends of module names, or one pattern for whole names; all-linear leaves the output head out."""
    exclude_modules: Texts = ()
    lora_adapter_path: PathText | None = None
    """A folder of LoRA adapters to begin with; rank, alpha and modules are then those of the folder."""


class ModelConfig(LoraKeys):
    path: PathText | None = None
    """A folder or a Hub name."""
    tokenizer_path: PathText | None = None
    """None takes the model's own."""
    custom_chat_template: str | None = None
    """Instead of the tokenizer's own: the text of a template, or the path of a .jinja file; kept in checkpoints."""
    spelled_tokens: Texts = ()
    """Added tokens to be written out in ordinary ones, for a model that never learned them; kept in checkpoints."""
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = True
    override_config: dict[str, Any] = Field(default_factory=dict)
    dtype: Dtype = "auto"
    """auto is bfloat16 on a GPU that has it, else float32. The optimizer keeps float32 copies of other weights."""

    use_remove_padding: bool = True
    """There is never any padding, so both values are right."""
    use_shm: Annotated[bool, Only(False, because="weights are read where they lie")] = False

    hf_config_path: PathText | None = None
    external_lib: str | None = None
    enable_activation_offload: bool = False
    use_liger: bool = False
    use_fused_kernels: bool = False
    """Output head, log-probability and entropy are always computed together, so both values are right."""
    fused_kernel_options: FusedKernels = FusedKernels()
    tiled_mlp: TiledMlp = TiledMlp()
    mtp: MultiTokenPrediction = MultiTokenPrediction()
