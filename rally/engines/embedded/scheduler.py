"""Decides what the next forward runs: decode tokens first, then prefill chunks under the token budget.

Guarantees: a request that fits the pool at all finishes (when pages run out, the youngest one gives its pages back and
is computed again later), and of several requests with the same prefix only one computes it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rally.engines.base import EngineError
from rally.engines.embedded.kv_cache import PagePool
from rally.engines.embedded.radix_cache import WIDTH, Match, RadixCache, token_bytes
from rally.engines.embedded.request_slots import Ints, Request, Slots

BUSY = 64  # decodes of a step that is worth keeping free of chunks
ENOUGH = 4  # requests that share such a step's extra cost


class Chunk(NamedTuple):
    """Run tokens [start, start + tokens) of the request in `slot`; `samples` if they reach its last known token."""

    slot: int
    start: int
    tokens: int
    samples: bool


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One forward: a token of each slot in `decodes`, then the chunks. Page copies (from, to) come before it."""

    decodes: Ints
    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def samplers(self) -> Ints:
        """The slots that get a new token, in the order of the plan."""
        if not self.chunks:
            return self.decodes
        return np.append(self.decodes, [c.slot for c in self.chunks if c.samples]).astype(np.int64)

    def __bool__(self) -> bool:
        return bool(len(self.decodes) or self.chunks)


class Scheduler:
    """Waiting and running requests, and the pages they hold.

    Where the attention kernel reads scattered pages (`share_pages`), a request shares the pages of a cached prefix and
    takes new ones as it grows. Where it does not, a request owns a consecutive run for all it may ever need, into which
    the prefix is copied. With `patience`, a few requests wait so many steps for others to be taken in with them.
    """

    def __init__(
        self,
        pool: PagePool,
        index: RadixCache,
        slots: Slots,
        *,
        max_num_batched_tokens: int,
        share_pages: bool,
        patience: int = 0,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.pool, self.index, self.slots = pool, index, slots
        self.page_size = index.page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.share_pages = share_pages
        self.patience = patience
        self.eos_ids = eos_ids
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.version = 0
        self.preemptions = 0
        self._copies: list[tuple[int, int]] = []
        self._held = 0  # steps for which waiting requests were held back

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        if self._pages_for(request.total_tokens) > self.pool.num_pages:
            raise EngineError(
                f"a request of {request.prompt_len} prompt tokens and up to {request.params.max_tokens} new ones can "
                f"never fit the {self.pool.num_pages * self.page_size} tokens of KV memory; shorten it or give "
                "the engine more memory (rollout.gpu_memory_utilization)"
            )
        self.waiting.append(request)

    def plan(self) -> StepPlan:
        """The work of the next step. Empty when nothing can be done before a launched step has been read back."""
        slots = self.slots
        wanting = slots.planned < slots.limit
        self._grow(np.flatnonzero(wanting & (slots.planned - slots.computed == 1)))
        wanting = slots.planned < slots.limit  # growing may have preempted some
        left = np.where(wanting, slots.planned - slots.computed, 0)
        decodes = np.flatnonzero(left == 1)
        budget = self.max_num_batched_tokens - len(decodes)
        chunks: list[Chunk] = []
        unfinished = (r for r in self.running if left[r.slot] > 1) if (left > 1).any() else ()
        for request in unfinished:
            budget = self._plan_chunk(request, budget, chunks)
        if self.waiting and not self._hold_back(len(decodes), chunks):
            self._admit(budget, chunks)
        copies, self._copies = self._copies, []
        plan = StepPlan(decodes=decodes, chunks=chunks, copies=copies)
        self._advance(plan)
        return plan

    def _hold_back(self, decodes: int, chunks: list[Chunk]) -> bool:
        """Whether a few new requests wait for others, `patience` steps at most: on a GPU a step that carries any chunk
        takes a quarter longer than one of decodes alone, and a step costs everybody."""
        alone = decodes >= BUSY and not chunks and len(self.waiting) < ENOUGH
        self._held = self._held + 1 if alone and self._held < self.patience else 0
        return self._held > 0

    def _advance(self, plan: StepPlan) -> None:
        """Count the planned tokens as computed, and those to be sampled as planned."""
        slots = self.slots
        slots.computed[plan.decodes] += 1
        for chunk in plan.chunks:
            slots.computed[chunk.slot] += chunk.tokens
        slots.planned[plan.samplers] += 1

    def _plan_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        slots, slot = self.slots, request.slot
        start, planned = int(slots.computed[slot]), int(slots.planned[slot])
        count = min(planned - start, budget)
        if count > 0:
            chunks.append(Chunk(slot, start, count, start + count == planned))
        return budget - max(0, count)

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Take in waiting requests. One whose next page is being computed by another waits one step and shares it."""
        slots = self.slots
        computing = {
            self._first_page(token_bytes(slots.ids[c.slot, : slots.known[c.slot]]), c.start) for c in chunks
        } - {None}
        passed_over: list[Request] = []
        while self.waiting and budget > 0 and slots.num_free:
            request = self.waiting.popleft()
            tokens = token_bytes(request.ids)
            cached = self.index.match(self.version, tokens[:-WIDTH])
            page = self._first_page(tokens, cached.tokens)
            if page in computing:
                passed_over.append(request)
                continue
            if not self._place(request, cached):
                self.waiting.appendleft(request)
                break
            self.running.append(request)
            if page is not None:
                computing.add(page)
            budget = self._plan_chunk(request, budget, chunks)
        self.waiting.extendleft(reversed(passed_over))

    def _place(self, request: Request, cached: Match) -> bool:
        """Give a waiting request a slot and its pages; False if there are not enough."""
        self.pool.share(cached.pages)
        placed = self._shared_pages(request, cached) if self.share_pages else self._own_pages(request, cached)
        if placed:
            request.indexed, request.place = cached.tokens, cached.place
            request.pure_version = self.version
            self.slots.enter(request, cached.tokens, self.eos_ids)
            if not request.admitted:
                request.cached_tokens = cached.tokens
                request.admitted = time.perf_counter()
        self.pool.release(cached.pages)
        if not placed and cached.pages and not self.running:  # even the prefix it would have used must give way
            return self._place(request, Match([], 0))
        return placed

    def _own_pages(self, request: Request, cached: Match) -> bool:
        pages = self._take(self._pages_for(request.total_tokens))
        if pages is None and not self.running:  # alone, it may begin with less than it may ever need
            pages = self._take(self._pages_for(len(request.ids)))
        if pages is None:
            return False
        self._copies += zip(cached.pages, pages, strict=False)
        request.pages = pages
        return True

    def _shared_pages(self, request: Request, cached: Match) -> bool:
        whole = cached.tokens // self.page_size
        missing = self._pages_for(len(request.ids)) - whole
        pages = self._take(missing, keep=len(self.running))  # those who run can grow before anyone is preempted
        if pages is None:
            return False
        self.pool.share(cached.pages[:whole])
        self._copies += zip(cached.pages[whole:], pages, strict=False)  # a page held in part is copied
        request.pages = [*cached.pages[:whole], *pages]
        return True

    def _grow(self, decoding: Ints) -> None:
        """Give each slot that decodes a page for its next token, preempting the youngest requests if need be."""
        slots = self.slots
        short = decoding[slots.computed[decoding] // self.page_size >= slots.pages[decoding]]
        for slot in short.tolist():
            request = slots.requests[slot]
            while request is not None and request.slot == slot:
                pages = self._take(1)
                if pages is not None:
                    request.pages += pages
                    slots.set_pages(request, len(request.pages) - 1)
                    break
                self.preempt(self.running[-1])

    def _take(self, count: int, keep: int = 0) -> list[int] | None:
        """`count` pages such that `keep` more stay free; cached prefixes that nobody uses give way."""
        missing = count + keep - self.pool.num_free
        if missing > 0 and self.index.evict(missing) < missing:
            return None
        return self.pool.allocate(count)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it is computed again from its tokens when there is room."""
        self._remove(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def finish(self, request: Request) -> None:
        """Remove a request, wherever it is; the KV it computed stays behind in the prefix index."""
        if request.slot >= 0:
            self.remember(request, int(self.slots.known[request.slot]) - 1)
            self._remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def remember(self, request: Request, tokens: int) -> None:
        """Offer the pages of the first `tokens` tokens to the index, unless KV of several weight versions is mixed in
        them. The last page may be offered in part only when its request will write no more into it."""
        tokens = min(tokens, int(self.slots.computed[request.slot]))
        if request.pure_version is not None and tokens > request.indexed:
            history = token_bytes(self.slots.ids[request.slot, :tokens])
            request.place = self.index.insert(request.pure_version, history, request.pages, request.place)
            request.indexed = tokens

    def _remove(self, request: Request) -> None:
        self.running.remove(request)
        sampled = int(self.slots.known[request.slot]) - request.prompt_len
        request.close_span(self.version, sampled)
        self.slots.leave(request)
        self.pool.release(request.pages)
        request.pages, request.indexed, request.place, request.pure_version = [], 0, None, None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _first_page(self, tokens: bytes, computed: int) -> int | None:
        """Stands for the page that comes after `computed` tokens and for all before it; None if it is not full."""
        end = (computed // self.page_size + 1) * self.page_size * WIDTH
        return hash(tokens[:end]) if end < len(tokens) else None
