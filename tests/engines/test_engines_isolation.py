"""A request that fails in the engine's step fails alone; weights that are NaN stop nothing for good."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_models import make_model

from rally.engines import EmbeddedEngine, EngineError, EngineSettings
from rally.engines.embedded.request_slots import Request
from rally.types import SamplingParams

POISON = 13
GOOD = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


def params(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, seed=seed, ignore_eos=True, **more)


def engine_of(**settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(make_model(), EngineSettings(max_model_len=64, max_num_seqs=8, **settings), num_pages=64)


def break_at(engine: EmbeddedEngine, place: str) -> None:
    """Make the step fail whenever a prompt that begins with POISON takes part in it."""
    core = engine.core

    def poisoned() -> bool:
        return any(r is not None and r.ids[0] == POISON for r in core.slots.requests)

    if place == "forward":
        launch = core.runner.launch

        def failing(plan: Any) -> Any:
            if poisoned():
                raise RuntimeError("the kernel failed")
            return launch(plan)

        core.runner.launch = failing  # type: ignore[method-assign]
    elif place == "admission":
        enter = core.slots.enter

        def refusing(request: Request, *rest: Any) -> None:
            enter(request, *rest)
            if request.ids[0] == POISON:
                raise TypeError("half entered")

        core.slots.enter = refusing  # type: ignore[method-assign]
    else:
        head = core._read_back

        def reading(launched: Any) -> Any:
            if poisoned():
                raise IndexError("cannot be read back")
            return head(launched)

        core._read_back = reading  # type: ignore[method-assign]


@pytest.mark.drill(
    "reliability", "One request makes a batched step raise", "It fails alone; the others go on unchanged"
)
@pytest.mark.parametrize("backend", ["gather", "paged"])  # paged works one step ahead
@pytest.mark.parametrize("place", ["forward", "admission", "read back"])
async def test_a_request_that_breaks_the_step_fails_alone(place: str, backend: str) -> None:
    engine = engine_of(backend=backend)
    expected = [await engine.generate(p, params(i)) for i, p in enumerate(GOOD)]
    break_at(engine, place)
    for _ in range(2):
        bad = [asyncio.create_task(engine.generate([POISON, 2], params(9))) for _ in range(2)]
        good = [asyncio.create_task(engine.generate(p, params(i))) for i, p in enumerate(GOOD)]
        outcomes = await asyncio.gather(*good, *bad, return_exceptions=True)
        for outcome in outcomes[len(GOOD) :]:
            assert isinstance(outcome, (RuntimeError, TypeError, IndexError)), outcome
        for outcome, wanted in zip(outcomes, expected, strict=False):
            assert not isinstance(outcome, BaseException), outcome
            assert outcome.ids == wanted.ids and outcome.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
            assert [(s.start, s.end) for s in outcome.spans] == [(0, 12)]
    assert engine.failure is None and not engine.stopped
    assert engine.core.pool.num_free + len(engine.core.index) == engine.core.pool.num_pages
    await engine.close()


async def test_a_tokenizer_that_fails_at_a_stop_string_fails_its_request_only() -> None:
    def decode(ids: Sequence[int]) -> str:
        raise OverflowError("no such token")

    engine = EmbeddedEngine(make_model(), EngineSettings(max_model_len=64, max_num_seqs=8), num_pages=64, decode=decode)
    outcomes = await asyncio.gather(
        *(engine.generate(p, params(i, stop=("x",) if i == 1 else ())) for i, p in enumerate(GOOD)),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], OverflowError)
    assert [len(o.ids) for i, o in enumerate(outcomes) if i != 1 and not isinstance(o, BaseException)] == [12, 12]
    await engine.close()


@pytest.mark.drill("reliability", "Weights that are NaN", "Requests fail with the reason; good weights end it")
@pytest.mark.parametrize("backend", ["gather", "paged"])
async def test_an_engine_with_nan_weights_works_again_after_good_ones(backend: str) -> None:
    engine = engine_of(backend=backend)
    wanted = await engine.generate(GOOD[0], params(0))
    weight = engine.core.model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad(), engine.updating():
        weight.fill_(float("nan"))
    for _ in range(2):
        outcomes = await asyncio.gather(
            *(engine.generate(p, params(i)) for i, p in enumerate(GOOD)), return_exceptions=True
        )
        assert all(isinstance(o, EngineError) and "not finite" in str(o) for o in outcomes)
        assert engine.failure is not None and not engine.stopped
    with torch.no_grad(), engine.updating():
        weight.copy_(kept)
    assert engine.failure is None
    assert (await engine.generate(GOOD[0], params(0))).ids == wanted.ids
    await engine.close()


@pytest.mark.drill("reliability", "The thread of the embedded engine fails", "Every request fails with the reason")
@pytest.mark.parametrize("place", ["admission", "delivery", "update"])
@pytest.mark.parametrize(
    "failure", [AssertionError("impossible"), StopIteration("impossible"), SystemExit("impossible")]
)
async def test_nobody_waits_for_an_engine_whose_thread_has_failed(
    place: str, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise failure

    engine = engine_of(isolated=True) if place == "admission" else engine_of()
    if place == "admission":
        monkeypatch.setattr(engine.core, "reset", fail)
    elif place == "delivery":
        monkeypatch.setattr(Request, "result", fail)
    else:
        monkeypatch.setattr(engine.core, "step", list)  # the requests stay with the engine
    asked = [asyncio.create_task(engine.generate(p, params(i))) for i, p in enumerate(GOOD)]
    if place == "update":  # in the thread of the trainer, which drains the engine
        while len(engine._waiters) < len(GOOD):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(engine.core, "drain", fail)
        monkeypatch.setattr(engine.core, "recover", fail)
        with pytest.raises((type(failure), RuntimeError)), engine.updating():
            raise AssertionError("nothing is updated")
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    words = f"the engine has stopped because a step failed: {type(failure).__name__}: impossible"
    assert [str(outcome) for outcome in outcomes if isinstance(outcome, EngineError)] == [words] * 3
    with pytest.raises(EngineError, match="the engine has stopped"):
        await engine.generate(GOOD[0], params(0))
    assert engine.stopped
    await engine.close()
