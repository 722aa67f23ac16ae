"""Small real models of every family with fused layers, fp32 on CPU, and the full forward as the reference."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
WINDOW = 24
FAMILIES = ("qwen2", "llama", "qwen3", "mistral", "gemma3")


def make_model(family: str = "qwen2", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.12,
    }
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW)).eval()
    if family == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(**sizes, sliding_window=WINDOW, layer_types=layers, query_pre_attn_scalar=16)
        return Gemma3ForCausalLM(config).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@torch.no_grad()
def full_logprobs(model: PreTrainedModel, ids: list[int], prompt_len: int, temperature: float = 1.0) -> list[float]:
    """The reference: logprobs of ids[prompt_len:] by one ordinary forward over the whole history."""
    logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float() / temperature
    logp = torch.log_softmax(logits, -1)
    return [logp[i - 1, ids[i]].item() for i in range(prompt_len, len(ids))]
