"""One request: its tokens when it is not running, and what remains of it when it ends.

While a request runs, its tokens live in a row of `Slots`; they come back here when it finishes or is preempted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rally.engines.embedded.prefixes import Place
from rally.engines.embedded.vision import Rope, rope_of
from rally.types import FinishReason, Generation, ImageSpan, SamplingParams, WeightSpan

PLAIN = rope_of(0, ())
"""Positions of a history without images: the numbers of its tokens."""


@dataclass(eq=False, slots=True)
class Request:
    """`ids` is the prompt and everything sampled before it last left its slot (-1: it has none). Those of an image are
    its name, a negative number; `images` says which they are, and `rope` where the tokens of the prompt stand."""

    prompt_len: int
    ids: list[int]
    params: SamplingParams
    seed: int
    rope: Rope
    images: tuple[ImageSpan, ...] = ()
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    indexed: int = 0  # tokens already handed to the prefix index
    place: Place | None = None  # and where there
    pure_version: int | None = None  # the one weight version all its KV was computed under; None when mixed
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None
    arrived: float = 0.0  # times by time.perf_counter
    admitted: float = 0.0  # 0: not yet, as for the first token
    first_token: float = 0.0

    @classmethod
    def new(
        cls,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        arrived: float,
        images: Sequence[ImageSpan] = (),
    ) -> Request:
        length = len(prompt_ids)
        rope = rope_of(length, images) if images else PLAIN
        return cls(length, list(prompt_ids), params, seed, rope, tuple(images), arrived=arrived)

    @property
    def sampled(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def total_tokens(self) -> int:
        """The most tokens it can ever have."""
        return self.prompt_len + self.params.max_tokens

    def close_span(self, version: int, sampled: int) -> None:
        """Everything up to the `sampled`-th token that no span covers yet was sampled under `version`."""
        start = self.spans[-1].end if self.spans else 0
        if sampled == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(WeightSpan(version, start, sampled))

    def result(self) -> Generation:
        assert self.finish is not None, "still running"
        now = time.perf_counter()
        return Generation(
            ids=tuple(self.ids[self.prompt_len :]),
            logprobs=tuple(self.logprobs),
            sampling_logprobs=tuple(self.sampling_logprobs),
            finish=self.finish,
            cached_tokens=self.cached_tokens,
            spans=tuple(self.spans),
            seconds=now - self.arrived,
            first_token_seconds=(self.first_token or now) - self.arrived,
            queued_seconds=(self.admitted or now) - self.arrived,
        )
