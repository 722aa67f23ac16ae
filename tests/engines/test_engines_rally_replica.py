"""Whatever a server answers is a whole Generation, the caller's mistake, a server to come back to, or one to leave."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rally.engines import EngineError
from rally.engines.rally_replica import RallyReplica, generation_from_wire, generation_to_wire, sampling_to_wire
from rally.engines.replica import ReplicaBusy, ReplicaGone
from rally.types import Generation, SamplingParams, WeightSpan

GENERATION = Generation(
    ids=(4, 5),
    logprobs=(-0.1, -0.2),
    sampling_logprobs=(-0.1, -0.1),
    finish="stop",
    cached_tokens=3,
    spans=(WeightSpan(1, 0, 1), WeightSpan(2, 1, 2)),
    seconds=0.5,
    first_token_seconds=0.1,
)
WHOLE = generation_to_wire(GENERATION)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], RallyReplica]:
    """A replica whose server answers so."""
    real = httpx.AsyncClient

    def make(answer: Any) -> RallyReplica:
        def client(**options: Any) -> httpx.AsyncClient:
            return real(base_url=options["base_url"], headers=options["headers"], transport=httpx.MockTransport(answer))

        monkeypatch.setattr(httpx, "AsyncClient", client)
        return RallyReplica("http://engine")

    return make


def test_the_wire_loses_nothing() -> None:
    assert generation_from_wire(httpx.Response(200, json=WHOLE).json()) == GENERATION
    params = SamplingParams(top_p=0.9, stop=("a",), stop_ids=(1, 2), seed=3)
    assert SamplingParams.of(httpx.Response(200, json=sampling_to_wire(params)).json()) == params
    assert sampling_to_wire(SamplingParams()) == {}


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (httpx.Response(429, headers={"Retry-After": "2"}, json={"error": {"message": "full"}}), ReplicaBusy, "full"),
        (httpx.Response(503, text="starting"), ReplicaBusy, "starting"),
        (httpx.Response(400, json={"error": {"message": "too long"}}), EngineError, "^too long$"),
        (httpx.Response(401), EngineError, "set RALLY_ENGINE_TOKEN"),
        (httpx.Response(500, text=""), ReplicaGone, "HTTP 500: no reason given"),
        (httpx.Response(200, text="<html>"), ReplicaGone, "does not answer as"),
        (httpx.Response(200, json=[]), ReplicaGone, "does not answer as"),
        (httpx.Response(200, json=WHOLE | {"logprobs": [-0.1]}), ReplicaGone, "2 ids, 1 logprobs"),
        (httpx.Response(200, json=WHOLE | {"logprobs": None}), ReplicaGone, "does not answer as"),
        (httpx.Response(200, json=WHOLE | {"spans": [[1, 0, 1]]}), ReplicaGone, "end at 1 of 2"),
        (httpx.Response(200, json=WHOLE | {"finish": "eos"}), ReplicaGone, "finish is 'eos'"),
        (httpx.ReadError("half closed"), ReplicaGone, "half closed"),
        (httpx.ConnectError("refused"), ReplicaGone, "refused"),
    ],
)
async def test_each_failure_has_its_name(
    served: Callable[[Any], RallyReplica], answer: httpx.Response | Exception, error: type[EngineError], words: str
) -> None:
    def answers(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(error, match=words) as raised:
        await served(answers).generate([1], SamplingParams())
    assert type(raised.value) is error
    if isinstance(raised.value, ReplicaBusy):
        assert raised.value.retry_after in (2.0, 0.0)


async def test_health_and_the_token(served: Callable[[Any], RallyReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLY_ENGINE_TOKEN", "geheim")

    def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(500)
        assert request.headers["authorization"] == "Bearer geheim"
        return httpx.Response(200, json=WHOLE)

    replica = served(answers)
    assert await replica.generate([1], SamplingParams()) == GENERATION
    assert not await replica.healthy()
