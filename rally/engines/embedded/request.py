"""One request inside the engine: its tokens so far, and how much of their KV is in pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rally.types import FinishReason, Generation, SamplingParams, WeightSpan


@dataclass(eq=False, slots=True)
class Request:
    """`ids` is the prompt and everything sampled; the first `computed` of them have their KV in `pages`."""

    prompt_len: int
    ids: list[int]
    params: SamplingParams
    seed: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    indexed: int = 0  # pages already handed to the prefix index
    pure_version: int | None = None  # the one weight version all its KV was computed under; None when mixed
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    cached_tokens: int = 0
    admitted_once: bool = False
    finish: FinishReason | None = None
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0

    @classmethod
    def new(cls, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Request:
        return cls(prompt_len=len(prompt_ids), ids=list(prompt_ids), params=params, seed=seed)

    @property
    def sampled(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that must still be run through the model before the next one can be sampled."""
        return len(self.ids) - self.computed

    @property
    def total_tokens(self) -> int:
        """The most tokens it can ever have."""
        return self.prompt_len + self.params.max_tokens

    def push(self, token: int, logprob: float, sampling_logprob: float, version: int) -> None:
        """Append one sampled token with everything that belongs to it."""
        at = self.sampled
        if at == 0:
            self.first_token = time.perf_counter()
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = WeightSpan(version, self.spans[-1].start, at + 1)
        else:
            self.spans.append(WeightSpan(version, at, at + 1))

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
        )
