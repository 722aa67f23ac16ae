"""Simulates training on 8 and on 1,024 GPUs: idle GPUs, staleness and throughput of synchronous and asynchronous steps.

    python -m benchmarks.cluster_simulation [--cluster 8 1024] [--json FILE] [--page docs/cluster_simulation.md]

What is real: the router (`rally.engines.router`), and the schedule of `rally.train.async_trainer` (`AsyncTrainer`,
`GroupAdmission`). What is simulated: servers, tools, the update, and the time. An event loop whose clock jumps to the
next timer runs them, so hours pass in seconds. Nothing here has run on GPUs; the numbers follow from the assumptions
in `CLUSTERS`, which the page prints.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import heapq
import itertools
import json
import math
import random
import selectors
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rally.engines.base import ReplicaGone
from rally.engines.router.router import Router
from rally.engines.router.server_state import RouterSettings
from rally.loops import Job
from rally.track.svg_chart import COLORS, HEIGHT, LEFT, TOP, WIDTH, Panel, Series, svg
from rally.train.async_trainer import AsyncSettings, AsyncTrainer, GroupAdmission
from rally.train.rollout.rollout import RolloutResult
from rally.train.trainer import TrainerSettings
from rally.types import Generation, SamplingParams, Task, WeightSpan

TASK = Task(id="row", data_source="simulation", prompt=({"role": "user", "content": "?"},))
HOUR = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The assumptions. Rates are tokens a second. A request gets `request_rate`, or its share of a busy replica's
    `replica_rate`."""

    gpus: int
    trainer_gpus: int  # of an asynchronous run; a synchronous one uses all GPUs for one thing, then for the other
    gpus_per_replica: int
    replica_rate: float
    request_rate: float
    train_rate: float  # sampled tokens a GPU and second
    groups: int
    n: int
    publish_seconds: float
    steps: int  # that are measured; the ones before, which fill the pipeline, are left out
    turns: tuple[int, int] = (1, 12)
    turn_tokens: tuple[float, float] = (300.0, 0.9)  # lognormal: median and sigma
    tool_seconds: tuple[float, float] = (2.0, 1.0)
    hours_between_failures: float = 0.5  # of one replica; far more often than real ones
    repair_seconds: float = 300.0


CLUSTERS = {
    8: Cluster(
        gpus=8,
        trainer_gpus=4,
        gpus_per_replica=1,
        replica_rate=6000,
        request_rate=150,
        train_rate=8000,
        groups=64,
        n=8,
        publish_seconds=3,
        steps=6,
    ),
    1024: Cluster(
        gpus=1024,
        trainer_gpus=768,
        gpus_per_replica=32,
        replica_rate=24000,
        request_rate=60,
        train_rate=120,
        groups=64,
        n=16,
        publish_seconds=20,
        steps=3,
    ),
}


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set: the simulated run hangs")
        self._loop.now += max(0.0, timeout)
        return super().select(0)


class SimulatedServer:
    """A `Replica` that shares its rate among its requests. `work` is the number of tokens that a request which ran all
    the time would have: a request that began at work w and needs k tokens ends when `work` is w + k."""

    def __init__(self, name: str, cluster: Cluster, loop: VirtualTimeLoop) -> None:
        self._name, self._cluster, self._loop = name, cluster, loop
        self.version, self.frozen, self.down = 0, False, False
        self.busy_seconds = self.tokens = 0.0
        self._work, self._since = 0.0, loop.time()
        self._versions: list[tuple[float, int]] = [(0.0, 0)]  # from this work on, this version
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._serial = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self._name

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        if self.down:
            raise ReplicaGone(f"{self.name} is down")
        self._pass()
        began, end = self._work, self._loop.create_future()
        heapq.heappush(self._ends, (began + params.max_tokens, next(self._serial), end))
        self._set_timer()
        await end
        ids = (0,) * params.max_tokens
        return Generation(ids=ids, logprobs=ids, finish="length", spans=self._spans(began, params.max_tokens))

    async def healthy(self) -> bool:
        return not self.down

    async def close(self) -> None:
        pass

    def load(self, version: int) -> None:
        self._pass()
        self.version = version
        self._versions.append((self._work, version))
        del self._versions[:-16]

    def freeze(self, frozen: bool) -> None:
        self._pass()
        self.frozen = frozen
        self._set_timer()

    def fail(self) -> None:
        self._pass()
        self.down = True
        for _, _, end in self._ends:
            if not end.done():
                end.set_exception(ReplicaGone(f"{self.name} died"))
        self._ends.clear()
        self._set_timer()

    def _rate(self) -> float:
        """Tokens a second of each request."""
        if self.frozen or not self._ends:
            return 0.0
        return min(self._cluster.request_rate, self._cluster.replica_rate / len(self._ends))

    def _pass(self) -> None:
        """Account for the time since the last change."""
        passed, self._since = self._loop.time() - self._since, self._loop.time()
        rate = self._rate()
        self._work += passed * rate
        self.tokens += passed * rate * len(self._ends)
        self.busy_seconds += passed if rate else 0.0

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if rate := self._rate():
            self._timer = self._loop.call_later(max(0.0, (self._ends[0][0] - self._work) / rate), self._finish)

    def _finish(self) -> None:
        self._pass()
        while self._ends and self._ends[0][0] <= self._work + 1e-6:
            end = heapq.heappop(self._ends)[2]
            if not end.done():
                end.set_result(None)
        self._set_timer()

    def _spans(self, began: float, tokens: int) -> tuple[WeightSpan, ...]:
        """Which version sampled which tokens."""
        spans, at = [], 0
        for (_, version), (until, _) in itertools.pairwise([*self._versions, (began + tokens + 1, -1)]):
            end = min(tokens, max(at, round(until - began)))
            if end > at:
                spans.append(WeightSpan(version, at, end))
                at = end
        return tuple(spans)


class Played(NamedTuple):
    """A finished episode: its group, and its sampled tokens by version."""

    group: str
    versions: Counter[int]


class SimulatedEngine:
    """Publishes weights to the servers, as `RemoteEngine` does: pause, load, resume."""

    def __init__(self, cluster: Cluster, replicas: int, loop: VirtualTimeLoop, seed: int) -> None:
        self.cluster, self._loop = cluster, loop
        self.servers = [SimulatedServer(f"server-{n}", cluster, loop) for n in range(replicas)]
        settings = RouterSettings(max_in_flight=1024, health_every=10.0, seed=seed)
        self.router = Router(self.servers, settings, max_model_len=1 << 30, clock=loop.time)
        self.weight_version = 0
        self.failures = 0
        self._random = random.Random(seed + 1)

    async def publish(self) -> dict[str, float]:
        self.weight_version += 1
        up = [server for server in self.servers if not server.down]
        for server in up:
            self.router.pause(server.name)
            server.freeze(True)
        await asyncio.sleep(self.cluster.publish_seconds)
        for server in up:
            server.load(self.weight_version)
            server.freeze(False)
            if not server.down:
                self.router.back(server.name)
        return {}

    async def break_servers(self, server: SimulatedServer) -> None:
        """Kill a server now and then, and bring it back with the current weights."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / (self.cluster.hours_between_failures * HOUR)))
            self.failures += 1
            self.router.away(server.name)
            server.fail()
            await asyncio.sleep(self.cluster.repair_seconds)
            server.down = False
            server.load(self.weight_version)
            self.router.back(server.name)


class SimulatedTrainer(AsyncTrainer):
    """The real schedule. Episodes are played against simulated servers, and the update is a sleep."""

    def __init__(
        self, cluster: Cluster, schedule: AsyncSettings, engine: SimulatedEngine, gpus: int, seed: int
    ) -> None:
        # The parts that the schedule does not use (policy, data, run folder) are left out.
        self.settings = TrainerSettings(total_steps=10**6, batch_size=cluster.groups, n=cluster.n)
        self.schedule, self.overlap, self.sampled_ahead, self._batches = schedule, True, None, {}
        self.folder = None  # type: ignore[assignment]
        self.engine = engine  # type: ignore[assignment]
        self.simulated, self.cluster, self.gpus, self.seed = engine, cluster, gpus, seed
        self._admission = GroupAdmission(cluster.groups, schedule.ahead, 0)
        self.admit = None if schedule.fixed_lag else self._admission
        self.staleness: Counter[int] = Counter()
        self.training_seconds = 0.0

    async def _collect(self, step: int, clock: object) -> RolloutResult:  # type: ignore[override]
        jobs = [
            Job(task=TASK, episode_id=f"{step}-{place}-{k}", group=f"{step}-{place}", seed=0, step=step, place=place)
            for place in range(self.cluster.groups)
            for k in range(self.cluster.n)
        ]
        return RolloutResult(episodes=list(await asyncio.gather(*map(self._episode, jobs))))  # type: ignore[arg-type]

    async def _episode(self, job: Job) -> Played:
        async with (self.admit or _at_once)(job):
            rng = random.Random(f"{self.seed} {job.episode_id}")
            versions: Counter[int] = Counter()
            turns = rng.randint(*self.cluster.turns)
            for turn in range(turns):
                params = SamplingParams(max_tokens=max(1, round(_lognormal(rng, self.cluster.turn_tokens))), seed=turn)
                generation = await self.simulated.router.generate((1,), params, session=job.episode_id)
                for span in generation.spans:
                    versions[span.version] += span.end - span.start
                if turn + 1 < turns:
                    await asyncio.sleep(_lognormal(rng, self.cluster.tool_seconds))
            self.simulated.router.dismiss(job.episode_id)
            return Played(job.group, versions)

    def _consume(self, step: int, episodes: Sequence[Any]) -> None:
        """Check what the update trains on: whole groups of this step, in order, and no token older than allowed."""
        groups = list(dict.fromkeys(episode.group for episode in episodes))
        assert groups == [f"{step}-{place}" for place in range(self.cluster.groups)], "a group is missing or moved"
        assert len(episodes) == self.cluster.groups * self.cluster.n, "an episode was lost"
        for episode in episodes:
            for version, tokens in episode.versions.items():
                self.staleness[self.engine.weight_version - version] += tokens
        assert max(self.staleness) <= self.schedule.max_staleness, "a trained token is older than the bound"

    async def _update_aside(self, step: int, episodes: Sequence[Any], clock: object) -> dict[str, float]:  # type: ignore[override]
        if self.schedule.fixed_lag:
            self._consume(step, episodes)
        tokens = sum(sum(episode.versions.values()) for episode in episodes)
        seconds = tokens / (self.cluster.train_rate * self.gpus)
        await asyncio.sleep(seconds)
        self.training_seconds += seconds
        return {}

    async def step(self, step: int) -> None:
        batch = await self._next_batch(step)
        await self._apply(step, batch.episodes, _no_clock)  # type: ignore[arg-type]


class SynchronousTrainer(SimulatedTrainer):
    """All GPUs sample, then all train."""

    async def step(self, step: int) -> None:
        self.admit = None
        episodes = (await self._collect(step, None)).episodes
        self._consume(step, episodes)
        await self._update_aside(step, episodes, None)
        await self.engine.publish()


def _lognormal(rng: random.Random, shape: tuple[float, float]) -> float:
    return shape[0] * rng.lognormvariate(0.0, shape[1])


@asynccontextmanager
async def _at_once(job: Job) -> AsyncIterator[None]:
    yield


@contextmanager
def _no_clock(name: str) -> Iterator[None]:
    yield


class Schedule(NamedTuple):
    """One row of the tables."""

    name: str
    settings: AsyncSettings
    make: Callable[..., SimulatedTrainer] = SimulatedTrainer
    failures: bool = False


SCHEDULES = (
    Schedule("synchronous", AsyncSettings(ahead=0), SynchronousTrainer),
    Schedule("fixed lag", AsyncSettings(fixed_lag=True)),
    Schedule("asynchronous, bound 1", AsyncSettings(ahead=1)),
    Schedule("asynchronous, bound 2", AsyncSettings(ahead=2)),
    Schedule("asynchronous, bound 4", AsyncSettings(ahead=4)),
    Schedule("bound 2 with failures", AsyncSettings(ahead=2), failures=True),
)


class Outcome(NamedTuple):
    """What one simulated run showed after the warm-up. `ends` are the hours at which each step ended."""

    episodes_per_hour: float
    rollout_idle: float
    rollout_capacity: float
    trainer_idle: float
    staleness: dict[int, float]
    failures: int
    failed_tries: int
    requests: int
    ends: list[float]
    real_seconds: float


class _Reading(NamedTuple):
    at: float
    busy: float
    tokens: float
    training: float


async def _simulate(cluster: Cluster, schedule: Schedule, seed: int, loop: VirtualTimeLoop) -> Outcome:
    real = time.perf_counter()
    together = schedule.make is SynchronousTrainer
    rollout_gpus = cluster.gpus if together else cluster.gpus - cluster.trainer_gpus
    engine = SimulatedEngine(cluster, rollout_gpus // cluster.gpus_per_replica, loop, seed)
    trainer_gpus = cluster.gpus if together else cluster.trainer_gpus
    trainer = schedule.make(cluster, schedule.settings, engine, trainer_gpus, seed)
    faults = [asyncio.create_task(engine.break_servers(s)) for s in engine.servers] if schedule.failures else []

    def read() -> _Reading:
        for server in engine.servers:
            server._pass()
        busy, tokens = (fmean(getattr(s, name) for s in engine.servers) for name in ("busy_seconds", "tokens"))
        return _Reading(loop.time(), busy, tokens, trainer.training_seconds)

    ends: list[float] = []
    before = read()
    # The first batches all start at once; the one after them is the first that waits for an update.
    warm_up = max(2, math.ceil(schedule.settings.ahead) + 1)
    for step in range(1, warm_up + cluster.steps + 1):
        await trainer.step(step)
        ends.append(loop.time() / HOUR)
        if step == warm_up:
            before, trainer.staleness = read(), Counter()
    after = read()
    metrics = engine.router.metrics()
    left = [*trainer._batches.values(), *faults]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await engine.router.close()
    seconds = after.at - before.at
    whole = sum(trainer.staleness.values())
    return Outcome(
        episodes_per_hour=cluster.steps * cluster.groups * cluster.n / seconds * HOUR,
        rollout_idle=1 - (after.busy - before.busy) / seconds,
        rollout_capacity=(after.tokens - before.tokens) / seconds / cluster.replica_rate,
        trainer_idle=1 - (after.training - before.training) / seconds,
        staleness={age: tokens / whole for age, tokens in sorted(trainer.staleness.items())},
        failures=engine.failures,
        failed_tries=int(metrics["router/failed_tries"]),
        requests=int(metrics["router/requests"]),
        ends=ends,
        real_seconds=time.perf_counter() - real,
    )


def simulate(cluster: Cluster, schedule: Schedule, seed: int = 0) -> Outcome:
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(_simulate(cluster, schedule, seed, loop))
    finally:
        loop.close()


Outcomes = dict[str, dict[str, dict[str, Any]]]
"""By number of GPUs and name of the schedule."""

INTRO = """# Clusters, simulated

**This is a simulation.** No run of this size has been made. The router (`rally/engines/router/`) and the schedule
(`AsyncTrainer` and `GroupAdmission` in `rally/train/async_trainer.py`) are the real ones. Servers, tools, the update
and the time are simulated: an event loop whose clock jumps to the next timer runs hours in minutes. The results follow
from the assumptions below, and say how the schedules compare, not how fast a cluster is.

```bash
python -m benchmarks.cluster_simulation --json outcomes.json --page docs/cluster_simulation.md
```

Every update checks that its batch has all episodes of all groups of its step, in order, and that no token is older
than the bound of its schedule; the simulation stops if not. It did not stop, with failing servers either.

## Assumptions
"""

ASSUMED = {
    "GPUs": lambda c: f"{c.gpus:,}",
    "of these for the trainer, if asynchronous or with a fixed lag": lambda c: f"{c.trainer_gpus:,}",
    "GPUs of a replica": lambda c: f"{c.gpus_per_replica}",
    "tokens/s of a replica, of one request at most": lambda c: f"{c.replica_rate:,g}, {c.request_rate:g}",
    "tokens/s of training, per GPU": lambda c: f"{c.train_rate:,g}",
    "groups x episodes of a step": lambda c: f"{c.groups} x {c.n}",
    "seconds to publish weights, in which servers pause": lambda c: f"{c.publish_seconds:g}",
    "turns of an episode, uniform": lambda c: f"{c.turns[0]} to {c.turns[1]}",
    "sampled tokens of a turn, lognormal: median, sigma": lambda c: f"{c.turn_tokens[0]:g}, {c.turn_tokens[1]:g}",
    "seconds of a tool call, lognormal: median, sigma": lambda c: f"{c.tool_seconds[0]:g}, {c.tool_seconds[1]:g}",
    "failures of a replica; seconds until it is back": lambda c: (
        f"one in {c.hours_between_failures:g} h; {c.repair_seconds:g}"
    ),
    "measured steps, after those whose batches all start at once": lambda c: f"{c.steps}",
}

NOTES = """
A synchronous run samples on all GPUs, then trains on all of them. The others have trainer and rollout GPUs apart. The
costs of prompts, of changing between sampling and training, and of episodes that move to another server are left out;
the first two favour the synchronous run.

*Idle* GPUs of the rollout have no request; *used* is the share of the tokens that they could sample. A synchronous
trainer is idle while its own GPUs sample.

Simulated on 2026-11-18 with one seed and few steps, so one slow episode changes a row: the rows of bounds 2 and 4 at
1,024 GPUs do not differ by more than that. Failures are 20 times as frequent as one per replica and 10 hours, because
at that rate none fell into the simulated minutes. At 1,024 GPUs the batch is small for the cluster, so the servers'
rate is little used; what the schedules gain there is waiting for the slowest episode of a batch.
"""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _results(outcomes: dict[str, dict[str, Any]]) -> Iterator[str]:
    base = outcomes[SCHEDULES[0].name]["episodes_per_hour"]
    yield _row(["schedule", "episodes/h", "against synchronous", "rollout idle", "rollout used", "trainer idle"])
    yield _row(["---"] * 6)
    for name, one in outcomes.items():
        rate, shares = one["episodes_per_hour"], ("rollout_idle", "rollout_capacity", "trainer_idle")
        yield _row([name, f"{rate:,.0f}", f"{rate / base:.2f}", *(f"{max(0.0, one[key]):.0%}" for key in shares)])
    yield ""
    ages = sorted({int(age) for one in outcomes.values() for age in one["staleness"]})
    yield _row(["trained tokens by age in versions", *map(str, ages), "bound"])
    yield _row(["---"] * (len(ages) + 2))
    bounds = {schedule.name: schedule.settings.max_staleness for schedule in SCHEDULES}
    for name, one in outcomes.items():
        shares = [one["staleness"].get(str(age)) for age in ages]
        yield _row([name, *("" if share is None else f"{share:.1%}" for share in shares), str(bounds[name])])
    yield ""
    failing = {name: one for name, one in outcomes.items() if one["failures"]}
    for name, one in failing.items():
        tries = f"{one['failed_tries']:,} of {one['requests']:,} requests were cut off and sent again"
        yield f"*{name}*: {one['failures']} replicas failed; {tries}. No group was lost."


def page(outcomes: Outcomes) -> str:
    """The page as Markdown."""
    clusters = {gpus: CLUSTERS[int(gpus)] for gpus in outcomes}
    lines = [INTRO, _row(["", *(f"{int(gpus):,} GPUs" for gpus in clusters)]), _row(["---"] * (len(clusters) + 1))]
    lines += [_row([name, *map(tell, clusters.values())]) for name, tell in ASSUMED.items()]
    lines.append(NOTES)
    for gpus, found in outcomes.items():
        title = f"hours at the end of each step, {int(gpus):,} GPUs"
        lines += [f"## {int(gpus):,} GPUs", "", f"![{title}](images/cluster_{gpus}.svg)", "", *_results(found), ""]
    return "\n".join(lines).rstrip() + "\n"


def drawing(outcomes: dict[str, dict[str, Any]]) -> str:
    """When each step ended, as an SVG file of its own."""
    series = [Series(name, tuple(enumerate(one["ends"], 1))) for name, one in outcomes.items()]
    panel = Panel("simulated training", "hours", tuple(series), (1, max(len(s.points) for s in series)))
    colors = "".join(f".c{n} {{ color: {color} }} " for n, color in enumerate(COLORS))
    style = (
        "text { font: 12px sans-serif; fill: #475569; text-anchor: middle } .end { text-anchor: end } "
        ".grid { stroke: #e2e8f0 } .line { fill: none; stroke: currentColor; stroke-width: 2 } "
        f".dot {{ fill: currentColor }} .key {{ text-anchor: start; fill: currentColor }} {colors}"
    )
    keys = "".join(
        f'<text class="key c{n}" x="{LEFT + 12}" y="{TOP + 16 + 15 * n}">{one.name}</text>'
        for n, one in enumerate(series)
    )
    body = svg(panel, 0).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    background = f'<style>{style}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return body.replace(">", f">{background}", 1).replace("</svg>", f"{keys}</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=int, nargs="*", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--json", type=Path, help="where outcomes are kept; those that it has are not simulated again")
    parser.add_argument("--page", type=Path, help="write the tables here, and the curves to images/ beside it")
    asked = parser.parse_args()
    found: Outcomes = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    for gpus, schedule in itertools.product(asked.cluster, SCHEDULES):
        mine = found.setdefault(str(gpus), {})
        if schedule.name in mine:
            continue
        mine[schedule.name] = json.loads(json.dumps(simulate(CLUSTERS[gpus], schedule)._asdict()))
        print(gpus, schedule.name, json.dumps(mine[schedule.name]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1))
    if asked.page:
        (asked.page.parent / "images").mkdir(parents=True, exist_ok=True)
        asked.page.write_text(page(found), encoding="utf-8")
        for name, outcomes in found.items():
            (asked.page.parent / "images" / f"cluster_{name}.svg").write_text(drawing(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
