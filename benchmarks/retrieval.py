"""Measures how many queries a second the retrieval server answers over 100,000 passages by BM25, over HTTP.

    python -m benchmarks.retrieval --source DIR          DIR holds HotpotQA's corpus.jsonl and train.jsonl

The passages are five sentences each, drawn from the corpus, so that words are as frequent as in real text. Queries are
titles (what a trained agent searches for) and whole questions (the slowest). The server is a separate process. The
clients are plain sockets in this process, so on two cores they compete with the server. The server's own processor time
per query does not depend on that, nor on other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rally.retrieval import IndexSpec, build_index, open_index

PASSAGES = 100_000
TOPK = 3
SECONDS = 5.0
CLIENTS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True)
    source: Path = parser.parse_args().source
    questions = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    workloads = {
        "titles": [title for row in questions for title in row["supporting_titles"]],
        "questions": [row["question"] for row in questions],
    }
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"
        corpus = write_corpus(source / "corpus.jsonl", Path(scratch) / "corpus.jsonl")
        began, used = time.perf_counter(), time.process_time()
        build_index(corpus, index, IndexSpec())
        took, used = time.perf_counter() - began, time.process_time() - used
        print(f"built in {took:.1f} s ({used:.1f} s of processor time)")
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for name, queries in workloads.items():
            print(f"{name}: in process, one thread: {in_process(index, queries):.0f} us of processor time a query")
        with Server(index) as server:
            for name, queries in workloads.items():
                for together in (1, 8):
                    print(f"{name}, {together} a request, {CLIENTS} clients: {server.measure(queries, together)}")


def write_corpus(source: Path, target: Path) -> Path:
    rng = random.Random(0)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    sentences = [sentence for row in rows for sentence in re.split(r"(?<=[.!?]) ", row["text"])]
    with target.open("w") as file:
        for number in range(PASSAGES):
            title, text = rng.choice(rows)["title"], " ".join(rng.choices(sentences, k=5))
            file.write(json.dumps({"id": str(number), "contents": f'"{title}"\n{text}'}) + "\n")
    return target


def in_process(folder: Path, queries: Sequence[str]) -> float:
    index = open_index(folder)
    index.search(queries, TOPK)
    began = time.process_time()
    index.search(queries, TOPK)
    return (time.process_time() - began) / len(queries) * 1e6


class Server:
    """`rally serve retrieval` in a child process."""

    def __init__(self, index: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._command = [sys.executable, "-m", "rally.cli", "serve", "retrieval", str(index), "--port", str(self.port)]

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self._command)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return self
            except ConnectionRefusedError:
                assert self._process.poll() is None, "the server ended"
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def measure(self, queries: Sequence[str], together: int) -> str:
        times = psutil.Process(self._process.pid).cpu_times
        asyncio.run(self._load(queries, together, 1.0))
        before, began = times(), time.perf_counter()
        answered = asyncio.run(self._load(queries, together, SECONDS))
        took, after = time.perf_counter() - began, times()
        used = after.user + after.system - before.user - before.system
        return f"{answered / took:,.0f} queries/s; {used / answered * 1e6:.0f} us of the server's processor time each"

    async def _load(self, queries: Sequence[str], together: int, seconds: float) -> int:
        until = time.perf_counter() + seconds
        return sum(await asyncio.gather(*(self._client(queries, together, until, seed) for seed in range(CLIENTS))))

    async def _client(self, queries: Sequence[str], together: int, until: float, seed: int) -> int:
        rng, answered = random.Random(seed), 0
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.perf_counter() < until:
            body = {"queries": rng.choices(queries, k=together), "topk": TOPK, "return_scores": True}
            writer.write(request(json.dumps(body).encode()))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
            answered += together
        writer.close()
        return answered


def request(body: bytes) -> bytes:
    head = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


if __name__ == "__main__":
    main()
