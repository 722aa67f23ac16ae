"""The simulated cluster runs the real router and schedule: bounds hold and nothing is lost."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks.cluster_simulation import (
    CLUSTERS,
    SCHEDULES,
    SimulatedServer,
    VirtualTimeLoop,
    drawing,
    main,
    page,
    simulate,
)
from rally.train.async_trainer import AsyncSettings
from rally.types import SamplingParams

SMALL = dataclasses.replace(CLUSTERS[8], gpus=4, trainer_gpus=2, groups=6, n=2, steps=2)
BY_NAME = {schedule.name: schedule for schedule in SCHEDULES}


def test_staleness_never_exceeds_its_bound_and_asynchronous_steps_are_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = {schedule.name: simulate(SMALL, schedule)._asdict() for schedule in SCHEDULES}
    for schedule in SCHEDULES:
        assert max(outcomes[schedule.name]["staleness"]) <= schedule.settings.max_staleness
    assert outcomes["synchronous"]["staleness"] == {0: 1.0}
    assert outcomes["fixed lag"]["staleness"] == {1: 1.0}
    rates = [outcomes[name]["episodes_per_hour"] for name in ("synchronous", "asynchronous, bound 2")]
    assert rates[1] > rates[0]
    written = page({"8": json.loads(json.dumps(outcomes))})
    assert "| asynchronous, bound 4 |" in written and "fixed lag" in drawing(outcomes)
    kept, place = tmp_path / "outcomes.json", tmp_path / "new" / "page.md"
    kept.write_text(json.dumps({"8": outcomes}))
    monkeypatch.setattr(sys, "argv", ["simulation", "--cluster", "8", "--json", str(kept), "--page", str(place)])
    main()  # what is kept is not simulated again
    assert place.read_text() == written and (tmp_path / "new/images/cluster_8.svg").exists()


def test_failing_servers_lose_no_group() -> None:
    failing = dataclasses.replace(SMALL, hours_between_failures=0.03, repair_seconds=30.0)
    outcome = simulate(failing, BY_NAME["bound 2 with failures"])  # every update checks that its batch is whole
    assert outcome.failures > 2 and outcome.failed_tries > 0


def test_a_token_that_is_too_old_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncSettings, "max_staleness", 0)
    with pytest.raises(AssertionError, match="older than the bound"):
        simulate(SMALL, BY_NAME["asynchronous, bound 1"])


def test_a_server_shares_its_rate_and_versions_are_those_of_the_time() -> None:
    loop = VirtualTimeLoop()
    cluster = dataclasses.replace(SMALL, replica_rate=20.0, request_rate=15.0)

    async def ask() -> None:
        server = SimulatedServer("one", cluster, loop)
        first = asyncio.create_task(server.generate((1,), SamplingParams(max_tokens=100)))
        second = asyncio.create_task(server.generate((1,), SamplingParams(max_tokens=50)))
        await asyncio.sleep(2.0)
        server.load(1)
        await second
        assert loop.time() == pytest.approx(5.0), "two requests of a server of 20 tokens/s get 10 each"
        assert [(s.version, s.start, s.end) for s in (await first).spans] == [(0, 0, 20), (1, 20, 100)]
        assert loop.time() == pytest.approx(5.0 + 50 / 15), "alone it gets its own limit"

    loop.run_until_complete(ask())
    with pytest.raises(RuntimeError, match="the simulated run hangs"):
        loop.run_until_complete(loop.create_future())
    loop.close()
