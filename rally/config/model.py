"""Schema of `actor_rollout_ref.model.*`: weights, tokenizer, chat template and LoRA adapters of the policy."""

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
    """LoRA adapters, which are trained instead of the model's weights."""

    lora_rank: Natural = 0
    """Rank of the LoRA matrices. 0 trains all weights."""
    lora_alpha: Count = 16
    """LoRA scale: the product of the matrices is multiplied by lora_alpha / lora_rank."""
    target_modules: Texts = ("all-linear",)
    """Modules that get an adapter: suffixes of module names, or one regular expression for whole names. all-linear
    excludes the output head, routers, the vision tower, and out_proj of Mamba layers, which PEFT does not adapt."""
    exclude_modules: Texts = ()
    """Modules that get no adapter although target_modules selects them; written in the same way."""
    target_parameters: Texts = ()
    """Parameters that get an adapter besides the modules, by suffixes of their names, such as mlp.experts.gate_up_proj
    and mlp.experts.down_proj. The experts of a mixture-of-experts model are parameters, which all-linear does not
    select. On one device only."""
    lora_adapter_path: PathText | None = None
    """A folder of LoRA adapters to start from. Rank, alpha and modules are then those of the folder."""


class ModelConfig(LoraKeys):
    path: PathText | None = None
    """The model: a folder or a Hub name."""
    tokenizer_path: PathText | None = None
    """The tokenizer: a folder or a Hub name. null takes the model's own."""
    custom_chat_template: str | None = None
    """A chat template that replaces the tokenizer's own: its text, or the path of a .jinja file. Checkpoints keep
    it."""
    spelled_tokens: Texts = ()
    """Added tokens to write out as ordinary ones, for a model that was never trained on them. Checkpoints keep the
    setting."""
    trust_remote_code: bool = False
    """Allow Python code in the folder of the model or tokenizer to run."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    recompute_num_layers: Natural | None = None
    """With gradient checkpointing: how many layers are computed again; the others keep their activations. null: on one
    GPU as few as its free memory allows, else all. The results are the same."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's config.json."""
    dtype: Dtype = "auto"
    """The dtype of the weights. auto is bfloat16 on a GPU that supports it, else float32. For other dtypes than float32
    the optimizer keeps float32 copies."""

    use_remove_padding: bool = True
    """Accepted and has no effect: sequences are packed, so there is never any padding."""
    use_shm: Annotated[bool, Only(False, because="weights are read from their own folder")] = False

    hf_config_path: PathText | None = None
    external_lib: Texts = ()
    """Your modules to import at the start, in every process: names on the import path or Python files. They register
    policy losses, advantage estimators, agent loops, or classes of models with transformers."""
    enable_activation_offload: bool = False
    """Keep what the backward pass needs in main memory: with gradient checkpointing the inputs of the layers, else all
    large activations. Less memory on the device, more time."""
    use_liger: bool = False
    use_fused_kernels: bool = False
    """Accepted and has no effect: output head, log-probability and entropy are always computed together."""
    fused_kernel_options: FusedKernels = FusedKernels()
    tiled_mlp: TiledMlp = TiledMlp()
    mtp: MultiTokenPrediction = MultiTokenPrediction()
