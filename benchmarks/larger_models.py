"""Larger models on one GPU: does the memory plan agree with the peak, and how long do rollout and update take?

    python -m benchmarks.larger_models [--cases 7b,7b-8bit,7b-32k,32b-lora] [--rollout]

Weights are random, in the shapes of Qwen2.5. For each case it plans as `rally train` would, and runs two updates: with
all layers recomputed, which is what the plan is for, and with as few as the memory left allows. `--rollout` samples the
same number of tokens before, with the embedded engine. Prints a line for each, and one for what fails; the others go
on. `--tiny` tries everything on a small shape, on a CPU too, where no peak is measured.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config

from benchmarks.train_step import EVERY, build, free_memory, peak_gb, row, synchronize, train_batch
from rally.config import Config, load_config
from rally.engines.embedded import EngineCore
from rally.engines.embedded.memory_plan import free_bytes
from rally.models import attention
from rally.models.load import pick_device
from rally.models.lora import add_adapters
from rally.platforms import use_expandable_segments
from rally.runs.build.models import lora_of
from rally.runs.build.rollout import engine_settings_of
from rally.runs.build.update_settings import policy_offload_of
from rally.runs.cost_estimate import memory_problem, training_costs
from rally.runs.host_memory import host_memory_problem
from rally.runs.planned_models import size_from
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.update import UpdateSettings, update_policy
from rally.types import RallyError, SamplingParams

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Case:
    """A shape, the episodes of one update, and the keys of its configuration."""

    shape: dict[str, Any]
    prompts: int
    answers: int
    prompt: int
    answer: int
    keys: tuple[str, ...] = ()

    def config(self) -> Config:
        length = self.prompt + self.answer
        sizes = (
            f"data.max_prompt_length={self.prompt}",
            f"data.max_response_length={self.answer}",
            f"data.train_batch_size={self.prompts}",
            f"{A}.ppo_mini_batch_size={self.prompts}",
            f"{A}.ppo_max_token_len_per_gpu={max(length, 16384)}",
            f"{R}.n={self.answers}",
        )
        return load_config(overrides=[*sizes, *self.keys])

    def model_config(self) -> Qwen2Config:
        return Qwen2Config(max_position_embeddings=2 * (self.prompt + self.answer), rope_theta=1e6, **self.shape)


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


SEVEN, THIRTY_TWO = _shape(3584, 18944, 28, 28, 4, 152_064), _shape(5120, 27648, 64, 40, 8, 152_064)
TINY = _shape(64, 128, 3, 4, 2, 512)
# without the copy of a checkpoint, which would double what main memory holds
OFFLOAD = (f"{A}.fsdp_config.optimizer_offload=true", f"{A}.checkpoint.async_save=false")
CASES = {
    "7b": Case(SEVEN, 8, 8, 512, 512, OFFLOAD),
    "7b-8bit": Case(SEVEN, 8, 8, 512, 512, (f"{A}.optim.optimizer=AdamW8bit", f"{A}.checkpoint.async_save=false")),
    "7b-32k": Case(SEVEN, 1, 4, 2048, 30_720, OFFLOAD),
    "32b-lora": Case(THIRTY_TWO, 8, 8, 512, 512, (f"{M}.lora_rank=16",)),
    "tiny": Case(TINY, 2, 4, 16, 16),
    "tiny-8bit": Case(TINY, 2, 4, 16, 16, (f"{A}.optim.optimizer=AdamW8bit",)),
    "tiny-lora": Case(TINY, 2, 4, 16, 16, (f"{M}.lora_rank=4",)),
}


def rows_of(case: Case) -> list[Row]:
    rng, vocabulary = random.Random(0), case.shape["vocab_size"]
    prompts = [[rng.randrange(vocabulary) for _ in range(case.prompt)] for _ in range(case.prompts)]
    return [
        row(rng, vocabulary, prompts[i // case.answers], case.answer, i) for i in range(case.prompts * case.answers)
    ]


def model_of(case: Case, config: Config, device: torch.device) -> PreTrainedModel:
    model = build(case.model_config(), device)
    if (lora := lora_of(config.model, 0)) is not None:
        add_adapters(model, lora, "nowhere")
    attention.install(model)
    return model


def policy_of(case: Case, config: Config, device: torch.device, recompute: int | None) -> Policy:
    model = model_of(case, config, device)
    settings = OptimizerSettings(lr=1e-6, moments_8bit=config.actor.optim.optimizer == "AdamW8bit")
    return Policy(model, settings, 10, True, recompute=recompute, offload=policy_offload_of(config))


def update(case: Case, config: Config, device: torch.device, recompute: int | None, planned_gb: float) -> str:
    free_memory()
    policy, rows = policy_of(case, config, device, recompute), rows_of(case)
    settings = UpdateSettings(mini_batch_groups=case.prompts, max_tokens=config.actor.ppo_max_token_len_per_gpu)
    seconds, layers = 0.0, 0.0
    for step in range(2):  # the first one compiles kernels and makes the optimizer's states
        synchronize()
        began = time.perf_counter()
        metrics = update_policy(policy, train_batch(rows, case.answers), settings, step=step)
        synchronize()
        seconds, layers = time.perf_counter() - began, metrics.get("perf/recomputed_layers", float("nan"))
    tokens = sum(len(one.ids) for one in rows)
    peak = f"peak {peak_gb():.1f} GB" + (f", planned {planned_gb:.1f} GB" if recompute == EVERY else "")
    return f"{seconds:.2f} s, {tokens / seconds:,.0f} tokens/s, {layers:.1f} layers recomputed, {peak}"


@torch.inference_mode()
def rollout(case: Case, config: Config, device: torch.device) -> str:
    free_memory()
    core = EngineCore(model_of(case, config, device).eval(), engine_settings_of(config))
    for repetition in range(2):  # the first one compiles kernels and captures graphs
        requests = [
            core.add([*one.ids[: case.prompt].tolist()], SamplingParams(max_tokens=case.answer, seed=i + repetition))
            for i, one in enumerate(rows_of(case))
        ]
        synchronize()
        began = time.perf_counter()
        while core.busy:
            core.step()
        synchronize()
        seconds = time.perf_counter() - began
    sampled = sum(len(one.ids) - one.prompt_len for one in requests)
    pages = core.pool.num_pages * core.settings.page_size
    return f"{seconds:.2f} s, {sampled / seconds:,.0f} tokens/s, KV cache for {pages:,} tokens, peak {peak_gb():.1f} GB"


def measure(name: str, device: torch.device, with_rollout: bool) -> bool:
    """Whether all of it was measured, or refused as it should be."""
    case = CASES[name]
    config, model_config = case.config(), case.model_config()
    width = 2 if device.type == "cuda" else 4
    size = size_from(model_config, lora_of(config.model, 0))
    planned = sum(cost.bytes for cost in training_costs(config, model_config, size, width)) / 1e9
    memory = torch.cuda.mem_get_info()[1] if device.type == "cuda" else 10**12
    host = host_memory_problem(config, model_config, size, width, free_bytes(torch.device("cpu")))
    if problem := memory_problem(config, model_config, size, width, memory) or host:
        print(f"{name}: refused: {problem}", flush=True)
        return True
    parts: dict[str, Callable[[], str]] = {"rollout": partial(rollout, case, config, device)} if with_rollout else {}
    for what, recompute in (("all layers recomputed", EVERY), ("as memory allows", None)):
        parts[f"update, {what}"] = partial(update, case, config, device, recompute, planned)
    done = [_printed(f"{name}, {what}", part) for what, part in parts.items()]
    return all(done)


def _printed(what: str, part: Callable[[], str]) -> bool:
    try:
        print(f"{what}: {part()}", flush=True)
    except (RuntimeError, RallyError) as problem:  # torch.OutOfMemoryError is a RuntimeError
        print(f"{what}: failed: {type(problem).__name__}: {str(problem).partition(chr(10))[0]}", flush=True)
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"some of {', '.join(CASES)}, separated by commas")
    parser.add_argument("--rollout", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    device = pick_device("auto", "--device")
    names = (options.cases or ("tiny,tiny-8bit,tiny-lora" if options.tiny else "7b,7b-8bit,7b-32k,32b-lora")).split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"there is no case {unknown[0]}; known are {', '.join(CASES)}")
    if device.type == "cpu" and any(not name.startswith("tiny") for name in names):
        parser.error("these shapes need a GPU, and there is none; try --tiny")
    use_expandable_segments(device)  # as a run does
    done = [measure(name, device, options.rollout) for name in names]
    if not all(done):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
