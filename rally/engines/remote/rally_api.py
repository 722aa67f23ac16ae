"""The API of Rally's own server: `rally serve engine --accept-weights`. Weights are loaded from a folder, from
deltas, or from both, or received in a broadcast.

The server runs the embedded engine, so spans, log-probabilities and seeds have the same meaning as in process. Its
policy for requests in flight is set when it starts; a server whose policy differs from the run's rejects weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rally.engines.base import EngineError, ReplicaGone
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.server_api import (
    TOKEN_VARIABLE,
    GenerationRequest,
    HttpCall,
    InFlight,
    Launch,
    Source,
    WeightBroadcast,
    WeightChain,
    as_list,
    checked_generation,
    flags,
    get_field,
)
from rally.engines.remote.token_protocol import (
    constrained_of_wire,
    images_to_wire,
    routes_of_wire,
    sampling_to_wire,
)
from rally.types import Generation

IMAGE_BODY_MB = 128  # of a request with images


class Rally:
    """The `ServerApi` of Rally's own server."""

    name = "rally"
    stops_at_strings = True
    applies_grammars = True
    takes_images = True

    def generate(self, request: GenerationRequest) -> HttpCall:
        body: dict[str, Any] = {"prompt_ids": as_list(request.prompt_ids), "sampling": sampling_to_wire(request.params)}
        if request.images:
            body["images"] = images_to_wire(request.images)
        return HttpCall("/generate", body)

    def generation(self, answer: Any, request: GenerationRequest) -> Generation:
        spans, ids = get_field(answer, "spans"), get_field(answer, "ids")
        allowed = ids if isinstance(ids, list) else []  # anything else is refused below
        if not isinstance(spans, list):
            raise ReplicaGone("the server's weight versions are no list")
        return checked_generation(
            request,
            ids,
            get_field(answer, "logprobs"),
            get_field(answer, "finish"),
            spans=[{"version": get_field(s, 0), "start": get_field(s, 1), "end": get_field(s, 2)} for s in spans],
            cached_tokens=get_field(answer, "cached_tokens"),
            queued_seconds=get_field(answer, "queued_seconds"),
            first_token_seconds=get_field(answer, "first_token_seconds"),
            sampling_logprobs=get_field(answer, "sampling_logprobs"),
            routes=routes_of_wire(answer.get("routes")),
            constrained=constrained_of_wire(answer.get("masks"), request.params.grammar, allowed),
        )

    def abort(self, request_id: str) -> HttpCall | None:
        return None

    def load(self, source: Source, version: int, in_flight: InFlight) -> tuple[HttpCall, ...]:
        return (_load(source, version, in_flight),)

    def join(self, invitation: Mapping[str, Any]) -> HttpCall:
        return HttpCall("/join_weights", invitation)

    def sleep(self) -> tuple[HttpCall, ...]:
        raise EngineError(
            "a `rally serve engine` server cannot release its memory; set rollout.free_cache_engine=false"
        )

    def wake(self, source: Source, version: int) -> tuple[HttpCall, ...]:
        raise AssertionError("this server never sleeps")

    def resume(self) -> HttpCall:
        return HttpCall("/health")

    def window(self) -> HttpCall:
        return HttpCall("/health")

    def window_of(self, answer: Any) -> int | None:
        length = answer.get("max_model_len") if isinstance(answer, dict) else None
        return length if isinstance(length, int) else None

    def command(self, launch: Launch) -> list[str]:
        options: dict[str, Any] = {
            "host": launch.host,
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
            "return_routes": launch.routes or None,
            **({"image_processor": launch.images, "max_body_mb": IMAGE_BODY_MB} if launch.images else {}),
        }
        arguments = flags({**options, **launch.extra}, negated=True)
        return [launch.python, "-m", "rally.cli", "serve", "engine", launch.folder, *arguments]

    def environment(self, by_handles: bool = False) -> dict[str, str]:
        return {}

    def headers(self) -> dict[str, str]:
        token = os.environ.get(TOKEN_VARIABLE)
        if token and any(ord(character) < ord(" ") for character in token):
            raise EngineError(
                f"{TOKEN_VARIABLE} contains a control character such as a newline, which no header can carry; remove it"
            )
        return {"Authorization": f"Bearer {token}"} if token else {}


class RallyReplica(ServerReplica):
    """A running `rally serve engine`, used with the weights that it has."""

    def __init__(self, url: str, settings: ClientSettings | None = None) -> None:
        super().__init__(url, Rally(), settings)
        self.version, self.serving = 0, True


def _load(source: Source, version: int, in_flight: InFlight) -> HttpCall:
    if isinstance(source, WeightChain):
        files: dict[str, Any] = {"folder": source.folder, "deltas": list(source.deltas)}
    elif isinstance(source, WeightBroadcast):
        files = {"broadcast": source._asdict()}
    elif isinstance(source, str):
        files = {"folder": source}
    else:
        raise EngineError("a `rally serve engine` server loads no weights by CUDA IPC")
    return HttpCall("/load_weights", {**files, "version": version, "in_flight": in_flight})
