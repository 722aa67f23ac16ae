"""Tiny vision-language models of every supported family, fp32 on CPU: with processor, tokenizer, template, images, and
the module's own multimodal forward as the reference."""

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rally.chat import ChatCodec, tiny_tokenizer
from rally.images.loading import read_image
from rally.images.patches import Patches
from rally.models.vision import set_patches
from rally.types import Image, ImageSpan

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
PATCH, MERGE = 4, 2

TEMPLATE = """\
{%- macro show(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>tool' }}{%- endif %}
        {{- '\\n<tool_response>' + show(message.content) + '</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@functools.cache
def make_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, PAD]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, min_pixels=64, max_pixels=48 * 48)


def make_patches() -> Patches:
    return Patches(make_processor(), make_tokenizer().convert_tokens_to_ids(PAD))


def make_codec(**options: Any) -> ChatCodec:
    return ChatCodec(make_tokenizer(), patches=make_patches(), **options)


def picture(seed: int = 0, width: int = 24, height: int = 16, kind: str = "PNG") -> bytes:
    """A noise image; every seed gives a different one."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    PILImage.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def make_image(seed: int = 0, width: int = 24, height: int = 16) -> Image:
    return read_image(picture(seed, width, height))


def make_vision_model(family: str = "qwen2_5_vl", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        "tie_word_embeddings": False,
    }
    vision: dict[str, Any] = {
        "depth": 3,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "initializer_range": 0.12,
    }
    special = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    special["video_token_id"] = 1
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2}
        return _made(Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special)))
    if family == "qwen2_5_vl":
        vision |= {"hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 24}
        vision |= {"fullatt_block_indexes": [1], "window_size": 16}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
        return _made(Qwen2_5_VLForConditionalGeneration(config))
    vision |= {"hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 24, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    return _made(Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **special)))


TOKENS = {"image": PAD, "vision_start": START, "vision_end": END}


def _made(model: Any) -> PreTrainedModel:
    for parameter in model.parameters():  # zero biases and unit norms would hide errors
        parameter.data += 0.02 * torch.randn_like(parameter)
    tokenizer, embeddings = make_tokenizer(), model.get_input_embeddings().weight.data
    embeddings[tokenizer.unk_token_id] = embeddings[tokenizer.convert_tokens_to_ids(PAD)]  # see `full_logits`
    set_patches(model, make_patches())
    return model.eval()


def full_logits(model: PreTrainedModel, ids: Sequence[int], images: Sequence[ImageSpan]) -> torch.Tensor:
    """The reference: one ordinary multimodal forward of the module over a whole history. The module would read every
    placeholder as an image, so a sampled one is replaced by another token with the same embedding."""
    tokenizer, kinds = make_tokenizer(), torch.zeros((1, len(ids)), dtype=torch.int)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    for span in images:
        kinds[0, span.start : span.end] = 1
    shown: dict[str, Any] = {}
    if images:
        patched = [make_patches().of(span.image) for span in images]
        shown["pixel_values"] = torch.cat([torch.from_numpy(one.pixels) for one in patched])
        shown["image_grid_thw"] = torch.tensor([one.grid for one in patched])
        shown["mm_token_type_ids"] = kinds
    given = torch.tensor([list(ids)])
    given[(given == pad) & (kinds == 0)] = tokenizer.unk_token_id
    return model(input_ids=given, use_cache=False, **shown).logits[0].float()


@torch.no_grad()
def full_logprobs(
    model: PreTrainedModel, ids: Sequence[int], start: int, images: Sequence[ImageSpan] = (), temperature: float = 1.0
) -> list[float]:
    logp = torch.log_softmax(full_logits(model, ids, images) / temperature, -1)
    return [logp[i - 1, ids[i]].item() for i in range(start, len(ids))]


def write_vision_model(folder: Path, family: str = "qwen3_vl") -> Path:
    """Writes a complete folder: model, tokenizer, image processor."""
    make_vision_model(family).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return folder
