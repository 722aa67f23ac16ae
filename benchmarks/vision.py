"""What images cost on one GPU, and how far rollout, training and the module's own forward are apart.

    python -m benchmarks.vision            # a GPU; the weights are random, in the shape of Qwen2.5-VL-3B

Prints one line a measurement: prefill and decode of 64 conversations that show one image each to a group of four, then
one training forward and backward over them.
"""

from __future__ import annotations

import io
import time

import numpy as np
import torch
from PIL import Image as PILImage
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rally.engines.embedded.core import EngineCore
from rally.engines.embedded.settings import EngineSettings
from rally.engines.embedded.vision import give_sight
from rally.images import read_image
from rally.patches import Patches
from rally.train import forward
from rally.train.packing import Row, micro_batches, pack
from rally.types import Image, ImageSpan, SamplingParams, Segment

PAD = 151655
TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
SEEN = {"hidden_size": 1280, "out_hidden_size": 2048, "depth": 32, "num_heads": 16, "intermediate_size": 3420}


def make_model(device: str) -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=SEEN, image_token_id=PAD)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
        torch.set_default_dtype(torch.float32)
    give_sight(model, Patches(Qwen2VLImageProcessorPil(), PAD))
    return model


def noise(seed: int, side: int = 448) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)
    buffer = io.BytesIO()
    PILImage.fromarray(pixels).save(buffer, "PNG")
    return read_image(buffer.getvalue())


def prompt(seed: int, patches: Patches) -> Segment:
    patched, image = patches.of(noise(seed)), noise(seed)
    span = ImageSpan(20, patched.rows, patched.columns, image)
    ids = [1000 + i for i in range(20)] + [PAD] * (span.end - span.start) + [2000 + i for i in range(40)]
    return Segment(prompt_ids=tuple(ids), images=(span,))


def run(core: EngineCore, prompts: list[Segment], new: int) -> tuple[list[Segment], float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    params = [SamplingParams(max_tokens=new, seed=i, ignore_eos=True) for i in range(len(prompts))]
    requests = [core.add(s.ids, p, images=s.images) for s, p in zip(prompts, params, strict=True)]
    while any(request.finish is None for request in requests):
        core.step()
    seconds = time.perf_counter() - began
    return [s.append_sampled(r.result()) for s, r in zip(prompts, requests, strict=True)], seconds


def main() -> None:
    model = make_model("cuda")
    core = EngineCore(model, EngineSettings(max_model_len=1024, max_num_seqs=64, memory_share=0.3))
    patches = model.rally_patches
    images = [prompt(seed, patches) for seed in range(16)]
    prompts = [one for one in images for _ in range(4)]
    run(core, prompts[:8], 8)
    core.commit_weights()
    _, first = run(core, prompts, 1)
    core.commit_weights()
    segments, whole = run(core, prompts, 129)
    tokens = prompts[0].images[0].end - prompts[0].images[0].start
    print(f"prefill: 16 images of {tokens} tokens for 64 conversations in {first:.2f} s")
    print(f"decode: {64 * 128 / (whole - first):,.0f} tokens/s")
    rows = [Row.of(segment, number) for number, segment in enumerate(segments)]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    worst, began = 0.0, time.perf_counter()
    for part in micro_batches(rows, 16384):
        logp_M = forward.token_logprobs(model, packed := pack(part, model.device)).logp_M
        worst = max(worst, float((logp_M.detach() - packed.old_logp_M).abs().max()))
        logp_M.sum().backward()
    torch.cuda.synchronize()
    print(f"update: {sum(len(row.inputs) for row in rows) / (time.perf_counter() - began):,.0f} tokens/s")
    print(f"rollout and trainer differ by at most {worst:.3f} in a log-probability of bf16")


if __name__ == "__main__":
    main()
