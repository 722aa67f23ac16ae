"""The radix cache evicts the least recently used unreferenced pages, without a search through the whole index."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_model

from rally.engines.embedded import EngineCore, EngineSettings, scheduler
from rally.engines.embedded.kv_cache import PagePool
from rally.engines.embedded.radix_cache import RadixCache, token_bytes
from rally.types import SamplingParams

PAGE = 2


def remember(pool: PagePool, index: RadixCache, ids: list[int]) -> list[int]:
    """Adds a computed history that only the index holds, as after a finished request."""
    match = index.match(0, token_bytes(ids))
    known = match.pages[: match.tokens // PAGE]  # a partly filled page would be copied
    pool.share(known)
    fresh = pool.allocate(-(-len(ids) // PAGE) - len(known))
    index.insert(0, token_bytes(ids), known + fresh)
    pool.release(known + fresh)
    return known + fresh


def test_the_least_recently_used_leaf_goes_first_and_held_pages_stay():
    pool = PagePool(16, 1)
    index = RadixCache(pool, PAGE)
    old, held, used = (remember(pool, index, [n, n, n + 50, n]) for n in (1, 2, 3))
    pool.share(held)
    index.match(0, token_bytes([1, 1, 51, 1]))  # now `held` and then `used` are the oldest
    assert index.evict(2) == 2
    assert index.match(0, token_bytes([3, 3])).tokens == 0
    assert index.match(0, token_bytes([2, 2, 52, 2])).pages == held
    assert index.match(0, token_bytes([1, 1, 51, 1])).pages == old
    assert used[0] not in (held + old)
    assert index.evict(9) == 2, "a page that somebody holds is not freed, nor are those before it"
    pool.release(held)
    assert index.evict(9) == 2 and len(index) == 0 and pool.num_free == 16


histories = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12).map(lambda ids: ids[: len(ids) // 2 * 2]))


@settings(max_examples=60, deadline=None)
@given(histories, st.lists(st.integers(1, 5), max_size=8))
def test_every_page_is_free_or_known_whatever_is_evicted(given_histories, evictions):
    pool = PagePool(200, 1)
    index = RadixCache(pool, PAGE)
    for ids, count in itertools.zip_longest(given_histories, evictions):
        if ids:
            remember(pool, index, ids)
        if count:
            before = len(index)
            assert index.evict(count) == min(count, before) == before - len(index)
        assert pool.num_free + len(index) == pool.num_pages
        assert len(index._leaves) <= 64 + 2 * len(index) + 1, "overtaken entries do not pile up"
    left = len(index)
    assert index.evict(1000) == left and pool.num_free == pool.num_pages


def test_a_few_new_requests_wait_for_others_but_not_long(monkeypatch):
    monkeypatch.setattr(scheduler, "MANY_DECODES", 4)
    core = EngineCore(make_model(), EngineSettings(backend="paged", max_model_len=128), num_pages=200)
    for seed in range(4):
        core.add([1 + seed, 2, 3], SamplingParams(max_tokens=40, seed=seed))
    core.step()  # all four are admitted, since nothing was decoding yet
    late = core.add([9, 8, 7], SamplingParams(max_tokens=4, seed=9))
    core.step()
    core.step()
    assert late.slot < 0, "it waits for others"
    core.step()
    assert late.slot >= 0, "but two steps at most"
    several = [core.add([9, n, 7], SamplingParams(max_tokens=4, seed=n)) for n in range(scheduler.ENOUGH_WAITING)]
    core.step()
    assert all(request.slot >= 0 for request in several), "enough of them do not wait"
