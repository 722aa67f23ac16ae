"""Measures how far the trainer's logprobs are from those the engine sampled with, on real weights.

    python -m benchmarks.mismatch --model FOLDER_OR_FILE.gguf [--dtype bfloat16] [--episodes 64] [--new 256]
    python -m benchmarks.mismatch --model FOLDER_OR_FILE.gguf --quantization fp8
    python -m benchmarks.mismatch --model FILE.gguf --save FOLDER

Both run the same module in this process: the engine token by token over its cache, the trainer in packed forwards over
whole histories. `--save` only writes the model, a dequantised GGUF file, as an ordinary folder.

Shapes: M sampled tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rally.chat import ChatCodec
from rally.data.row_files import read_rows
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.models.load import load_model, load_tokenizer, pick_device
from rally.train.forward.deterministic_logprobs import exact_decoder, exact_logprobs
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, micro_batches, pack
from rally.types import Generation, RallyError, SamplingParams, Segment

FORWARD_TOKENS = 8192  # of one training forward
LIKELY = 0.1  # a token that the policy gave at least this probability
FAR = 0.01

PROMPTS = (
    "A baker sells 24 rolls in the morning and half as many in the afternoon. How many rolls does she sell?",
    "Name three rivers in Europe and the sea that each flows into.",
    "What is 17 * 23? Show how you get there.",
    "Write a short letter to a neighbour about a missing cat.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Explain to a child why the sky is blue.",
    "Simplify the fraction 84/126.",
    "List the steps for changing a bicycle tube.",
    "If 5 pencils cost 3.75, what do 12 pencils cost?",
    "Write a Python function that reverses a string without slicing.",
    "Solve for x: 3x - 7 = 2x + 11.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers? Why?",
    "Tom has twice as many marbles as Ann. Together they have 51. How many has each?",
    "Summarise the water cycle in three sentences.",
    "What is the area of a triangle with sides 5, 12 and 13?",
    "Give me a recipe for lentil soup for four people.",
    "Find the sum of all even numbers from 2 to 100.",
    "Translate into French: The library closes at six on Fridays.",
    "A tank holds 240 litres and leaks 1.5 litres an hour. When is it half empty?",
    "What is the difference between weather and climate?",
    "Compute 2 to the power of 15.",
    "Write a haiku about an early frost.",
    "A shirt costs 40 after a discount of 20 percent. What did it cost before?",
    "How does a vaccine work?",
    "How many seconds are there in a week?",
    "Suggest names for a small bookshop by the sea.",
    "The average of four numbers is 18. Three of them are 12, 20 and 25. What is the fourth?",
    "Describe how to tie a bowline.",
    "What is the probability of rolling a total of 7 with two dice?",
    "Explain what a hash table is and when it is slow.",
    "Maria reads 32 pages a day. How long does a book of 448 pages take her?",
    "Why do ships float although steel is heavier than water?",
    "Convert 72 degrees Fahrenheit to Celsius.",
    "Write an SQL query that counts orders per customer and keeps those with more than ten.",
    "A rectangle is 3 times as long as it is wide and its perimeter is 56. What is its area?",
    "Tell a story of five sentences about a lighthouse keeper.",
    "What is the derivative of x^3 * sin(x)?",
    "Compare tea and coffee in a small table.",
    "If today is Wednesday, what day will it be in 100 days?",
    "Give two arguments for and two against school uniforms.",
    "Three workers paint a wall in 8 hours. How long do 4 workers take?",
    "Which planets have rings?",
    "Factor x^2 - 5x + 6.",
    "Write a polite e-mail asking to move a meeting to next week.",
    "A car uses 6.2 litres for 100 km. How much does it need for 350 km?",
    "What causes tides?",
    "How many different ways can 4 books stand on a shelf?",
    "Explain recursion with an example in JavaScript.",
    "The sum of three consecutive numbers is 72. Which are they?",
    "What should I pack for two days of hiking in spring?",
    "Round 3.14159 to three decimal places and say why.",
    "Who was Ada Lovelace?",
    "A bank pays 3 percent interest a year. What becomes of 500 after two years?",
    "Rewrite in the passive voice: The committee will announce the winner tomorrow.",
    "What is the greatest common divisor of 252 and 198?",
    "Describe the rules of chess castling.",
    "In a class of 30, 18 play football, 15 play chess and 7 do both. How many do neither?",
    "Why does bread rise?",
    "What is 15 percent of 260, plus 48?",
    "Write a regular expression that matches a date such as 2024-05-17.",
    "A clock shows 3:15. What is the angle between its hands?",
    "Name five musical instruments and how each makes its sound.",
    "If a = 4 and b = -3, what is a^2 - 2ab + b^2?",
    "Explain the rule of three with an example from a kitchen.",
)


class Mismatch(NamedTuple):
    """Differences d = trainer - rollout over all sampled tokens."""

    tokens: int
    k3: float  # mean of exp(d) - 1 - d, an estimate of the divergence between the two
    mean: float
    most: float
    most_likely: float  # the largest |d| among tokens of a fair probability
    far: float  # the share of tokens with |d| over FAR
    equal: int  # bit for bit

    @classmethod
    def of(cls, trainer_M: Tensor, rollout_M: Tensor) -> Mismatch:
        d_M = trainer_M.double() - rollout_M.double()
        far_M = d_M.abs()
        likely_M = far_M[rollout_M.exp() > LIKELY]
        return cls(
            tokens=d_M.numel(),
            k3=(d_M.expm1() - d_M).mean().item(),
            mean=far_M.mean().item(),
            most=far_M.max().item(),
            most_likely=likely_M.max().item() if likely_M.numel() else 0.0,
            far=(far_M > FAR).double().mean().item(),
            equal=int((trainer_M.float() == rollout_M.float()).sum()),
        )

    def text(self) -> str:
        return (
            f"tokens compared                  {self.tokens}\n"
            f"mean k3                          {self.k3:.3e}\n"
            f"mean |d|                         {self.mean:.3e}\n"
            f"largest |d|                      {self.most:.3e}\n"
            f"largest |d| where p > {LIKELY:g}        {self.most_likely:.3e}\n"
            f"share of tokens with |d| > {FAR:g}  {self.far:.2%}\n"
            f"bitwise equal                    {self.equal} ({self.equal / self.tokens:.1%})"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch", description="Trainer against rollout.")
    parser.add_argument("--model", required=True, help="a folder, a hub name or a .gguf file")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--new", type=int, default=256, help="tokens of an episode at most")
    parser.add_argument("--prompts", type=Path, help="GSM8K or our rows (.jsonl, .parquet) instead of the fixed list")
    parser.add_argument("--deterministic", action="store_true", help="the engine's batch-invariant mode")
    parser.add_argument("--quantization", choices=["fp8"], help="of the engine's linear layers")
    parser.add_argument("--save", type=Path, help="write the model as a folder, and nothing else")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    try:
        if options.save:
            save(options)
        else:
            measure(options)
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)


def save(options: argparse.Namespace) -> None:
    load_model(options.model, dtype=options.dtype).save_pretrained(options.save)
    load_tokenizer(options.model).save_pretrained(options.save)
    print(f"{options.model} in {options.dtype} is in {options.save}")


def measure(options: argparse.Namespace) -> Mismatch:
    mode = deterministic() if options.deterministic else {}
    model = load_model(options.model, device=pick_device(), dtype=options.dtype)
    codec = ChatCodec(load_tokenizer(options.model))
    conversations = read_prompts(options.prompts) if options.prompts else [_asked(p) for p in PROMPTS]
    prompts = [codec.encode_prompt(c) for c in itertools.islice(itertools.cycle(conversations), options.episodes)]
    longest = max(map(len, prompts)) + options.new
    settings = EngineSettings(max_model_len=longest, quantization=options.quantization, **mode)
    began = time.perf_counter()
    segments = asyncio.run(sample(model, settings, prompts, options.new, codec.stop_ids))
    sampled = time.perf_counter()
    trainer_M, rollout_M = compare(model, segments, options.deterministic)
    result = Mismatch.of(trainer_M, rollout_M)
    print(
        f"{options.model}, {options.dtype}, {len(prompts)} episodes, {model.device}; "
        f"sampling {sampled - began:.1f} s, training forward {time.perf_counter() - sampled:.1f} s\n{result.text()}"
    )
    return result


def deterministic() -> dict[str, Any]:
    if "deterministic" not in {field.name for field in dataclasses.fields(EngineSettings)}:
        raise RallyError("the embedded engine has no deterministic mode; leave --deterministic out")
    return {"deterministic": True}


def read_prompts(path: Path) -> list[list[dict[str, Any]]]:
    rows = list(read_rows(path))
    if not rows or not all("prompt" in row or "question" in row for row in rows):
        raise RallyError(f"{path} must hold rows with a 'question' (GSM8K) or a 'prompt' of messages")
    return [row["prompt"] if "prompt" in row else _asked(row["question"]) for row in rows]


def _asked(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


async def sample(
    model: PreTrainedModel,
    settings: EngineSettings,
    prompts: Sequence[Sequence[int]],
    new: int,
    stop_ids: tuple[int, ...],
) -> list[Segment]:
    engine = EmbeddedEngine(model, settings, eos_ids=stop_ids)

    async def one(number: int, ids: Sequence[int]) -> Generation:
        return await engine.generate(ids, SamplingParams(temperature=1.0, max_tokens=new, seed=number))

    generations = await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts)))
    await engine.close()
    pairs = zip(prompts, generations, strict=True)
    return [Segment(prompt_ids=tuple(ids)).append_sampled(generation) for ids, generation in pairs]


@torch.no_grad()
def compare(model: PreTrainedModel, segments: Sequence[Segment], exact: bool = False) -> tuple[Tensor, Tensor]:
    """The trainer's and the engine's logprobs of the same sampled tokens."""
    rows = [Row.of(segment, number) for number, segment in enumerate(segments)]
    decoder = exact_decoder(model) if exact else None
    trainer, rollout = [], []
    for batch in micro_batches(rows, FORWARD_TOKENS):
        packed = pack(batch, model.device)
        with torch.no_grad():
            plain = token_logprobs(model, packed).logp_M if decoder is None else exact_logprobs(decoder, packed, 1.0)
        trainer.append(plain)
        rollout.append(packed.old_logp_M)
    return torch.cat(trainer), torch.cat(rollout)


if __name__ == "__main__":
    main()
