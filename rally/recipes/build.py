"""Each function writes the files that one recipe reads, whole, and says what it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rally.data import geometry as geometry_data
from rally.data import retool as retool_data
from rally.data import search_r1 as search_data
from rally.data import triage as triage_data
from rally.data import write_rows
from rally.data.commands import Written
from rally.data.read import Row
from rally.retrieval import IndexSpec, build_index
from rally.tools import ToolBox, ToolLimits, load_tools
from rally.types import RallyError, Task, ToolCall, ToolStatus

HABITS: dict[triage_data.Habit, float] = {"good": 0.2, "guess": 0.55, "prose": 0.2, "wrong_code": 0.05}
HUB = Path("hub")  # in place of a folder: to be downloaded


class RetoolSizes(NamedTuple):
    train: int
    test: int
    sft: int


class TriageSizes(NamedTuple):
    train: int
    test: int
    clean: int
    mixed: int


def search_r1(out: Path, source: Path | None, prompt_file: Path | None, sft: bool = False) -> list[Written]:
    """train.parquet, test.parquet, corpus.jsonl, and for `sft` sft.parquet, whose searches are made by BM25."""
    prompt = search_data.Prompt.read(prompt_file) if prompt_file else search_data.Prompt()
    questions, passages = search_data.read_source(source)
    written = [
        _write(out / "train.parquet", search_data.rows(questions, "train", prompt)),
        _write(out / "test.parquet", search_data.rows(questions, "test", prompt)),
        _write(out / "corpus.jsonl", passages),
    ]
    return [*written, _write_searches(out, questions, prompt)] if sft else written


def _write_searches(out: Path, questions: Sequence[Row], prompt: search_data.Prompt) -> Written:
    with TemporaryDirectory() as folder:
        index = build_index(out / "corpus.jsonl", Path(folder) / "index", IndexSpec()).path
        tool = {"name": search_data.TOOL, "config": {"index_path": str(index), "topk": 3}}
        tools = ToolBox(load_tools({"tools": [tool]}), ToolLimits(max_response_chars=2000, truncate_side="right"))
        searches = partial(answers, tools, search_data.TOOL, "query")
        rows = search_data.sft_rows(questions, searches, tools.schemas(), prompt)
        return _write(out / "sft.parquet", rows)


def retool(out: Path, sizes: RetoolSizes, gsm8k: Path | None, aime: Path | None, seed: int) -> list[Written]:
    """train.parquet, test.parquet and sft.parquet. With `gsm8k` (a folder, or `HUB`) its train split is trained on too,
    and the first rows of its test split are validated on, as many as are generated for that. AIME is validated on."""
    source = None if gsm8k == HUB and not HUB.exists() else gsm8k
    train = chain(
        retool_data.rows(sizes.train, seed, "train"), retool_data.gsm8k_rows(source, "train") if gsm8k else ()
    )
    test = chain(
        retool_data.rows(sizes.test, seed, "test"),
        islice(retool_data.gsm8k_rows(source, "test"), sizes.test) if gsm8k else (),
        retool_data.aime_rows(aime) if aime else (),
    )
    written = [_write(out / "train.parquet", train), _write(out / "test.parquet", test)]
    if sizes.sft:
        tools = ToolBox(load_tools({"tools": [{"name": retool_data.TOOL}]}), ToolLimits(max_response_chars=1024))
        programs = partial(answers, tools, retool_data.TOOL, "code")
        conversations = retool_data.sft_rows(sizes.sft, seed, programs, tools.schemas())
        written.append(_write(out / "sft.parquet", conversations))
    return written


def triage(out: Path, sizes: TriageSizes, seed: int) -> list[Written]:
    """train.parquet, test.parquet, articles.jsonl, sft.parquet, and words.txt for the tokenizer of a toy model."""
    written = [
        _write(out / "train.parquet", triage_data.rows(sizes.train, seed, "train")),
        _write(out / "test.parquet", triage_data.rows(sizes.test, seed, "test")),
        _write(out / "articles.jsonl", triage_data.articles(seed)),
    ]
    if sizes.clean + sizes.mixed:
        conversations = triage_data.sft_rows(sizes.clean, sizes.mixed, HABITS, seed)
        written.append(_write(out / "sft.parquet", conversations))
    (out / "words.txt").write_text("\n".join(triage_data.WORDS), encoding="utf-8")
    return [*written, Written(out / "words.txt", len(triage_data.WORDS))]


class GeometrySizes(NamedTuple):
    train: int
    test: int


def geometry(out: Path, sizes: GeometrySizes, levels: Sequence[int], source: Path | None, seed: int) -> list[Written]:
    """train.parquet and test.parquet, pictures inside: drawn here, or those of a folder like geometry3k's."""
    counts = dict(zip(geometry_data.SPLITS, sizes, strict=True))
    return [
        _write(
            out / f"{split}.parquet",
            geometry_data.converted(source, split) if source else geometry_data.rows(count, seed, split, levels),
        )
        for split, count in counts.items()
    ]


def answers(tools: ToolBox, name: str, argument: str, values: Sequence[str]) -> list[str]:
    """What a tool itself answers to each value of its one argument, as an episode would read it."""
    task = Task(id="sft", data_source="sft", prompt=({"role": "user", "content": "run"},))

    async def run_all() -> list[str]:
        session = tools.open(task, "sft")
        try:
            results = await session.run([ToolCall(name=name, arguments={argument: value}) for value in values])
        finally:
            await session.close()
        if failed := next((result for result in results if result.status is not ToolStatus.OK), None):
            raise RallyError(f"the tool {name} failed while conversations were written: {failed.response.text}")
        return [result.response.text or "" for result in results]

    return asyncio.run(run_all())


def _write(path: Path, rows: Iterable[Row | dict[str, Any]]) -> Written:
    return Written(path, write_rows(rows, path))
