"""Measures the speed and memory of a training step on this device, and checks its log-probabilities.

    python -m benchmarks.train_step [--tiny]
    python -m benchmarks.train_step --grpo 128x8:204+256 [--max-tokens 16384 32768] [--lora 32] [--profile FILE]

On one H200 the first takes under four minutes. Weights are random: the time of a step does not depend on them. The
second measures one GRPO update of so many prompts x answers and their tokens, and writes what each kernel costs.
`--tiny` runs everything on a small shape in seconds, on a CPU too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from rally.models import attention
from rally.models.load import pick_device, pick_dtype
from rally.models.lora import LoraSettings, add_adapters
from rally.platforms import use_expandable_segments
from rally.sft.training import SftSettings, sft_step
from rally.track.timing import memory_used
from rally.train.batch import TrainBatch
from rally.train.forward import fused_layers
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, micro_batches, pack
from rally.train.policy import OptimizerSettings, Policy
from rally.train.update import UpdateSettings, update_policy

Step = Callable[[], object]
Kept = Literal["checkpointing", "as memory allows", "all kept"]
"""Which layers keep their activations."""
EVERY = 10**6  # layers to compute again


@dataclass(frozen=True)
class Sizes:
    """The amount of work: rows x length for a plain step, and prompts x answers for a GRPO-shaped one."""

    rows: int = 16
    length: int = 1024
    large: int = 32 * 1024
    prompts: int = 32
    answers: int = 8
    prompt: int = 400
    answer: int = 600


@dataclass(frozen=True)
class Measured:
    """One line of the table; `tokens` are those of the rows, shared or not; without seconds it ran out of memory."""

    shape: str
    what: str
    tokens: int
    seconds: float
    peak_gb: float


def shapes(tiny: bool) -> dict[str, PreTrainedConfig]:
    common = {"tie_word_embeddings": True, "max_position_embeddings": 4096}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        return {"tiny": Qwen2Config(vocab_size=199, num_key_value_heads=2, **sizes, **common)}
    small = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    large = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    return {
        "135M": LlamaConfig(vocab_size=49152, num_key_value_heads=3, **small, **common),
        "1.5B": Qwen2Config(vocab_size=151936, num_key_value_heads=2, **large, **common),
    }


def build(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or pick_dtype("auto", device))
    assert isinstance(model, PreTrainedModel)
    return model


def our_policy(config: PreTrainedConfig, device: torch.device, kept: Kept, lora: int = 0) -> Policy:
    model = build(config, device)
    if lora:
        add_adapters(model, LoraSettings(rank=lora, alpha=lora), "nowhere")
    attention.install(model)
    settings, some = OptimizerSettings(lr=1e-6), kept == "as memory allows"
    return Policy(model, settings, 100, gradient_checkpointing=kept != "all kept", recompute=None if some else EVERY)


def row(rng: random.Random, vocabulary: int, prompt: list[int], answer: int, episode: int = 0) -> Row:
    """A row with a sampled answer; advantages alternate."""
    ids = (*prompt, *(rng.randrange(vocabulary) for _ in range(answer)))
    return Row(
        ids=ids,
        sampled=tuple(range(len(prompt), len(ids))),
        logprobs=(-5.0,) * answer,
        episode=episode,
        advantages=(1.0 if episode % 2 else -1.0,) * answer,
    )


def plain_rows(vocabulary: int, count: int, length: int) -> list[Row]:
    rng = random.Random(0)
    return [row(rng, vocabulary, [i], length - 1) for i in range(count)]


def grpo_rows(vocabulary: int, sizes: Sizes, shared: bool) -> list[Row]:
    """Answers to prompts; without `shared`, the same lengths, but every row has its own prompt."""
    rng = random.Random(0)
    rows = []
    for group in range(sizes.prompts):
        for number in range(sizes.answers):
            prompts = random.Random(group if shared else 10_000 + group * sizes.answers + number)
            prompt = [prompts.randrange(vocabulary) for _ in range(sizes.prompt)]
            rows.append(row(rng, vocabulary, prompt, sizes.answer, len(rows)))
    return rows


def train_batch(rows: list[Row], answers: int) -> TrainBatch:
    return TrainBatch(
        rows=rows,
        rewards_N=torch.tensor([r.advantages[0] for r in rows], dtype=torch.float64),
        groups_N=torch.arange(len(rows)) // answers,
        tokens_N=torch.tensor([len(r.sampled) for r in rows]),
    )


def our_step(policy: Policy, rows: list[Row], max_tokens: int) -> Step:
    return partial(sft_step, policy, rows, SftSettings(batch_size=len(rows), max_tokens=max_tokens))


def plain_step(config: PreTrainedConfig, device: torch.device, rows: list[Row]) -> Step:
    """A step with transformers alone: sdpa, bf16, gradient checkpointing, the model's own loss, AdamW."""
    model = build(config, device)
    model.set_attn_implementation("sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.tensor([r.ids.tolist() for r in rows], device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(shape: str, what: str, rows: list[Row], make: Callable[[], Step], repetitions: int = 3) -> Measured:
    """Seconds of a step after a warm-up, and the peak of allocated memory; running out of memory is recorded."""
    free_memory()
    tokens = sum(len(r.ids) for r in rows)
    try:
        step = make()
        step()
        synchronize()
        began = time.perf_counter()
        for _ in range(repetitions):
            step()
        synchronize()
        seconds = (time.perf_counter() - began) / repetitions
    except torch.OutOfMemoryError:
        seconds = math.nan
    return Measured(shape, what, tokens, seconds, peak_gb())


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def measure_shape(name: str, config: PreTrainedConfig, device: torch.device, sizes: Sizes) -> list[Measured]:
    vocabulary = config.vocab_size
    rows = plain_rows(vocabulary, sizes.rows, sizes.length)
    budget = sizes.rows * sizes.length
    steps = f"{sizes.rows} x {sizes.length}"
    found = [measure(name, f"{steps}, transformers, checkpointing", rows, lambda: plain_step(config, device, rows))]
    for kept in get_args(Kept):
        make = partial(_fresh_step, config, device, kept, rows, budget)
        found.append(measure(name, f"{steps}, Rally, {kept}", rows, make))
    large = plain_rows(vocabulary, max(1, sizes.large // sizes.length), sizes.length)
    make = partial(_fresh_step, config, device, "checkpointing", large, sizes.large)
    found.append(measure(name, f"one micro-batch of {sizes.large}, Rally, checkpointing", large, make, 1))
    found.append(measure_grpo(name, config, device, sizes, "checkpointing", shared=False))
    for few in ("checkpointing", "as memory allows"):
        found.append(measure_grpo(name, config, device, sizes, few, shared=True))
    with through_the_module():
        make = partial(_fresh_step, config, device, "all kept", rows, budget)
        found.append(measure(name, f"{steps}, Rally through the module's own layers, all kept", rows, make))
    return found


@contextmanager
def through_the_module() -> Iterator[None]:
    """Training without fused layers, to compare with."""
    can_fuse, fused_layers._can_fuse = fused_layers._can_fuse, lambda model: False
    try:
        yield
    finally:
        fused_layers._can_fuse = can_fuse


def _fresh_step(config: PreTrainedConfig, device: torch.device, kept: Kept, rows: list[Row], n: int) -> Step:
    return our_step(our_policy(config, device, kept), rows, n)


def measure_grpo(
    name: str, config: PreTrainedConfig, device: torch.device, sizes: Sizes, kept: Kept, *, shared: bool
) -> Measured:
    rows = grpo_rows(config.vocab_size, sizes, shared)
    batch = train_batch(rows, sizes.answers)
    settings = UpdateSettings(mini_batch_groups=sizes.prompts, max_tokens=sizes.large // 2)
    computed = sum(len(pack(part, torch.device("cpu")).ids_T) for part in micro_batches(rows, settings.max_tokens))

    def make() -> Step:
        policy = our_policy(config, device, kept)
        sft_step(policy, rows[:4], SftSettings(batch_size=4, max_tokens=settings.max_tokens))
        return partial(update_policy, policy, batch, settings)

    shape = f"GRPO {sizes.prompts} x {sizes.answers} ({sizes.prompt} + {sizes.answer})"
    kind = "shared prompts" if shared else "prompts of their own"
    return measure(name, f"{shape}, {kind}, {kept}, {computed:,} computed", rows, make, 1)


@torch.no_grad()
def agreement(config: PreTrainedConfig, device: torch.device, sizes: Sizes) -> list[str]:
    """The distance of our log-probabilities, and of transformers' own, from those of float32, row by row."""
    few = replace(sizes, prompts=2, answers=4)
    [rows] = micro_batches(grpo_rows(config.vocab_size, few, shared=True), 10**9)
    model = build(config, device)
    exact = build(config, device, torch.float32)
    exact.load_state_dict(model.state_dict())
    attention.install(exact)
    truth = torch.cat([token_logprobs(exact, pack([r], device)).logp_M for r in rows])
    alone = torch.cat([_transformers_logprobs(model, r) for r in rows])
    attention.install(model)
    packed = pack(rows, device)
    ours = token_logprobs(model, packed).logp_M
    dtype = str(model.dtype).removeprefix("torch.")
    saved = f"{len(packed.ids_T)} tokens computed of {sum(len(r.inputs) for r in rows)}"
    return [
        f"{what}: largest {float((x - truth).abs().max()):.2e}, mean {float((x - truth).abs().mean()):.2e}"
        for what, x in ((f"Rally {dtype}, shared ({saved})", ours), (f"transformers {dtype}, row by row", alone))
    ]


def _transformers_logprobs(model: PreTrainedModel, one: Row) -> torch.Tensor:
    ids = torch.tensor(one.ids.tolist(), device=model.device)
    at = torch.tensor(one.sampled.tolist(), device=model.device)
    logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, at - 1].float(), -1)
    return logp.gather(1, ids[at, None]).squeeze(1)


def measure_update(options: argparse.Namespace, name: str, config: PreTrainedConfig, device: torch.device) -> None:
    """GRPO updates of the given size, each after one that compiles, and a profile of the last."""
    prompts, answers, prompt, answer = (int(x) for x in re.split(r"[x:+]", options.grpo))
    sizes = Sizes(prompts=prompts, answers=answers, prompt=prompt, answer=answer)
    rows, lines = grpo_rows(config.vocab_size, sizes, shared=True), []
    for kept, max_tokens in itertools.product(options.kept, options.max_tokens):
        settings = UpdateSettings(mini_batch_groups=prompts, max_tokens=max_tokens)
        parts = list(micro_batches(rows, max_tokens))
        computed = sum(len(pack(part, torch.device("cpu")).ids_T) for part in parts)
        policy = our_policy(config, device, kept, options.lora)
        step = partial(update_policy, policy, train_batch(rows, answers), settings)
        what = f"{options.grpo}, LoRA {options.lora}, {kept}, {len(parts)} micro-batches, {computed:,} computed"
        lines.append(measure(name, what, rows, lambda step=step: step, options.repetitions))  # type: ignore[misc]
        print({**policy.recomputed(), **memory_used()}, flush=True)
        if options.profile:
            few = [r for r in rows if r.episode < 2 * max_tokens // answer]
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
            with profile(activities=activities) as recorded:
                update_policy(policy, train_batch(few, answers), settings)
                synchronize()
            by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
            text = recorded.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=110)
            with options.profile.open("a", encoding="utf-8") as file:
                file.write(f"{what}; {len(few)} rows\n{text}\n")
        del policy, step
    Console(width=170).print(table(lines))


def table(lines: list[Measured]) -> Table:
    made = Table("shape", "step", "tokens/s", "seconds", "peak GB", title="training steps")
    for one in lines:
        fits = not math.isnan(one.seconds)
        speed = f"{one.tokens / one.seconds:,.0f}" if fits else "out of memory"
        peak = f"{one.peak_gb:.1f}" if one.peak_gb else "-"
        made.add_row(one.shape, one.what, speed, f"{one.seconds:.3f}" if fits else "-", peak)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description="A training step, measured.")
    parser.add_argument("--tiny", action="store_true", help="a small shape: seconds, on a CPU too")
    parser.add_argument("--grpo", metavar="PxA:T+T", help="measure one GRPO update of this size")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[16384], help="of a micro-batch of it")
    parser.add_argument("--kept", nargs="+", choices=get_args(Kept), default=["as memory allows"])
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="a file to which the table of its kernels is appended")
    options = parser.parse_args()
    if options.grpo and re.fullmatch(r"[1-9]\d*x[1-9]\d*:[1-9]\d*\+[1-9]\d*", options.grpo) is None:
        parser.error(f"--grpo {options.grpo} is no size; write prompts x answers : tokens of both, like 128x8:204+256")
    tiny, device = options.tiny, pick_device()
    use_expandable_segments(device)  # as a run does
    if options.grpo:
        name, config = list(shapes(tiny).items())[-1]
        measure_update(options, name, config, device)
        return
    sizes = Sizes(4, 24, 192, 3, 4, 16, 8) if tiny else Sizes()
    console = Console(width=150)
    configs = shapes(tiny)
    name, config = next(iter(configs.items()))
    console.print(f"log-probabilities of {name} against float32, one row at a time:")
    for line in agreement(config, device, sizes):
        console.print(f"  {line}", highlight=False)
    for name, config in configs.items():
        console.print(table(measure_shape(name, config, device, sizes)))


if __name__ == "__main__":
    main()
