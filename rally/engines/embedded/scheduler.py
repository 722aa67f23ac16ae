"""Decides what the next forward runs: decode tokens first, then prefill chunks under the token budget.

Guarantees: a request that fits the pool at all finishes (when pages run out, the youngest one gives its pages back and
is computed again later), and of several requests with the same prefix only one computes it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rally.engines.base import EngineError
from rally.engines.embedded.pages import KVStore, PagePool
from rally.engines.embedded.prefixes import Match, PrefixIndex
from rally.engines.embedded.request import Request


class Work(NamedTuple):
    """Run tokens [start, start + tokens) of `request` through the model."""

    request: Request
    start: int
    tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last known token, so that a new one can be sampled."""
        return self.start + self.tokens == len(self.request.ids)


class Scheduler:
    """Waiting and running requests, and the pages they hold."""

    def __init__(
        self, pool: PagePool, index: PrefixIndex, store: KVStore, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.pool, self.index, self.store = pool, index, store
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.version = 0
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        if self._pages_for(request.total_tokens) > self.pool.num_pages:
            raise EngineError(
                f"a request of {request.prompt_len} prompt tokens and up to {request.params.max_tokens} new ones can "
                f"never fit the {self.pool.num_pages * self.store.page_size} tokens of KV memory; shorten it or give "
                "the engine more memory (rollout.gpu_memory_utilization)"
            )
        self.waiting.append(request)

    def plan(self) -> list[Work]:
        """The work of the next step, decodes first. Empty only when nothing is left to do."""
        decodes = self._plan_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        prefills: list[Work] = []
        for request in [r for r in self.running if r.remaining > 1]:
            budget = self._plan_chunk(request, budget, prefills)
        self._admit(budget, prefills, decodes)
        return decodes + prefills

    def _plan_decodes(self) -> list[Work]:
        decodes: list[Work] = []
        for request in list(self.running):
            if request.remaining == 1 and request.pages and self._extend(request, len(request.ids)):
                decodes.append(Work(request, request.computed, 1))
        return [work for work in decodes if work.request.pages]  # a later one may have preempted an earlier one

    def _plan_chunk(self, request: Request, budget: int, plan: list[Work]) -> int:
        count = min(request.remaining, budget)
        if count > 0 and request.pages and self._extend(request, request.computed + count):
            plan.append(Work(request, request.computed, count))
            return budget - count
        return budget

    def _admit(self, budget: int, prefills: list[Work], decodes: list[Work]) -> None:
        """Take in waiting requests. One whose next page is being computed by another waits one step and shares it."""
        computing = {key for work in prefills for key in self._uncomputed_pages(work.request)}
        passed_over: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.popleft()
            cached = self.index.match(self.version, request.ids[:-1])
            if computing and self._page_key(request, cached.tokens // self.store.page_size) in computing:
                passed_over.append(request)
                continue
            if not self._place(request, cached):
                self.waiting.appendleft(request)
                break
            self.running.append(request)
            computing.update(self._uncomputed_pages(request))
            target = decodes if request.remaining == 1 else prefills
            budget = self._plan_chunk(request, budget, target)
        self.waiting.extendleft(reversed(passed_over))

    def _place(self, request: Request, cached: Match) -> bool:
        """Give a waiting request its pages: a fresh run with the cached prefix copied in."""
        self.pool.share(cached.pages)
        wanted = self._pages_for(request.total_tokens)
        pages = self._take(wanted)
        if pages is None and not self.running:  # alone, it may begin with less than it may ever need
            pages = self._take(self._pages_for(len(request.ids)))
        if pages is not None:
            self.store.copy_pages(cached.pages, pages[: len(cached.pages)])
            request.pages = pages
            request.computed = cached.tokens
            request.indexed = cached.tokens // self.store.page_size
            request.pure_version = self.version
            if not request.admitted_once:
                request.cached_tokens = request.computed
                request.admitted_once = True
        self.pool.release(cached.pages)
        return pages is not None

    def _extend(self, request: Request, tokens: int) -> bool:
        """Make room for `tokens` tokens of `request`, preempting younger requests if need be."""
        missing = self._pages_for(tokens) - len(request.pages)
        while missing > 0:
            pages = self._take(missing)
            if pages is not None:
                request.pages.extend(pages)
                return True
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _take(self, count: int) -> list[int] | None:
        if count > self.pool.num_free:
            self.index.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it is computed again from its tokens when there is room."""
        self.running.remove(request)
        self._drop_pages(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def finish(self, request: Request) -> None:
        """Remove a request, wherever it is; its full pages stay behind in the prefix index."""
        if request in self.running:
            self.running.remove(request)
            self.remember(request, whole_pages=False)
            self._drop_pages(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def remember(self, request: Request, whole_pages: bool = True) -> None:
        """Offer the computed pages to the index, unless KV of several weight versions is mixed in them. A page that is
        not full yet may be offered only when its request will write no more into it."""
        full = request.computed // self.store.page_size
        tokens = full * self.store.page_size if whole_pages else request.computed
        if request.pure_version is not None and tokens > request.indexed * self.store.page_size:
            self.index.insert(request.pure_version, request.ids[:tokens], request.pages)
            request.indexed = full

    def _drop_pages(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages, request.computed, request.indexed = [], 0, 0
        request.pure_version = None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.store.page_size)

    def _page_key(self, request: Request, page: int) -> tuple[int, ...] | None:
        end = (page + 1) * self.store.page_size
        return tuple(request.ids[:end]) if end < len(request.ids) else None

    def _uncomputed_pages(self, request: Request) -> list[tuple[int, ...]]:
        first, last = request.computed // self.store.page_size, (len(request.ids) - 1) // self.store.page_size
        keys = (self._page_key(request, page) for page in range(first, last))
        return [key for key in keys if key is not None]
