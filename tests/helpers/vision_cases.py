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
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from rally.chat import ChatCodec, tiny_tokenizer
from rally.images.layouts import Grid
from rally.images.loading import decoded, read_image
from rally.images.patches import Patches
from rally.models.vision import patches_of, set_patches
from rally.models.vision_loading import layout_of
from rally.types import Image, ImageSpan

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
OTHERS = ("qwen3_vl_moe", "qwen3_5", "glm4v", "internvl", "mistral3", "smolvlm", "idefics3")
MORE = ("glm4v_moe", "glm46v", "qwen3_5_moe")  # like others, compared once
PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
PLACEHOLDERS = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), "<|image|>"),
    "internvl": "<IMG_CONTEXT>",
    "mistral3": "[IMG]",
    "smolvlm": "<image>",
    "idefics3": "<image>",
}
TILES = ["<fake_token_around_image>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))]
MARKS = {
    "internvl": ["<img>", "</img>"],
    "mistral3": ["[IMG_BREAK]", "[IMG_END]"],
    "smolvlm": TILES,
    "idefics3": TILES,
}
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
def make_tokenizer(family: str = "qwen2_5_vl") -> Any:
    tokenizer = tiny_tokenizer()
    pad = PLACEHOLDERS.get(family, PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, pad, *MARKS.get(family, ())]})
    tokenizer.chat_template = TEMPLATE.replace(PAD, pad)
    return tokenizer


def make_processor(family: str = "qwen2_5_vl") -> Any:
    if family.startswith("glm4"):
        size = {"shortest_edge": 2 * 64, "longest_edge": 2 * 48 * 48}
        return Glm4vImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size)
    if family == "internvl":
        return GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=3)
    if family == "mistral3":
        return PixtralImageProcessorPil(size={"longest_edge": 24}, patch_size=PATCH)
    if family in ("smolvlm", "idefics3"):
        kind = SmolVLMImageProcessorPil if family == "smolvlm" else Idefics3ImageProcessorPil
        return kind(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, min_pixels=64, max_pixels=48 * 48)


def make_patches(family: str = "qwen2_5_vl", processor: Any = None, **options: Any) -> Patches:
    tokenizer = make_tokenizer(family)
    layout = layout_of(make_config(family), tokenizer) if family in OTHERS + MORE else Grid(PAD, PATCH, MERGE, 2)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    return Patches(processor or make_processor(family), layout, encode, **options)


def make_codec(family: str = "qwen2_5_vl", **options: Any) -> ChatCodec:
    return ChatCodec(make_tokenizer(family), patches=make_patches(family), **options)


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
    model: Any = AutoModelForImageTextToText.from_config(make_config(family), dtype=torch.float32)
    for parameter in model.parameters():  # zero biases and unit norms would hide errors
        parameter.data += 0.02 * torch.randn_like(parameter)
    tokenizer, embeddings = make_tokenizer(family), model.get_input_embeddings().weight.data
    patches = make_patches(family)
    embeddings[tokenizer.unk_token_id] = embeddings[patches.token]  # see `full_logits`
    set_patches(model, patches)
    return model.eval()


def calm_vision_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A model in which rounding errors do not grow, so that results can be compared to 1e-6."""
    torch.manual_seed(seed)
    config = make_config(family)
    config.text_config.initializer_range = config.vision_config.initializer_range = 0.05
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    set_patches(model, make_patches(family))
    return model.eval()


def make_config(family: str) -> Any:
    tokenizer = make_tokenizer(family)
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
        "pad_token_id": 0,
    }
    vision: dict[str, Any] = {"patch_size": PATCH, "initializer_range": 0.12, "hidden_size": 16}
    token = tokenizer.convert_tokens_to_ids(PLACEHOLDERS.get(family, PAD))
    if family in PLACEHOLDERS and not family.startswith("glm4"):
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16}
        whole: dict[str, Any] = {"image_token_id": token, "tie_word_embeddings": False}
        if family == "internvl":
            vision |= {"image_size": [16, 16], "patch_size": [PATCH, PATCH], "use_qk_norm": True}
            whole |= {"image_seq_length": 4}
            text["model_type"] = "qwen3"
        elif family == "mistral3":
            vision |= {"model_type": "pixtral", "head_dim": 8, "image_size": 32}
            whole |= {"spatial_merge_size": MERGE, "image_token_index": whole.pop("image_token_id")}
            text["model_type"] = "mistral"
        else:
            whole |= {"scale_factor": 2, "pad_token_id": 0}
            text["model_type"] = "llama"
        return CONFIG_MAPPING[family](text_config=text, vision_config=vision, **whole)
    special = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in TOKENS.items()}
    special |= {"image_token_id": token, "video_token_id": 1}
    vision |= {"depth": 3, "num_heads": 2, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2}
    elif family == "qwen2_5_vl":
        vision |= {"out_hidden_size": 64, "intermediate_size": 24, "fullatt_block_indexes": [1], "window_size": 16}
    elif family.startswith("glm4"):
        vision |= {"out_hidden_size": 64, "intermediate_size": 24, "image_size": 32}
        special = {"image_token_id": token, "video_token_id": 1}
    else:
        vision |= {"out_hidden_size": 64, "intermediate_size": 24, "num_position_embeddings": 64}
        if not family.startswith("qwen3_5"):
            vision |= {"deepstack_visual_indexes": [0, 1]}
    if family.endswith("moe"):
        text |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        text |= {"shared_expert_intermediate_size": 32}
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if family.startswith("qwen3_5"):
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        text |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
        text |= {"num_hidden_layers": 4, "partial_rotary_factor": 0.5}
    if family.startswith("qwen3_5") or family == "glm4v_moe":
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    return CONFIG_MAPPING[family](text_config=text, vision_config=vision, **special)


TOKENS = {"image": PAD, "vision_start": START, "vision_end": END}


def full_logits(model: PreTrainedModel, ids: Sequence[int], images: Sequence[ImageSpan]) -> torch.Tensor:
    """The reference: one ordinary multimodal forward of the module over a whole history, whose images go through its
    image processor together. The module would read every placeholder as an image, so a sampled one is replaced by
    another token with the same embedding."""
    kinds = torch.zeros((1, len(ids)), dtype=torch.int)
    patches, family = patches_of(model), model.config.model_type
    assert patches is not None
    for span in images:
        kinds[0, span.start : span.end] = 1
    shown: dict[str, Any] = {}
    if images:
        pictures = [decoded(span.image) for span in images]
        if family in ("smolvlm", "idefics3"):
            shown = dict(patches.processor(images=[pictures], return_tensors="pt"))
        elif family == "mistral3":
            shown = dict(patches.processor(images=pictures, patch_size=PATCH * MERGE, return_tensors="pt"))
        elif family == "internvl":
            shown = dict(patches.processor(images=pictures, crop_to_patches=True, return_tensors="pt"))
            shown.pop("num_patches")
        else:
            shown = dict(patches.processor(images=pictures, return_tensors="pt"), mm_token_type_ids=kinds)
    given = torch.tensor([list(ids)])
    given[(given == patches.token) & (kinds == 0)] = make_tokenizer().unk_token_id
    shown = {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in shown.items()
    }
    return model(input_ids=given.to(model.device), use_cache=False, **shown).logits[0].float()


@torch.no_grad()
def full_logprobs(
    model: PreTrainedModel, ids: Sequence[int], start: int, images: Sequence[ImageSpan] = (), temperature: float = 1.0
) -> list[float]:
    logp = torch.log_softmax(full_logits(model, ids, images) / temperature, -1)
    return [logp[i - 1, ids[i]].item() for i in range(start, len(ids))]


def write_vision_model(folder: Path, family: str = "qwen3_vl") -> Path:
    """Writes a complete folder: model, tokenizer, image processor."""
    make_vision_model(family).save_pretrained(folder)
    make_tokenizer(family).save_pretrained(folder)
    make_processor(family).save_pretrained(folder)
    return folder
