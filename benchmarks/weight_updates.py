"""Checks that after each of many weight updates, made while requests run, the engine samples from the new policy.

    python -m benchmarks.weight_updates --updates 1000 [--shape tiny] [--dtype float32] [--policies keep,recompute]

Conversations of several turns run all the time over a few shared prompts. After each update a probe of two turns, whose
prompt was in the cache before the update, is compared with one ordinary forward over its whole history; so is the
latest conversation turn whose policy promises fresh KV. Exits with 1 if a logprob is off or memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.rollout_engines import Shape, default_dtype, random_model, shape_named
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.types import Generation, RallyError, SamplingParams

Policy = Literal["keep", "recompute", "abort"]
POLICIES: tuple[Policy, ...] = ("keep", "recompute", "abort")
TALKERS, TURNS, REPLY = 8, 3, (8, 32)  # conversations at once; tokens of a turn
PROMPTS, PROMPT, OBSERVED, PROBE = 4, 48, 8, 4  # prompts that all share; tokens
CHANGE = 0.05  # of a weight's standard deviation: enough that KV of the old weights shows
FP32_TOLERANCE = 1e-4  # largest |d|
BF16_TOLERANCE = 2e-3  # mean k3 of one history
GROWTH, SLACK = 1.03, 16 * 2**20


class Turn(NamedTuple):
    """Sampled tokens to be checked: positions of `ids`, with the engine's logprobs, all under one weight version."""

    ids: list[int]
    positions: list[int]
    logprobs: list[float]
    version: int


class Check(NamedTuple):
    """The distance of the engine from an ordinary forward."""

    tokens: int
    most: float
    k3: float

    def passes(self, dtype: torch.dtype) -> bool:
        return self.most <= FP32_TOLERANCE if dtype == torch.float32 else self.k3 <= BF16_TOLERANCE


@dataclass
class Trial:
    """The results under one policy."""

    policy: Policy
    dtype: torch.dtype
    updates: int = 0
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)  # how far an update moved the logprobs that were checked
    busy: list[int] = field(default_factory=list)  # requests in flight at each update
    ended: Counter[str] = field(default_factory=Counter)
    reused: int = 0  # probes whose second turn found its history in the cache
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)  # bytes after so many updates

    @property
    def flat(self) -> bool:
        """Whether the last third of the readings is no higher than the first."""
        third = -(-len(self.memory) // 3)
        kinds = zip(*self.memory.values(), strict=True)
        return all(max(read[-third:]) <= max(read[:third]) * GROWTH + SLACK for read in kinds)

    @property
    def passed(self) -> bool:
        return self.flat and all(check.passes(self.dtype) for check in self.checks)

    def text(self) -> str:
        tokens = sum(check.tokens for check in self.checks)
        memory = ", ".join(f"{_mebibytes(read)} at {step}" for step, read in self.memory.items())
        return (
            f"{self.policy}: {self.updates} updates in {self.seconds:.1f} s, {statistics.mean(self.busy):.1f} requests "
            f"in flight at each; turns ended: {dict(self.ended)}; {self.reused} of {self.updates + 1} probes reused "
            f"their first turn\n"
            f"  {tokens} tokens in {len(self.checks)} histories checked: largest |d| "
            f"{max(c.most for c in self.checks):.1e}, largest mean k3 {max(c.k3 for c in self.checks):.1e}; an update "
            f"moves these logprobs by {statistics.median(self.moved):.1e}\n"
            f"  memory, MiB: {memory}: {'flat' if self.flat else 'GROWS'}\n"
            f"  {'ok' if self.passed else 'FAILED'}"
        )


class Weights:
    """The module's weights, kept close to their start; changed in place, as an optimizer does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = [(weight, weight.detach().clone(), weight.detach().float().std()) for weight in model.parameters()]

    def change(self) -> None:
        for weight, base, deviation in self.base:
            weight.copy_(base + CHANGE * deviation.to(base.dtype) * torch.randn_like(base))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_updates", description="Updates under load.")
    parser.add_argument("--updates", type=int, default=1000, help="shared by the policies")
    parser.add_argument("--shape", default="tiny", help="tiny, smollm2-135m or qwen2.5-1.5b")
    parser.add_argument("--dtype", default=str(default_dtype()).removeprefix("torch."))
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args(arguments)
    try:
        policies = _policies(options.policies)
        shape = shape_named(options.shape)
        trials = run(shape, getattr(torch, options.dtype), policies, options.updates // len(policies))
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if all(trial.passed for trial in trials) else 1)


def _policies(names: str) -> list[Policy]:
    unknown = set(names.split(",")) - set(POLICIES)
    if unknown:
        raise RallyError(f"there is no policy {', '.join(sorted(unknown))}; name some of {', '.join(POLICIES)}")
    return [policy for policy in POLICIES if policy in names.split(",")]


def run(shape: Shape, dtype: torch.dtype, policies: Sequence[Policy], updates: int) -> list[Trial]:
    model = random_model(shape, dtype)
    trials = []
    for policy in policies:
        trials.append(asyncio.run(try_policy(model, Weights(model), Trial(policy, dtype), updates)))
        print(trials[-1].text(), flush=True)
        gc.collect()
    return trials


async def try_policy(model: PreTrainedModel, weights: Weights, trial: Trial, updates: int) -> Trial:
    settings = EngineSettings(max_model_len=256, max_num_seqs=TALKERS, in_flight=trial.policy)
    load = Load(EmbeddedEngine(model, settings), trial, model.config.get_text_config().vocab_size)
    talkers = [asyncio.create_task(load.talk(random.Random(number))) for number in range(TALKERS)]
    began = time.perf_counter()
    probe = await load.probe(0)
    for number in range(1, updates + 1):
        await asyncio.to_thread(update, load, model, weights, probe)
        if number % max(1, min(50, updates // 6)) == 0:
            trial.memory[number] = held_bytes()
        probe = await load.probe(number)
    await asyncio.to_thread(update, load, model, weights, probe)
    trial.updates, trial.seconds = updates, time.perf_counter() - began
    for talker in talkers:
        if talker.done():
            talker.result()
        talker.cancel()
    await asyncio.gather(*talkers, return_exceptions=True)
    await load.engine.close()
    return trial


@torch.no_grad()
def update(load: Load, model: PreTrainedModel, weights: Weights, probe: Turn) -> None:
    """Check what was sampled under the current weights, then change them; the engine is stopped meanwhile."""
    trial, engine = load.trial, load.engine
    with engine.updating():
        trial.busy.append(load.busy)
        seen = load.latest
        turns = [probe, *([seen] if seen and seen.version == engine.weight_version else [])]
        before = [reference(model, turn) for turn in turns]
        trial.checks += [compare(turn, expected) for turn, expected in zip(turns, before, strict=True)]
        weights.change()
        trial.moved.append((reference(model, probe) - before[0]).abs().median().item())


def reference(model: PreTrainedModel, turn: Turn) -> Tensor:
    """The specification: logprobs of the sampled tokens by one ordinary forward over the whole history."""
    ids = torch.tensor([turn.ids], device=model.device)
    at = torch.tensor(turn.positions, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, at - 1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, at, None]).squeeze(1)


def compare(turn: Turn, expected: Tensor) -> Check:
    d = expected.double() - torch.tensor(turn.logprobs, dtype=torch.float64, device=expected.device)
    return Check(d.numel(), d.abs().max().item(), (d.expm1() - d).mean().item())


def held_bytes() -> tuple[int, ...]:
    """Allocated and reserved bytes on the GPU, or resident memory without one."""
    gc.collect()
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return (int(resident) * os.sysconf("SC_PAGE_SIZE"),)


def _mebibytes(read: tuple[int, ...]) -> str:
    return "/".join(f"{count / 2**20:.0f}" for count in read)


class Load:
    """Endless conversations, with the probes among them."""

    def __init__(self, engine: EmbeddedEngine, trial: Trial, vocabulary: int) -> None:
        self.engine, self.trial, self.vocabulary = engine, trial, vocabulary
        self.prompts = [self._draw(random.Random(f"prompt {n}"), PROMPT) for n in range(PROMPTS)]
        self.busy = 0
        self.latest: Turn | None = None

    async def talk(self, rng: random.Random) -> None:
        """One conversation after the other; one that an update aborts starts again."""
        while True:
            ids = list(rng.choice(self.prompts))
            for _ in range(TURNS):
                version = self.engine.weight_version
                self.busy += 1
                generation = await self.engine.generate(ids, _params(rng.randint(*REPLY)))
                self.busy -= 1
                self._note(ids, generation, version)
                if generation.finish == "abort":
                    break
                ids += [*generation.ids, *self._draw(rng, OBSERVED)]

    def _note(self, ids: list[int], generation: Generation, asked_under: int) -> None:
        """Record a turn for the next check, unless policy `keep` lets it hold KV of older weights."""
        mixed = " over versions" if len(generation.spans) > 1 else ""
        self.trial.ended[generation.finish + mixed] += 1
        if generation.spans and (self.trial.policy != "keep" or asked_under == generation.spans[-1].version):
            span, start = generation.spans[-1], len(ids)
            positions = list(range(start + span.start, start + span.end))
            logprobs = list(generation.logprobs[span.start : span.end])
            self.latest = Turn([*ids, *generation.ids], positions, logprobs, span.version)

    async def probe(self, number: int) -> Turn:
        """Two turns over a prompt that was cached under older weights, alternately sampled and greedy."""
        ids, positions, logprobs = list(self.prompts[number % PROMPTS]), list[int](), list[float]()
        for turn in range(2):
            generation = await self.engine.generate(ids, _params(PROBE, temperature=float(number % 2)))
            assert {span.version for span in generation.spans} == {self.engine.weight_version}
            if turn and generation.cached_tokens >= PROMPT:
                self.trial.reused += 1
            positions += range(len(ids), len(ids) + PROBE)
            logprobs += generation.logprobs
            ids += [*generation.ids, *self._draw(random.Random(number), OBSERVED)]
        return Turn(ids, positions, logprobs, self.engine.weight_version)

    def _draw(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(range(self.vocabulary), k=count)


def _params(count: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)


if __name__ == "__main__":
    main()
