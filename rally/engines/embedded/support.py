"""What a model's attention needs is known before the first step, and what we cannot do is refused by name."""

from __future__ import annotations

from transformers import PreTrainedModel

from rally.engines.base import EngineError
from rally.engines.embedded.memory import kv_shape
from rally.engines.embedded.words import Words

NOT_AT_ALL = "use another model, or a server engine"


def refuse_unsupported(model: PreTrainedModel, words: Words, *, paged: bool) -> None:
    """Raise for attention that the backend does not compute."""
    name, cure = type(model).__name__, f"{words.plain} runs it in plain torch"
    if what := _unknown(model):
        raise EngineError(f"{name} uses {what}, which the embedded engine does not know; {NOT_AT_ALL}")
    if not paged:
        return
    if what := _variant(model):
        raise EngineError(f"{name} uses {what}, which the paged kernels do not know; {cure}")
    if not power_of_two(size := kv_shape(model).size):
        raise EngineError(f"{name} has heads of {size}, and the paged kernels know powers of two; {cure}")


def power_of_two(size: int) -> bool:
    """Whether the kernels have a head of this size: a power of two, and large enough for a tensor core."""
    return size >= 16 and size & (size - 1) == 0


def _variant(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        return "attention soft-capping"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "attention sinks"
    return None


def _unknown(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder"
    if kinds:
        return f"layers of the kind {', '.join(sorted(kinds))}"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention"
    if not getattr(model, "_supports_attention_backend", False):
        return "an attention function of its own"
    return None
