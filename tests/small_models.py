"""Small real models for tests: Qwen2 and Llama with grouped heads, fp32 on CPU; and the full forward as the spec."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 97


def make_model(family: str = "qwen2", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.12,
    }
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@torch.no_grad()
def full_logprobs(model: PreTrainedModel, ids: list[int], prompt_len: int, temperature: float = 1.0) -> list[float]:
    """The specification: logprobs of ids[prompt_len:] by one ordinary forward over the whole history."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].float() / temperature
    logp = torch.log_softmax(logits, -1)
    return [logp[i - 1, ids[i]].item() for i in range(prompt_len, len(ids))]
