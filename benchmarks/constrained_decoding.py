"""Constrained decoding over random JSON schemas: is every finished output valid, and do rollout and trainer agree?

    python -m benchmarks.constrained_decoding --schemas 1000

A model with random weights samples under each schema. A second library (jsonschema) checks the outputs. The trainer's
forward computes their log-probabilities again from the recorded masks. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jsonschema import Draft202012Validator
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rally.chat import ChatCodec, tiny_tokenizer
from rally.chat.grammars import Constraint, grammar_of
from rally.engines import EmbeddedEngine, EngineSettings
from rally.models.token_masks import Grammars
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack
from rally.types import Generation, SamplingParams, Segment

Json = dict[str, Any]
PATTERNS = ("[a-z]{1,5}", "[A-Z][0-9]{2}", "(yes|no)", "[0-9]{3}-[0-9]{2}", "x+y?")
WORDS = ("name", "total", "when", "tags", "size", "ok", "kind", "id")


def random_schema(seed: int) -> Json:
    """A schema of an object with up to three levels, from the keywords that agents use."""
    rng = random.Random(f"schema {seed}")
    return _object(rng, 2)


def _object(rng: random.Random, depth: int) -> Json:
    names = rng.sample(WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Json:
    kinds = ["string", "pattern", "enum", "const", "integer", "number", "boolean", "null", "date"]
    if depth:
        kinds += ["object", "array", "anyOf", "object", "array"]
    kind = rng.choice(kinds)
    low = rng.randint(-50, 50)
    simple: dict[str, Json] = {
        "string": {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)},
        "pattern": {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"},
        "enum": {"enum": rng.sample(["red", "green", 1, 2.5, True, None], rng.randint(1, 4))},
        "const": {"const": rng.choice(["fixed", 7, False])},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
        "number": {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 10)},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "date": {"type": "string", "format": "date"},
    }
    if kind in simple:
        return simple[kind]
    if kind == "object":
        return _object(rng, depth - 1)
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": least + 2}
    return {"anyOf": [_value(rng, depth - 1), {"type": "null"}]}


class Outcome(NamedTuple):
    """The result over all schemas. `apart` is the largest difference of log-probabilities of rollout and trainer."""

    finished: int
    cut: int
    invalid: int
    tokens: int
    apart: float
    mask_bytes: float  # of a generation, as recorded
    seconds: float


def tiny_model(vocabulary: int) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    return Qwen2ForCausalLM(config).eval()


def run(schemas: Sequence[Json], *, temperature: float = 1.3, max_tokens: int = 400) -> Outcome:
    """Sample under each schema, validate what finished, and compute all log-probabilities again."""
    tokenizer = tiny_tokenizer()
    codec = ChatCodec(tokenizer, "hermes")
    model = tiny_model(len(tokenizer) + 4)  # some ids have no token, as in most models
    settings = EngineSettings(max_model_len=max_tokens + 32, max_num_seqs=32)
    grammars = Grammars(tokenizer, len(tokenizer) + 4, codec.stop_ids)
    engine = EmbeddedEngine(model, settings, decode=codec.decode, grammars=grammars)
    prompt = codec.encode_prompt([{"role": "user", "content": "Go"}])

    async def one(number: int) -> Generation:
        grammar = grammar_of(Constraint(schema=schemas[number]), codec)
        params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=number, stop_ids=codec.stop_ids, grammar=grammar
        )
        return await engine.generate(prompt, params)

    async def everything() -> list[Generation]:
        try:
            return await asyncio.gather(*map(one, range(len(schemas))))
        finally:
            await engine.close()

    began = time.perf_counter()
    generations = asyncio.run(everything())
    seconds = time.perf_counter() - began
    ends = Counter(generation.finish for generation in generations)
    invalid = sum(
        not Draft202012Validator(schema).is_valid(json.loads(codec.parse(generation.ids).text))
        for schema, generation in zip(schemas, generations, strict=True)
        if generation.finish == "stop"
    )
    return Outcome(
        finished=ends["stop"],
        cut=ends["length"],
        invalid=invalid,
        tokens=sum(len(generation.ids) for generation in generations),
        apart=_largest_difference(model, prompt, generations, temperature),
        mask_bytes=sum(len(g.constrained.masks) for g in generations if g.constrained) / len(generations),
        seconds=round(seconds, 1),
    )


@torch.no_grad()
def _largest_difference(
    model: PreTrainedModel, prompt: tuple[int, ...], generations: Sequence[Generation], temperature: float
) -> float:
    apart = 0.0
    for first in range(0, len(generations), 16):
        segments = [Segment(prompt_ids=prompt).append_sampled(g) for g in generations[first : first + 16]]
        rows = [Row.of(segment, number) for number, segment in enumerate(segments)]
        packed = pack(rows, model.device)
        logp_M = token_logprobs(model, packed, temperature).logp_M
        apart = max(apart, float((logp_M - packed.old_logp_M).abs().max()))
    return apart


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=1000)
    count = parser.parse_args().schemas
    print(json.dumps({"schemas": count, **run([random_schema(seed) for seed in range(count)])._asdict()}))


if __name__ == "__main__":
    main()
