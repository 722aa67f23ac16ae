"""Measures a server behind Rally's adapter, with the engine that a training run then continues to use.

    python -m benchmarks.served SPEC.json

`benchmarks.servers` writes SPEC.json and starts this in a child process, so that a hang ends with it and GPU memory is
freed. One start of the server serves all parts: once the engine of `rally train` is up it is measured, and then the run
continues with its steps. Results are written after each part. A part that fails or takes too long records the
reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.mismatch import PROMPTS, Mismatch, compare
from benchmarks.rollout_workloads import Reply, Workload, play
from rally.chat import ChatCodec
from rally.config import Config, load_config
from rally.engines.remote import CudaIpcWeights, RemoteEngine, WeightTransport
from rally.engines.remote.canary import canary
from rally.models.load import load_model, load_tokenizer, pick_device
from rally.runs import build
from rally.runs.train import train
from rally.track import RunFolder
from rally.types import Generation, RallyError, SamplingParams, Segment

UPDATES = 3
SECONDS = {"mismatch": 90.0, "update": 150.0, "speed": 120.0}
BY_FILES = "actor_rollout_ref.rollout.checkpoint_engine.backend=files"
STEP = (
    *("timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/update_weights"),
    *("actor/rollout_mismatch_kl", "critic/score/mean", "num_turns/mean", "engine/canary_difference"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The measurements of one server. `tree` is the configuration of the run, before `overrides`."""

    tree: dict[str, Any]
    overrides: tuple[str, ...]
    parts: tuple[str, ...]
    workload: Workload
    episodes: int
    new: int
    patience: float  # multiplies the seconds that a part may take
    out: str  # where results go

    @classmethod
    def read(cls, path: Path) -> Spec:
        told = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**told, "workload": Workload(**told["workload"])})

    def config(self, *more: str) -> Config:
        return load_config(base=self.tree, overrides=[*self.overrides, *more])


class Measuring(RemoteEngine):
    """An engine that is measured once it is up, before its caller continues."""

    def __init__(self, engine: RemoteEngine, then: Callable[[Measuring, float], Awaitable[None]]) -> None:
        super().__init__(engine.servers, engine.weights, engine.oracle, engine.settings)
        self._then = then

    async def start(self) -> None:
        began = time.perf_counter()
        await super().start()
        await self._then(self, time.perf_counter() - began)


class Notes:
    """Results, written to disk as soon as they exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        self.found[name] = value
        print(f"{name}: {value}", flush=True)
        self.path.write_text(json.dumps(self.found, indent=2) + "\n", encoding="utf-8")

    async def part(self, name: str, seconds: float, job: Awaitable[Any]) -> None:
        """Run one part; an error in it is recorded, and the next part runs."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(seconds):
                self.add(name, await job)
        except (RallyError, TimeoutError) as problem:
            why = f"took more than {seconds:g} s" if isinstance(problem, TimeoutError) else str(problem)
            self.add(f"{name}_failed", why)
        self.add(f"{name}_took", time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    (path,) = sys.argv[1:] if arguments is None else arguments
    disable_progress_bar()
    spec = Spec.read(Path(path))
    try:
        served(spec, Notes(Path(spec.out)))
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)


def served(spec: Spec, notes: Notes) -> None:
    """All parts over one start of the server."""
    make = build.remote_engine_of

    def measuring(config: Config, model: PreTrainedModel, sampling: SamplingParams, decode: Any = None) -> Measuring:
        return Measuring(make(config, model, sampling, decode), functools.partial(measure, spec, notes, model))

    config = spec.config()
    if "train" not in spec.parts:
        model = load_model(str(config.model.path), device=pick_device(), dtype=str(config.model.dtype))
        asyncio.run(_up_and_down(measuring(config, model, SamplingParams(max_tokens=spec.new))))
        return
    with mock.patch.object(build, "remote_engine_of", measuring):  # the run's own engine, and no second start
        folder = train(config).folder
    rows = RunFolder(folder).read_metrics()
    notes.add("train", [{name: row.metrics[name] for name in STEP if name in row.metrics} for row in rows])


async def _up_and_down(engine: RemoteEngine) -> None:
    try:
        await engine.start()
    finally:
        await engine.close()


async def measure(spec: Spec, notes: Notes, model: PreTrainedModel, engine: Measuring, seconds: float) -> None:
    notes.add("start_seconds", seconds)
    jobs: dict[str, Callable[[], Awaitable[Any]]] = {
        "mismatch": lambda: mismatch(engine, model, spec),
        "speed": lambda: speed(engine, spec.workload, model.config.get_text_config().vocab_size),
        "update": lambda: updates(engine, model, spec),
    }
    for name, job in jobs.items():
        if name in spec.parts:
            await notes.part(name, SECONDS[name] * spec.patience, job())


async def mismatch(engine: RemoteEngine, model: PreTrainedModel, spec: Spec) -> dict[str, float]:
    codec = ChatCodec(load_tokenizer(str(spec.config().model.path)))
    asked = itertools.islice(itertools.cycle(PROMPTS), spec.episodes)
    prompts = [codec.encode_prompt([{"role": "user", "content": text}]) for text in asked]

    async def one(number: int, ids: Sequence[int]) -> Generation:
        params = SamplingParams(temperature=1.0, max_tokens=spec.new, seed=number, stop_ids=codec.stop_ids)
        return await engine.generate(ids, params, session=str(number))

    generations = await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts)))
    pairs = zip(prompts, generations, strict=True)
    segments = [Segment(prompt_ids=tuple(ids)).append_sampled(generation) for ids, generation in pairs]
    return Mismatch.of(*compare(model, segments))._asdict()


async def updates(engine: RemoteEngine, model: PreTrainedModel, spec: Spec) -> list[dict[str, Any]]:
    """Updates of servers that are awake and, if they share the trainer's GPU, of sleeping ones; by CUDA IPC
    handles, if the run has them, and by files.
    """
    own = engine.weights
    ways: dict[str, WeightTransport] = {"files": own}
    if isinstance(own, CudaIpcWeights):
        ways = {"ipc": own, "files": build.transport_of(spec.config(BY_FILES), model)}
    sleeps = [False] * UPDATES + [True] * (UPDATES if engine.settings.sleeps else 0)
    told = []
    try:
        for way, engine.weights in ways.items():
            told += [{"way": way, **await update(engine, sleep)} for sleep in sleeps]
    finally:
        engine.weights = own
        for transport in ways.values():
            if transport is not own:
                transport.close()
    return told


async def update(engine: RemoteEngine, sleep: bool) -> dict[str, float]:
    """What `rally train` does between two steps; the weights are sent again although they have not changed."""
    began = time.perf_counter()
    if sleep:
        await engine.rest()
    resting = time.perf_counter() - began
    with engine.updating():
        pass
    began = time.perf_counter()
    told = await engine.publish()
    whole = time.perf_counter() - began
    began = time.perf_counter()
    await canary(engine.servers[0], engine.oracle)
    return {
        "asleep": float(sleep),
        "sleep": resting,
        "whole": whole,
        "write": told["timing_s/write_weights"],
        "canary": time.perf_counter() - began,
    }


async def speed(engine: RemoteEngine, workload: Workload, vocabulary: int) -> dict[str, float]:
    async def sample(ids: Sequence[int], count: int) -> Reply:
        generation = await engine.generate(ids, SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True))
        return Reply(generation.ids, generation.logprobs, generation.cached_tokens)

    await play(sample, workload, vocabulary, seed=-1)
    played = await play(sample, workload, vocabulary, seed=0)
    return {
        "seconds": played.seconds,
        "samples_per_second": workload.conversations / played.seconds,
        "cached_share": played.cached / played.prompted,
    }


if __name__ == "__main__":
    main()
