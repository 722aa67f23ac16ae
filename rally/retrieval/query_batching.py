"""Queries that wait are searched together, and no query's result depends on which others waited with it.

While threads search, requests gather; the next free thread takes those at the front that want the same number of
hits. So an idle server answers at once, and a busy one fills the batches of its encoder. A line that is too long is
refused rather than grown.
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
WORDS_BATCH, VECTORS_BATCH = 16, 256
"""Queries a thread takes at once: few where threads share the work, many where one encoder does it."""


class Overloaded(RetrievalError):
    """More requests wait than will be answered in any useful time."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    queries: Sequence[str]
    topk: int
    found: asyncio.Future[list[list[ScoredPassage]]]


class Batcher:
    """Searches an index for the coroutines of one event loop."""

    def __init__(self, index: SearchIndex) -> None:
        by_words = index.kind == "bm25"
        self._index = index
        self._free = min(8, os.cpu_count() or 1) if by_words else 1
        self._batch = WORDS_BATCH if by_words else VECTORS_BATCH
        self._threads = ThreadPoolExecutor(self._free, thread_name_prefix="rally-search")
        self._waiting: deque[_Request] = deque()

    async def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} searches are waiting already; ask again later")
        request = _Request(queries=queries, topk=topk, found=asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._start()
        return await request.found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._free and (batch := self._take()):
            queries = [query for request in batch for query in request.queries]
            self._free -= 1
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._index.search, queries, batch[0].topk)
            work.add_done_callback(partial(self._deliver, batch))

    def _take(self) -> list[_Request]:
        batch: list[_Request] = []
        room = self._batch
        while self._waiting and room > 0 and (not batch or self._waiting[0].topk == batch[0].topk):
            request = self._waiting.popleft()
            if not request.found.done():  # who asked may have gone meanwhile
                batch.append(request)
                room -= max(1, len(request.queries))
        return batch

    def _deliver(self, batch: list[_Request], done: asyncio.Future[list[list[ScoredPassage]]]) -> None:
        self._free += 1
        problem = done.exception()
        found = iter([] if problem is not None else done.result())
        for request in batch:
            mine = list(islice(found, len(request.queries)))
            if request.found.done():
                continue
            if problem is not None:
                request.found.set_exception(problem)
            else:
                request.found.set_result(mine)
        self._start()
