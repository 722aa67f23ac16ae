"""Search-R1's protocol, field for field, from a real process with many clients, and the requests that it rejects."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from search_cases import CORPUS, Server, write_corpus

from rally.retrieval import (
    Batcher,
    IndexSpec,
    Overloaded,
    RetrievalError,
    ScoredPassage,
    SearchIndex,
    build_index,
    open_index,
)
from rally.retrieval import query_batching as batching_module
from rally.services.retrieval import create_app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    build_index(write_corpus(folder / "corpus.jsonl"), folder / "index", IndexSpec())
    return folder / "index"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    running = Server(folder)
    running.wait_ready()
    yield running
    running.kill()


def ask(server: Server, **body: Any) -> Any:
    response = httpx.post(server.url, json=body)
    assert response.status_code == 200, response.text
    return response.json()["result"]


def test_with_and_without_scores(server: Server) -> None:
    queries = ["capital of france", "nothing like it", "everest"]
    scored = ask(server, queries=queries, topk=2, return_scores=True)
    assert [[hit["document"]["id"] for hit in hits] for hits in scored] == [["0", "1"], [], ["2"]]
    assert scored[2][0].keys() == {"document", "score"}
    assert scored[2][0]["document"] == CORPUS[2]
    assert scored[0][0]["score"] > scored[0][1]["score"] > 0
    bare = ask(server, queries=queries, topk=2, return_scores=False)
    assert bare == [[hit["document"] for hit in hits] for hits in scored]


@pytest.mark.parametrize("body", [{}, {"topk": None}, {"topk": 0}])
def test_without_a_number_the_server_s_own(server: Server, body: dict[str, Any]) -> None:
    (hits,) = ask(server, queries=["capital of the mountain rock band"], **body)
    assert len(hits) == 3
    assert "contents" in hits[0], "return_scores is false when it is not given"


@pytest.mark.parametrize(("queries", "result"), [([], []), ([""], [[]]), (["?"], [[]])])
def test_queries_that_ask_nothing(server: Server, queries: list[str], result: list[Any]) -> None:
    assert ask(server, queries=queries, topk=3) == result


@pytest.mark.parametrize("body", [{}, {"queries": "text"}, {"queries": ["a"], "topk": -1}, {"queries": [1]}])
def test_what_is_no_request_is_answered_with_422(server: Server, body: dict[str, Any]) -> None:
    assert httpx.post(server.url, json=body).status_code == 422


def test_health(server: Server) -> None:
    health = httpx.get(f"{server.base}/health").json()
    assert health == {"status": "ok", "kind": "bm25", "passages": 5, "topk": 3}


async def test_many_clients_at_once_each_get_their_own(server: Server) -> None:
    wanted = {"paris": "0", "berlin": "1", "himalayas": "2", "english band": "3", "東京": "4"}

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for turn in range(10):
                query = list(wanted)[(number + turn) % len(wanted)]
                body = {"queries": [query] * (1 + turn % 3), "topk": 1 + turn % 2, "return_scores": True}
                result = (await http.post(server.url, json=body)).json()["result"]
                assert [hits[0]["document"]["id"] for hits in result] == [wanted[query]] * (1 + turn % 3)

    await asyncio.gather(*(client(number) for number in range(16)))


async def test_a_token_is_wanted_where_one_is_set(folder: Path) -> None:
    transport = httpx.ASGITransport(app=create_app(open_index(folder), token="sésame"))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        body = {"queries": ["paris"]}
        assert (await http.post("/retrieve", json=body)).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert (await http.post("/retrieve", json=body, headers=wrong)).status_code == 401
        right = {"Authorization": "Bearer sésame".encode()}
        assert (await http.post("/retrieve", json=body, headers=right)).status_code == 200
        assert (await http.get("/health")).status_code == 200


class Held(SearchIndex):
    """A dense index whose searches wait until they are released; it records the queries."""

    def __init__(self) -> None:
        self.kind = "dense"
        self.go = threading.Event()
        self.batches: list[tuple[list[str], int]] = []

    async def asked(self) -> None:
        """Wait for the first batch; the other requests wait in the batcher by then."""
        async with asyncio.timeout(30):
            while not self.batches:
                await asyncio.sleep(0.01)

    def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        self.batches.append((list(queries), topk))
        assert self.go.wait(30)
        if "bad" in queries:
            raise RetrievalError("the encoder broke")
        return [[ScoredPassage(query.encode(), 1.0)] * topk for query in queries]


async def test_requests_that_wait_are_searched_together_unless_they_differ() -> None:
    index = Held()
    batcher = Batcher(index)
    asked = [("a",), ("b", "c"), ("gone",), ("d",), ("e",), ()]
    tasks = [asyncio.create_task(batcher.search(q, topk=2 if q == ("d",) else 1)) for q in asked]
    await index.asked()
    tasks[2].cancel()
    index.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert index.batches == [(["a"], 1), (["b", "c"], 1), (["d"], 2), (["e"], 1)]
    assert isinstance(found[2], asyncio.CancelledError)
    assert [[[hit.raw.decode() for hit in hits] for hits in f] for f in found if isinstance(f, list)] == [
        [["a"]],
        [["b"], ["c"]],
        [["d", "d"]],
        [["e"]],
        [],
    ]
    batcher.close()


async def test_a_search_that_fails_fails_its_batch_alone_and_a_long_line_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching_module, "MAX_WAITING", 2)
    index = Held()
    batcher = Batcher(index)
    tasks = [asyncio.create_task(batcher.search([query], topk=1)) for query in ("bad", "fine", "fine")]
    await index.asked()
    with pytest.raises(Overloaded):
        await batcher.search(["one too many"], topk=1)
    index.go.set()
    with pytest.raises(RetrievalError, match="the encoder broke"):
        await tasks[0]
    assert await tasks[1] == await tasks[2] == [[ScoredPassage(b"fine", 1.0)]]
    batcher.close()
