"""What `rally serve engine` is asked and answers over HTTP: token ids in, a whole `Generation` out.

    POST /generate  {"prompt_ids": [int, ...], "sampling": {name: value, ...}}
      -> {"ids": [...], "logprobs": [...], "sampling_logprobs": [...], "finish": "stop" | "length" | "abort",
          "spans": [[version, start, end], ...], "cached_tokens": n, "seconds": s, "first_token_seconds": s,
          "queued_seconds": s}
    GET  /health    200 while it can sample

`sampling` has the fields of `SamplingParams`, those that are at their defaults left out. A refusal is
`{"error": {"message": ...}}`: 4xx is the caller's mistake, 429 and 503 mean "later" and carry `Retry-After`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rally.types import Generation, SamplingParams

TOKEN_VARIABLE = "RALLY_ENGINE_TOKEN"


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    return {f.name: value for f in fields(params) if (value := getattr(params, f.name)) != f.default}


def generation_to_wire(generation: Generation) -> dict[str, Any]:
    spans = [[span.version, span.start, span.end] for span in generation.spans]
    return {f.name: getattr(generation, f.name) for f in fields(generation)} | {"spans": spans}
