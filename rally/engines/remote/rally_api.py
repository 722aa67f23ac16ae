"""Our own dialect: `rally serve engine --accept-weights` as a rollout server, weights by /load_weights from a folder.

Its engine is the embedded one, so spans, log-probabilities and seeds mean what they mean in process. What happens to
requests in flight is decided when it starts; one that disagrees with the run refuses the weights.
"""

from __future__ import annotations

import os
from typing import Any

from rally.engines.base import EngineError
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.server_api import (
    TOKEN_VARIABLE,
    Asked,
    HttpCall,
    InFlight,
    Launch,
    Source,
    as_list,
    flags,
    sampling_to_wire,
    take,
    whole,
)
from rally.types import Generation


class Rally:
    """The `Dialect` of Rally."""

    name = "rally"

    def generate(self, request: Asked) -> HttpCall:
        body = {"prompt_ids": as_list(request.prompt_ids), "sampling": sampling_to_wire(request.params)}
        return HttpCall("/generate", body)

    def generation(self, answer: Any, request: Asked) -> Generation:
        spans = take(answer, "spans")
        return whole(
            request,
            take(answer, "ids"),
            take(answer, "logprobs"),
            take(answer, "finish"),
            spans=[{"version": take(s, 0), "start": take(s, 1), "end": take(s, 2)} for s in spans],
            cached_tokens=take(answer, "cached_tokens"),
            queued_seconds=take(answer, "queued_seconds"),
            first_token_seconds=take(answer, "first_token_seconds"),
            sampling_logprobs=take(answer, "sampling_logprobs"),
        )

    def abort(self, request_id: str) -> HttpCall | None:
        return None

    def load(self, source: Source, version: int, in_flight: InFlight) -> tuple[HttpCall, ...]:
        return (_load(source, version, in_flight),)

    def sleep(self) -> tuple[HttpCall, ...]:
        raise EngineError("a server of Rally's own cannot sleep; set rollout.free_cache_engine=false")

    def wake(self, source: Source, version: int) -> tuple[HttpCall, ...]:
        raise AssertionError("it never sleeps")

    def resume(self) -> HttpCall:
        return HttpCall("/health")

    def window(self) -> HttpCall:
        return HttpCall("/health")

    def window_of(self, answer: Any) -> int | None:
        length = answer.get("max_model_len") if isinstance(answer, dict) else None
        return length if isinstance(length, int) else None

    def command(self, launch: Launch) -> list[str]:
        options: dict[str, Any] = {
            "port": launch.port,
            "dtype": launch.dtype,
            "max_model_len": launch.max_model_len,
            "max_num_seqs": launch.max_num_seqs,
            "max_num_batched_tokens": launch.max_num_batched_tokens,
            "max_requests": 4 * launch.max_num_seqs,
            "memory": launch.memory_share,
            "seed": launch.seed,
            "accept_weights": True,
            "in_flight": launch.in_flight,
        }
        words = flags({**options, **launch.extra}, negated=True)
        return [launch.python, "-m", "rally.cli", "serve", "engine", launch.folder, *words]

    def environment(self, by_handles: bool = False) -> dict[str, str]:
        return {}

    def headers(self) -> dict[str, str]:
        token = os.environ.get(TOKEN_VARIABLE)
        if token and any(ord(letter) < ord(" ") for letter in token):
            raise EngineError(f"{TOKEN_VARIABLE} holds a line end or the like, which no request can carry; take it out")
        return {"Authorization": f"Bearer {token}"} if token else {}


class RallyReplica(ServerReplica):
    """A running `rally serve engine` that samples from whatever weights it has."""

    def __init__(self, url: str, settings: ClientSettings | None = None) -> None:
        super().__init__(url, Rally(), settings)
        self.version, self.serving = 0, True


def _load(source: Source, version: int, in_flight: InFlight) -> HttpCall:
    if not isinstance(source, str):
        raise EngineError("a server of Rally's own takes weights from a folder alone")
    return HttpCall("/load_weights", {"folder": source, "version": version, "in_flight": in_flight})
