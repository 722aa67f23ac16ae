"""A response of `rally serve engine` is a complete Generation or an error."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rally.engines import EngineError
from rally.engines.base import ReplicaGone
from rally.engines.remote.rally_api import Rally
from rally.engines.remote.server_api import GenerationRequest
from rally.engines.remote.token_protocol import generation_to_wire, sampling_to_wire
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
    queued_seconds=0.05,
)
WHOLE: dict[str, Any] = json.loads(json.dumps(generation_to_wire(GENERATION)))
ASKED = GenerationRequest(id="a", prompt_ids=(1,), params=SamplingParams(), before=1, after=1, salt="")


def test_the_wire_loses_nothing() -> None:
    heard = Rally().generation(WHOLE, ASKED)
    assert replace(heard, seconds=0.5) == GENERATION, "the seconds are the caller's own"
    params = SamplingParams(top_p=0.9, stop=("a",), stop_ids=(1, 2), seed=3)
    assert SamplingParams.of(json.loads(json.dumps(sampling_to_wire(params)))) == params
    assert sampling_to_wire(SamplingParams()) == {}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "has no"),
        (WHOLE | {"logprobs": [-0.1]}, "1 log-probabilities for 2"),
        (WHOLE | {"logprobs": None}, "no log-probabilities"),
        (WHOLE | {"logprobs": [-0.1, float("nan")]}, "not a finite number"),
        (WHOLE | {"spans": [[1, 0, 1]]}, "do not cover"),
        (WHOLE | {"spans": [[1, 0, "2"]]}, "do not cover"),
        (WHOLE | {"spans": 2}, "weight versions are no list"),
        (WHOLE | {"logprobs": [-0.1, -(10**400)]}, "too large a number"),
        (WHOLE | {"finish": "eos"}, "unknown finish reason 'eos'"),
    ],
)
def test_what_is_not_whole_is_not_used(answer: Any, words: str) -> None:
    with pytest.raises(ReplicaGone, match=words):
        Rally().generation(answer, ASKED)


def test_a_token_goes_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLY_ENGINE_TOKEN", "ключ")
    assert Rally().headers() == {"Authorization": "Bearer ключ"}
    monkeypatch.delenv("RALLY_ENGINE_TOKEN")
    assert Rally().headers() == {}
    monkeypatch.setenv("RALLY_ENGINE_TOKEN", "secret\n")
    with pytest.raises(EngineError, match="which no header can carry"):
        Rally().headers()
