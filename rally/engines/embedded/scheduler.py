"""Plans the next forward: decode tokens first, then prefill chunks up to the token budget.

Every request that fits into the page pool finishes: when pages run out, the youngest request is preempted and computed
again later. Of several requests with the same prefix only one computes it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rally.engines.base import EngineError
from rally.engines.embedded.kv_cache import PagePool
from rally.engines.embedded.radix_cache import WIDTH, Match, RadixCache, token_bytes
from rally.engines.embedded.request_slots import Ints, Request, Slots
from rally.engines.embedded.settings import NgramSpeculation

MANY_DECODES = 64  # a step with so many is worth keeping free of chunks
ENOUGH_WAITING = 4  # requests that justify the extra cost of chunks


class Chunk(NamedTuple):
    """Tokens [start, start + tokens) of the request in `slot`. The last `samples` of them predict a token each: none if
    known tokens follow, one if the chunk ends with the last known token, and one more for each draft behind it."""

    slot: int
    start: int
    tokens: int
    samples: int

    @property
    def drafts(self) -> int:
        return max(0, self.samples - 1)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One forward: a token of each slot in `decodes`, then the chunks. Page copies (from, to) come before it. The
    drafts of a chunk are in the ids of its slot, behind the known ones.

    If the model has states, snapshots of finished requests are saved and those of admitted ones loaded before it, in
    this order, and `snapshots` of running ones are taken after it.
    """

    decodes: Ints
    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    snapshots: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def samplers(self) -> Ints:
        """The slot of each sampled token, in the order of the plan."""
        if not self.chunks:
            return self.decodes
        return np.append(self.decodes, [c.slot for c in self.chunks for _ in range(c.samples)]).astype(np.int64)

    def targets(self, slots: Slots) -> Ints:
        """Where each sampled token stands in its history."""
        decoding = slots.computed[self.decodes]  # which counts the token that predicts it
        if not self.chunks:
            return decoding
        ends = [c.start + c.tokens - i for c in self.chunks for i in reversed(range(c.samples))]
        return np.append(decoding, ends).astype(np.int64)

    def __bool__(self) -> bool:
        return bool(len(self.decodes) or self.chunks)


def ngram_drafts(history: npt.NDArray[np.int32], most: int, lookup: NgramSpeculation) -> list[int]:
    """At most `most` tokens that followed the last earlier occurrence of the latest tokens of `history`. Longer
    sequences of latest tokens are looked up first. Image tokens are never drafted."""
    tokens = token_bytes(history)
    for length in range(min(lookup.prompt_lookup_max, len(history) - 1), lookup.prompt_lookup_min - 1, -1):
        latest, end = tokens[-length * WIDTH :], len(tokens) - 1
        while (at := tokens.rfind(latest, 0, end)) > 0 and at % WIDTH:
            end = at + len(latest) - 1  # not at the beginning of a token
        if at >= 0:
            start = at // WIDTH + length
            drafts: list[int] = history[start : start + most].tolist()
            return drafts if min(drafts) >= 0 else []
    return []


class Scheduler:
    """Waiting and running requests, and the pages they hold.

    With `share_pages` (the attention kernel reads scattered pages) a request shares the pages of a cached prefix and
    allocates new ones as it grows. Without, it owns a consecutive run of pages for its maximum length, into which the
    prefix is copied. A few new requests wait up to `patience` steps for others to be admitted with them.
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
        speculation: NgramSpeculation | None = None,
        memory_option: str = "rollout.gpu_memory_utilization",
    ) -> None:
        self.memory_option = memory_option
        self.pool, self.index, self.slots = pool, index, slots
        self.page_size = index.page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.share_pages = share_pages
        self.patience = patience
        self.eos_ids = eos_ids
        self.speculation = speculation
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.version = 0
        self.preemptions = 0
        self._admitting: Request | None = None
        self._copies: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._held = 0  # consecutive steps in which waiting requests were held back

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        if self._pages_for(request.total_tokens) > self.pool.num_pages:
            raise EngineError(
                f"a request of {request.prompt_len} prompt tokens and up to {request.params.max_tokens} new ones can "
                f"never fit the {self.pool.num_pages * self.page_size} tokens of KV memory; shorten it or give "
                f"the engine more memory ({self.memory_option})"
            )
        self.waiting.append(request)

    def plan(self) -> StepPlan:
        """The next step. Empty if nothing can be done before a launched step has been read back."""
        slots, speculates = self.slots, self.speculates  # before growing preempts: the caller read back only if it does
        wanting = self._wanting()
        self._grow(np.flatnonzero(wanting & (slots.planned - slots.computed == 1)))
        wanting = self._wanting()  # growing may have preempted some
        left = np.where(wanting, slots.planned - slots.computed, 0)
        decodes = np.flatnonzero(left == 1)
        budget = self.max_num_batched_tokens - len(decodes)
        chunks = self._drafted(decodes, budget) if speculates else []
        if chunks:
            decodes = np.setdiff1d(decodes, [chunk.slot for chunk in chunks])
            budget -= sum(chunk.drafts for chunk in chunks)
        unfinished = (r for r in self.running if left[r.slot] > 1) if (left > 1).any() else ()
        for request in unfinished:
            budget = self._plan_chunk(request, budget, chunks)
        if self.waiting and not self._hold_back(len(decodes), chunks):
            self._admit(budget, chunks)
        snapshots = [] if self.index.states is None else self._snapshots(chunks)
        copies = {"copies": self._copies, "saves": self._saves, "loads": self._loads, "snapshots": snapshots}
        plan = StepPlan(decodes=decodes, chunks=chunks, **copies)
        if plan:  # an empty one is not launched, and what is to be saved stays for the next
            self._copies, self._saves, self._loads = [], [], []
        self._advance(plan)
        return plan

    @property
    def speculates(self) -> bool:
        """Whether so few requests run that drafts are worth their computation."""
        return self.speculation is not None and len(self.running) <= self.speculation.disable_by_batch_size

    def _drafted(self, decodes: Ints, budget: int) -> list[Chunk]:
        """Chunks of those decoding slots for which drafts are found: the last known token and the drafts. A grammar
        decides about one token after the other, so its requests get none."""
        assert self.speculation is not None
        slots, chunks = self.slots, []
        for slot in decodes[~slots.constrained[decodes]].tolist():
            known = int(slots.known[slot])
            assert known == slots.planned[slot], "a request was planned before its last token was read back"
            most = min(self.speculation.num_speculative_tokens, int(slots.limit[slot]) - known - 1, budget)
            drafts = ngram_drafts(slots.ids[slot, :known], most, self.speculation) if most > 0 else []
            drafts = drafts[: self._space(slot, known + len(drafts)) - known]
            if drafts:
                slots.ids[slot, known : known + len(drafts)] = drafts
                chunks.append(Chunk(slot, known - 1, 1 + len(drafts), 1 + len(drafts)))
                budget -= len(drafts)
        return chunks

    def _space(self, slot: int, tokens: int) -> int:
        """How many tokens the slot's pages hold. Adds pages for `tokens` if that preempts nobody."""
        request = self.slots.requests[slot]
        assert request is not None
        missing = self._pages_for(tokens) - len(request.pages)
        pages = self._take(missing) if missing > 0 else None
        if pages is not None:
            request.pages += pages
            self.slots.set_pages(request, len(request.pages) - missing)
        return len(request.pages) * self.page_size

    def _wanting(self) -> npt.NDArray[np.bool_]:
        """Slots that go on. One with a grammar waits until its last token was read back, which decides what may follow
        it."""
        slots = self.slots
        waits = slots.constrained & (slots.planned > slots.known)
        wanting: npt.NDArray[np.bool_] = (slots.planned < slots.limit) & ~waits
        return wanting

    def _snapshots(self, chunks: list[Chunk]) -> list[tuple[int, int]]:
        """Snapshots after the chunks that end where their request asked for one: (slot, row)."""
        taken = []
        for chunk in chunks:
            request = self.slots.requests[chunk.slot]
            assert request is not None
            if request.cuts and chunk.start + chunk.tokens == request.cuts[0]:
                request.cuts.pop(0)
                row = self.index.take_state() if request.pure_version is not None else None
                if row is not None:
                    taken.append((chunk.slot, row))
        return taken

    def _hold_back(self, decodes: int, chunks: list[Chunk]) -> bool:
        """Whether a few new requests wait for others, at most `patience` steps. On a GPU a step with any chunk takes a
        quarter longer than one with decodes only, which delays every running request."""
        few = decodes >= MANY_DECODES and not chunks and len(self.waiting) < ENOUGH_WAITING
        self._held = self._held + 1 if few and self._held < self.patience else 0
        return self._held > 0

    def _advance(self, plan: StepPlan) -> None:
        """Count the planned tokens as computed, and those to be sampled as planned. Drafts count when they turn out to
        be right."""
        slots = self.slots
        slots.computed[plan.decodes] += 1
        for chunk in plan.chunks:
            slots.computed[chunk.slot] += chunk.tokens - chunk.drafts
        slots.planned[np.unique(plan.samplers)] += 1

    def _plan_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        slots, slot = self.slots, request.slot
        start, planned = int(slots.computed[slot]), int(slots.planned[slot])
        count = min(planned - start, budget)
        if request.cuts:
            count = min(count, request.cuts[0] - start)
        if count > 0:
            chunks.append(Chunk(slot, start, count, int(start + count == planned)))
        return budget - max(0, count)

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Admit waiting requests. One whose next page another request is computing waits one step and then shares
        it."""
        slots = self.slots
        computing = {
            self._first_page(token_bytes(slots.ids[c.slot, : slots.known[c.slot]]), c.start) for c in chunks
        } - {None}
        computing |= {request.first_page for request in self.running if request.cuts}
        passed_over: list[Request] = []
        try:
            while self.waiting and budget > 0 and slots.num_free:
                self._admitting = request = self.waiting.popleft()
                tokens = token_bytes(request.ids)
                match = self.index.match if self.index.states is None else self.index.match_state
                cached = match(self.version, tokens[:-WIDTH])
                page = self._first_page(tokens, cached.tokens)
                if page in computing:
                    passed_over.append(request)
                    continue
                if not self._place(request, cached):
                    self.waiting.appendleft(request)
                    break
                self.running.append(request)
                request.first_page = page
                if page is not None:
                    computing.add(page)
                budget = self._plan_chunk(request, budget, chunks)
            self._admitting = None
        finally:
            self.waiting.extendleft(reversed(passed_over))

    def recover(self) -> list[Request]:
        """Empty the slots, pages and cached prefixes, whose state is unknown after a step that failed. Returns the
        requests that took part in it, with the tokens that were read back; they are no longer queued."""
        suspects = list(self.running)
        for request in suspects:
            request.close_span(self.version, int(self.slots.known[request.slot]) - request.prompt_len)
            self.slots.leave(request)
        if self._admitting is not None and self._admitting not in suspects:
            suspects.append(self._admitting)
        for request in suspects:
            request.slot, request.pages, request.indexed, request.cuts = -1, [], 0, []
            request.tree_position = request.pure_version = None
        self.running, self._admitting, self._held = [], None, 0
        self._copies, self._saves, self._loads = [], [], []
        self.slots.clear()
        self.pool.clear()
        self.index.clear()
        if self.index.states is not None:
            self.index.states.clear()
        return suspects

    def _place(self, request: Request, cached: Match) -> bool:
        """Assign a slot and pages to a waiting request; False if there are not enough pages."""
        self.pool.share(cached.pages)
        placed = self._shared_pages(request, cached) if self.share_pages else self._own_pages(request, cached)
        if placed:
            request.indexed, request.tree_position = cached.tokens, cached.position
            request.pure_version = self.version
            self.slots.enter(request, cached.tokens, self.eos_ids)
            if self.index.states is not None:
                self._plan_states(request, cached)
            if not request.admitted:
                request.cached_tokens = cached.tokens
                request.admitted = time.perf_counter()
        self.pool.release(cached.pages)
        if not placed and cached.pages and not self.running:  # evict even the prefix that it would have used
            return self._place(request, Match([], 0))
        return placed

    def _plan_states(self, request: Request, cached: Match) -> None:
        """Load the snapshot of the matched prefix. Take new ones where the cached keys and values end, since other
        histories branch off there, and before the last token, so that requests with the same prompt can begin there."""
        if cached.state is not None:
            self._loads.append((cached.state, request.slot))
        ends = {cached.kv_tokens, len(request.ids) - 1}
        cuts = {end // self.page_size * self.page_size for end in ends}
        request.cuts = sorted(cut for cut in cuts if cut > cached.tokens)

    def _own_pages(self, request: Request, cached: Match) -> bool:
        pages = self._take(self._pages_for(request.total_tokens))
        if pages is None and not self.running:  # as the only request it may start with less than its maximum
            pages = self._take(self._pages_for(len(request.ids)))
        if pages is None:
            return False
        self._copies += zip(cached.pages, pages, strict=False)
        request.pages = pages
        return True

    def _shared_pages(self, request: Request, cached: Match) -> bool:
        whole = cached.tokens // self.page_size
        missing = self._pages_for(len(request.ids)) - whole
        pages = self._take(missing, keep=len(self.running))  # so that running requests can grow without preemption
        if pages is None:
            return False
        self.pool.share(cached.pages[:whole])
        self._copies += zip(cached.pages[whole:], pages, strict=False)  # a partly filled page is copied
        request.pages = [*cached.pages[:whole], *pages]
        return True

    def _grow(self, decoding: Ints) -> None:
        """Allocate a page for the next token of each decoding slot that needs one; preempts the youngest if
        necessary."""
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
                if self.running == [request] and len(self.index):
                    # Preempted alone, it would come to this place again: pages of its own continue cached ones with the
                    # same tokens as others of its own, so that these can never be evicted.
                    self.index.forget()
                    self._saves = []  # their snapshots are gone
                else:
                    self.preempt(self.running[-1])

    def _take(self, count: int, keep: int = 0) -> list[int] | None:
        """Allocate `count` pages such that `keep` more stay free, evicting unused cached prefixes; None if
        impossible."""
        missing = count + keep - self.pool.num_free
        if missing > 0 and self.index.evict(missing) < missing:
            return None
        return self.pool.allocate(count)

    def preempt(self, request: Request) -> None:
        """Free a running request's pages and queue it first; it is computed again from its tokens."""
        self._remove(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def finish(self, request: Request) -> None:
        """Remove a request, running or waiting; its KV stays in the radix cache."""
        if request.slot >= 0:
            if self.index.states is None:
                self.remember(request, int(self.slots.known[request.slot]) - 1)
            else:  # the state is that after all computed tokens
                tokens = int(self.slots.computed[request.slot])
                self.remember(request, tokens)
                row = self.index.take_state() if request.pure_version is not None else None
                if row is not None and self.hold_state(request, tokens, row):
                    self._saves = [save for save in self._saves if save[1] != row]  # of a snapshot that made room
                    self._saves.append((request.slot, row))
            self._remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def remember(self, request: Request, tokens: int) -> None:
        """Insert the pages of the first `tokens` tokens into the radix cache, unless they mix weight versions. The last
        page may be partly filled only if its request writes no more into it."""
        tokens = min(tokens, int(self.slots.computed[request.slot]))
        if request.pure_version is not None and tokens > request.indexed:
            history = token_bytes(self.slots.ids[request.slot, :tokens])
            position = self.index.insert(request.pure_version, history, request.pages, request.tree_position)
            request.tree_position = position
            request.indexed = tokens

    def hold_state(self, request: Request, tokens: int, row: int) -> bool:
        """Keep the snapshot in `row`, which was or will be taken after the first `tokens` tokens. False if it is not
        needed."""
        assert request.pure_version is not None
        return self.index.hold_state(request.pure_version, token_bytes(self.slots.ids[request.slot, :tokens]), row)

    def _remove(self, request: Request) -> None:
        self.running.remove(request)
        sampled = int(self.slots.known[request.slot]) - request.prompt_len
        request.close_span(self.version, sampled)
        self.slots.leave(request)
        self.pool.release(request.pages)
        request.pages, request.indexed, request.tree_position, request.pure_version = [], 0, None, None
        request.cuts = []

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _first_page(self, tokens: bytes, computed: int) -> int | None:
        """A hash of the page after `computed` tokens and all tokens before it; None if that page is not full."""
        end = (computed // self.page_size + 1) * self.page_size * WIDTH
        return hash(tokens[:end]) if end < len(tokens) else None
