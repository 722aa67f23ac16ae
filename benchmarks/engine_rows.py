"""Rows 1 and 2: the embedded engine on a real small model, against `generate` and against an empty prefix cache.

All of them run the same fp32 weights in this process. The prefix cache is emptied before each run, so that nothing is
reused except what a row measures.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.measure import Row, alternate
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.types import Generation, SamplingParams

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, (16, 256), (8, 64)
PROMPT, REPLY, OBSERVED = 504, 8, 32  # a history of 512 tokens, then the answer of a tool


@dataclass(frozen=True)
class Workload:
    """Prompts, and the number of tokens to sample after each."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]


def mixed_workload(vocabulary: int) -> Workload:
    rng = random.Random(0)
    prompts = tuple(_random_ids(rng, rng.randint(*PROMPT_TOKENS), vocabulary) for _ in range(REQUESTS))
    return Workload(prompts, tuple(rng.randint(*OUTPUT_TOKENS) for _ in range(REQUESTS)))


def _random_ids(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary) for _ in range(count))


def throughput_row(model: PreTrainedModel) -> Row:
    plain = copy.deepcopy(model)  # the engine puts its attention function into the module it is given
    plain.generation_config.eos_token_id = None  # every request is continued to its own length
    work = mixed_workload(model.config.vocab_size)
    with _engine_over(model) as engine:
        timings = alternate(lambda: _by_engine(engine, work), lambda: _by_generate(plain, work))
    wanted = sum(work.outputs)
    assert timings.other_median is not None
    return Row(
        what=f"{REQUESTS} mixed requests (prompts 16-256, outputs 8-64 tokens), SmolLM2-135M, fp32",
        against="transformers generate, one left-padded batch with KV cache",
        goal=2.0,
        timings=timings,
        note=f"{wanted} wanted tokens: {wanted / timings.ours_median:.1f} against "
        f"{wanted / timings.other_median:.1f} tokens/s; generate runs all rows to the longest output",
    )


@contextmanager
def _engine_over(model: PreTrainedModel) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, EngineSettings(max_model_len=1024, max_num_seqs=REQUESTS))
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def forget(engine: EmbeddedEngine) -> None:
    """Empty the prefix cache: prefixes of the old weight version are not found under a new one."""
    with engine.updating():
        pass


def _by_engine(engine: EmbeddedEngine, work: Workload) -> float:
    async def together() -> list[Generation]:
        requests = zip(work.prompts, work.outputs, strict=True)
        return await asyncio.gather(*(engine.generate(ids, _exactly(count)) for ids, count in requests))

    forget(engine)
    began = time.perf_counter()
    generations = asyncio.run(together())
    seconds = time.perf_counter() - began
    assert tuple(len(g.ids) for g in generations) == work.outputs
    return seconds


def _exactly(count: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True)


def _by_generate(model: PreTrainedModel, work: Workload) -> float:
    width, longest = max(map(len, work.prompts)), max(work.outputs)
    ids = torch.tensor([(0,) * (width - len(p)) + p for p in work.prompts])
    mask = torch.tensor([(0,) * (width - len(p)) + (1,) * len(p) for p in work.prompts])
    generate: Any = model.generate
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, pad_token_id=0, use_cache=True
    )
    began = time.perf_counter()
    output = generate(input_ids=ids, attention_mask=mask, generation_config=sampling)
    seconds = time.perf_counter() - began
    assert output.shape == (len(work.prompts), width + longest)
    return seconds


def second_turn_row(model: PreTrainedModel) -> Row:
    rng = random.Random(1)
    prompt, observed = (_random_ids(rng, n, model.config.vocab_size) for n in (PROMPT, OBSERVED))
    with _engine_over(model) as engine:
        timings = alternate(
            lambda: _second_turn(engine, prompt, observed, remembered=True),
            lambda: _second_turn(engine, prompt, observed, remembered=False),
        )
    return Row(
        what=f"time to the first token of the second turn: {PROMPT + REPLY} tokens of history, {OBSERVED} new ones",
        against="the same engine with an empty prefix cache",
        goal=5.0,
        timings=timings,
        note="all of the history but its last token is reused, so 33 tokens are computed instead of 544",
    )


def _second_turn(engine: EmbeddedEngine, prompt: Sequence[int], observed: Sequence[int], *, remembered: bool) -> float:
    async def both() -> Generation:
        first = await engine.generate(prompt, _exactly(REPLY))
        if not remembered:
            forget(engine)
        return await engine.generate((*prompt, *first.ids, *observed), _exactly(1))

    forget(engine)
    second = asyncio.run(both())
    assert bool(second.cached_tokens) == remembered
    return second.first_token_seconds
