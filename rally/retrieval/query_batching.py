"""Searches waiting queries in batches. The result of a query does not depend on the others in its batch.

Requests queue while threads search. The next free thread takes those at the front with the same `topk`, so an idle
server answers at once and a busy one fills the batches of its encoder. Requests beyond MAX_WAITING are rejected.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

from rally.retrieval.hits import RetrievalError
from rally.retrieval.index import ScoredPassage, SearchIndex

MAX_WAITING = 8192
BM25_BATCH, VECTORS_BATCH = 16, 256
"""Queries per batch: few for BM25, which several threads search, many for vectors, which one encoder encodes."""


class Overloaded(RetrievalError):
    """Too many requests are waiting."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    queries: Sequence[str]
    topk: int
    result: asyncio.Future[list[list[ScoredPassage]]]


class Batcher:
    """Searches an index for the coroutines of one event loop."""

    def __init__(self, index: SearchIndex) -> None:
        is_bm25 = index.kind == "bm25"
        self._index = index
        self._free = min(8, os.cpu_count() or 1) if is_bm25 else 1
        self._batch = BM25_BATCH if is_bm25 else VECTORS_BATCH
        self._threads = ThreadPoolExecutor(self._free, thread_name_prefix="rally-search")
        self._waiting: deque[_Request] = deque()

    async def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} searches are already waiting; try again later")
        request = _Request(queries=queries, topk=topk, result=asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._start()
        return await request.result

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._free and (batch := self._next_batch()):
            queries = [query for request in batch for query in request.queries]
            self._free -= 1
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._index.search, queries, batch[0].topk)
            work.add_done_callback(partial(self._deliver, batch))

    def _next_batch(self) -> list[_Request]:
        batch: list[_Request] = []
        space = self._batch
        while self._waiting and space > 0 and (not batch or self._waiting[0].topk == batch[0].topk):
            request = self._waiting.popleft()
            if not request.result.done():  # otherwise the caller has been cancelled
                batch.append(request)
                space -= max(1, len(request.queries))
        return batch

    def _deliver(self, batch: list[_Request], done: asyncio.Future[list[list[ScoredPassage]]]) -> None:
        self._free += 1
        problem = done.exception()
        results = iter([] if problem is not None else done.result())
        for request in batch:
            mine = list(islice(results, len(request.queries)))
            if request.result.done():
                continue
            if problem is not None:
                request.result.set_exception(problem)
            else:
                request.result.set_result(mine)
        self._start()
