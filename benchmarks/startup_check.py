"""Seconds and differences of the check at the start of a run, on a real model.

python -m benchmarks.startup_check MODEL [--dtype bfloat16] [--max-model-len 4096] [--no-checkpointing]
    [--quantization fp8]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from rally.engines import EmbeddedEngine
from rally.engines.embedded import EngineSettings
from rally.models import attention
from rally.models.load import load_model, load_tokenizer, pick_device
from rally.train.policy import OptimizerSettings, Policy
from rally.train.startup_check import check_rollout, check_training, compared_rows
from rally.types import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--quantization", choices=["fp8"])
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, device=pick_device("auto"), dtype=options.dtype)
    root = Path(__file__).resolve().parent.parent
    texts = [tokenizer((root / name).read_text())["input_ids"][:400] for name in ("README.md", "docs/design.md")]
    attention.install(model)
    policy = Policy(model, OptimizerSettings(), 1, gradient_checkpointing=not options.no_checkpointing)
    settings = EngineSettings(max_model_len=options.max_model_len, max_num_seqs=64, quantization=options.quantization)
    engine = EmbeddedEngine(model, settings)
    for attempt in ("first", "second"):
        began = time.perf_counter()
        forward = check_training(policy, compared_rows(texts, options.max_model_len), options.max_model_len, print)
        middle = time.perf_counter()
        rollout = asyncio.run(check_rollout(engine, model, texts, SamplingParams(temperature=1.0, max_tokens=16)))
        end = time.perf_counter()
        print(f"{attempt} time, {model.dtype} on {model.device}: {middle - began:.2f} s and {end - middle:.2f} s")
        print(f"  {forward}; {rollout}; spread of the logits {forward.spread:.2f} and {rollout.spread:.2f}")
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
