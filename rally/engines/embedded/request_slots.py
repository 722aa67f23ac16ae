"""Requests, and the running ones as rows of arrays, so that the cost of a step does not grow with their number.

A slot's tokens are in one of three states: `known` ones have been read back, `planned` ones exist once every launched
step has been read back (at most one more than known), `computed` ones have their KV in pages (or will have, when the
launched steps have run). A new token can be sampled when computed reaches planned.

Arrays are indexed [slot] or [slot, position]; P is the width of the page table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rally.engines.base import SampledTokens
from rally.engines.embedded.radix_cache import TreePosition
from rally.models.token_masks import GrammarState, compressed
from rally.models.vision import Rope, rope_of
from rally.types import ConstrainedSpan, FinishReason, Generation, ImageSpan, Routes, SamplingParams, WeightSpan

PLAIN = rope_of(0, ())
"""Positions of a history without images: the indices of its tokens."""


@dataclass(eq=False, slots=True)
class Request:
    """One generation request.

    `ids` is the prompt and everything sampled before the request last left its slot; `slot` is -1 without one. Image
    tokens have negative ids (see `ImageIds`), `images` are their spans, and `rope` holds the positions of the prompt.
    """

    prompt_len: int
    ids: list[int]
    params: SamplingParams
    seed: int
    rope: Rope
    images: tuple[ImageSpan, ...] = ()
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    indexed: int = 0  # tokens already inserted into the radix cache
    tree_position: TreePosition | None = None  # where they end in its tree
    pure_version: int | None = None  # the weight version that all its KV was computed with; None if mixed
    cuts: list[int] = field(default_factory=list)  # positions at which a chunk ends and a snapshot is taken, ascending
    first_page: int | None = None  # identifies the first page that it computed since it was admitted
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: Exception | None = None  # why it failed; its finish is then `abort`
    routes: Routes | None = None  # the experts of its computed tokens, if they are returned
    state: GrammarState | None = None  # of its grammar, after all tokens that were read back
    arrived: float = 0.0  # times by time.perf_counter
    admitted: float = 0.0  # 0: not yet; the same for first_token
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
        """The maximum length of prompt and response."""
        return self.prompt_len + self.params.max_tokens

    def close_span(self, version: int, sampled: int) -> None:
        """Record that the tokens up to the `sampled`-th that no span covers yet were sampled with `version`."""
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
            routes=self.routes,
            constrained=self._constrained(),
        )

    def _constrained(self) -> ConstrainedSpan | None:
        if self.state is None or not self.sampled:
            return None
        masks = self.state.masks[: self.sampled]
        assert len(masks) == self.sampled, "one mask per sampled token"
        return ConstrainedSpan(0, self.sampled, self.params.grammar, compressed(masks))


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Slots:
    """`count` slots for requests of up to `max_len` tokens."""

    def __init__(self, count: int, max_len: int, page_size: int) -> None:
        self.requests: list[Request | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))
        self._serials = 0
        width = -(-max_len // page_size)
        self.ids = np.zeros((count, max_len), np.int32)
        self.logprobs = np.zeros((count, max_len), np.float32)
        self.sampling_logprobs = np.zeros((count, max_len), np.float32)
        self.table_SP = np.zeros((count, width), np.int32)
        self.pages = np.zeros(count, np.int64)
        self.known = np.zeros(count, np.int64)
        self.planned = np.zeros(count, np.int64)
        self.computed = np.zeros(count, np.int64)
        self.prompt = np.zeros(count, np.int64)
        self.shift = np.zeros(count, np.int64)  # offset of the positions of sampled tokens (images shift them)
        self.limit = np.zeros(count, np.int64)  # the slot is finished when `planned` reaches it; 0: empty
        self.serial = np.zeros(count, np.int64)  # changes whenever a slot gets or loses its request
        self.seed = np.zeros(count, np.uint64)
        self.temperature = np.zeros(count, np.float32)
        self.top_p = np.ones(count)
        self.top_k = np.full(count, -1, np.int64)
        self.min_p = np.zeros(count)
        self.filters = np.zeros(count, np.bool_)
        self.strings = np.zeros(count, np.bool_)  # has stop strings
        self.constrained = np.zeros(count, np.bool_)  # has a grammar
        self.stops = np.full((count, 1), -1, np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reset(self) -> None:
        """Assign slots in the order of a new engine again; all must be free."""
        assert self.num_free == len(self.requests), "a request still has a slot"
        self._free = list(range(len(self.requests) - 1, -1, -1))

    def clear(self) -> None:
        """Empty every slot. The requests are not touched."""
        self.requests = [None] * len(self.requests)
        self.serial[:] = self.limit[:] = 0
        self._free = list(range(len(self.requests) - 1, -1, -1))

    def enter(self, request: Request, computed: int, eos_ids: frozenset[int]) -> None:
        """Assign a slot to a request; the KV of its first `computed` tokens is in its pages."""
        slot = self._free.pop()
        request.slot, self.requests[slot] = slot, request
        self._serials += 1
        params, length = request.params, len(request.ids)
        self.ids[slot, :length] = request.ids
        sampled = slice(request.prompt_len, length)
        self.logprobs[slot, sampled] = request.logprobs
        self.sampling_logprobs[slot, sampled] = request.sampling_logprobs
        self.set_pages(request)
        self.known[slot] = self.planned[slot] = length
        self.computed[slot] = computed
        self.prompt[slot], self.limit[slot] = request.prompt_len, request.total_tokens
        self.shift[slot] = request.rope.shift
        self.serial[slot], self.seed[slot] = self._serials, request.seed
        self.temperature[slot] = params.temperature
        self.top_p[slot], self.top_k[slot], self.min_p[slot] = params.top_p, params.top_k, params.min_p
        self.filters[slot] = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
        self.strings[slot] = bool(params.stop)
        self.constrained[slot] = request.state is not None
        self._set_stops(slot, [*params.stop_ids, *(() if params.ignore_eos else eos_ids)])

    def _set_stops(self, slot: int, stops: list[int]) -> None:
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops

    def set_pages(self, request: Request, have: int = 0) -> None:
        """Write a request's pages, from index `have` on, into its row of the page table."""
        self.table_SP[request.slot, have : len(request.pages)] = request.pages[have:]
        self.pages[request.slot] = len(request.pages)

    def leave(self, request: Request) -> None:
        """Free the slot; the request keeps the tokens that were read back."""
        slot = request.slot
        known = int(self.known[slot])
        request.ids = self.ids[slot, :known].tolist()
        request.logprobs = self.logprobs[slot, request.prompt_len : known].tolist()
        request.sampling_logprobs = self.sampling_logprobs[slot, request.prompt_len : known].tolist()
        self.serial[slot], self.limit[slot] = 0, 0
        self.requests[slot], request.slot = None, -1
        self._free.append(slot)

    def push(self, slots: Ints, ids: Ints, logprobs: Floats, sampling_logprobs: Floats) -> None:
        """Append one sampled token to each of `slots`."""
        at = self.known[slots]
        self.ids[slots, at] = ids
        self.logprobs[slots, at] = logprobs
        self.sampling_logprobs[slots, at] = sampling_logprobs
        self.known[slots] = at + 1

    def stopped(self, slots: Ints, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which of the tokens `ids` are stop tokens of their request."""
        hit: npt.NDArray[np.bool_] = (self.stops[slots] == ids[:, None]).any(axis=1)
        return hit

    def history(self, request: Request) -> list[int]:
        """The tokens of a running request that were read back, prompt included."""
        return self.ids[request.slot, : self.known[request.slot]].tolist()  # type: ignore[no-any-return]

    def sampled(self, request: Request, start: int) -> SampledTokens:
        """The tokens of a running request after its first `start` sampled ones, as far as they were read back."""
        new = slice(request.prompt_len + start, int(self.known[request.slot]))
        return SampledTokens(self.ids[request.slot, new].tolist(), self.logprobs[request.slot, new].tolist())
