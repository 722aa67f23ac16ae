"""N-gram speculation in the embedded engine: how many drafts are right, and what it saves.

    python -m benchmarks.speculation --model models/smollm2-135m.gguf --rows ROWS.jsonl

Samples the same conversations with and without drafts, alternating, for several numbers of requests at a time, and
prints a table. `--rows` is a JSONL file whose field `question` is the prompt; the model's chat template is applied.
Outputs of the two runs are compared token by token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from rally.engines.embedded import EngineCore, EngineSettings, NgramSpeculation
from rally.models.load import load_model, load_tokenizer, pick_device
from rally.types import SamplingParams

MAX_MODEL_LEN = 2048


class Measured(NamedTuple):
    seconds: float
    steps: int
    drafted: int
    accepted: int
    outputs: list[list[int]]


def core_for(model: PreTrainedModel, requests: int, drafts: NgramSpeculation | None) -> EngineCore:
    """An engine whose graphs are captured."""
    settings = EngineSettings(max_model_len=MAX_MODEL_LEN, max_num_seqs=max(1, requests), speculation=drafts)
    core = EngineCore(model, settings, num_pages=requests * (MAX_MODEL_LEN // settings.page_size + 1))
    core.prepare()
    return core


def run(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams, eos_ids: Sequence[int]) -> Measured:
    """Sample everything, with nothing cached."""
    core.reset()
    before = core.steps, core.drafted_tokens, core.accepted_tokens
    requests = [
        core.add(list(ids), SamplingParams(**{**vars_of(params), "seed": seed, "stop_ids": tuple(eos_ids)}))
        for seed, ids in enumerate(prompts)
    ]
    began = time.perf_counter()
    while core.busy:
        core.step()
    seconds = time.perf_counter() - began
    outputs = [list(request.ids[request.prompt_len :]) for request in requests]
    after = core.steps, core.drafted_tokens, core.accepted_tokens
    return Measured(seconds, *(now - then for now, then in zip(after, before, strict=True)), outputs)


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {"max_tokens": params.max_tokens, "temperature": params.temperature}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, type=Path, help="a JSONL file with the field question")
    parser.add_argument("--requests", default="1,8,32", help="requests at a time, separated by commas")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    model = load_model(options.model, device=pick_device(options.device, "--device"), option="--model").eval()
    tokenizer = load_tokenizer(options.model)
    questions = [json.loads(line)["question"] for line in options.rows.read_text(encoding="utf-8").splitlines() if line]
    drafts = NgramSpeculation(num_speculative_tokens=options.drafts, disable_by_batch_size=10**6)
    params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature)
    print(f"| requests | drafts right | steps with, without | seconds with, without ({options.repeat} runs) | equal |")
    print("| --- | --- | --- | --- | --- |")
    for count in map(int, options.requests.split(",")):
        chats = [[{"role": "user", "content": text}] for text in questions[:count]]
        prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
        cores = [core_for(model, len(prompts), chosen) for chosen in (drafts, None)]
        pairs = [
            tuple(run(core, prompts, params, [tokenizer.eos_token_id]) for core in cores)
            for _ in range(options.repeat + 1)
        ][1:]  # the first one compiles what the graphs do not contain
        with_, without = (list(side) for side in zip(*pairs, strict=True))
        same = sum(a == b for a, b in zip(with_[0].outputs, without[0].outputs, strict=True))
        share = with_[0].accepted / max(1, with_[0].drafted)
        times = [statistics.median(one.seconds for one in side) for side in (with_, without)]
        right = f"{with_[0].accepted} of {with_[0].drafted} ({share:.0%})"
        steps = f"{with_[0].steps}, {without[0].steps}"
        ratio = f"{times[0]:.2f}, {times[1]:.2f} ({times[1] / times[0]:.2f}x)"
        print(f"| {count} | {right} | {steps} | {ratio} | {same} of {count} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
