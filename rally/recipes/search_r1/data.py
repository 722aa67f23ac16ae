"""HotpotQA as rows for a search agent, its corpus, and supervised conversations with real search results.

A question belongs to the split `test` when the MD5 of its id is a multiple of five, else to `train`, whatever the split
in the source. The passages of all questions form one corpus. A supervised conversation searches only for what the text
read so far mentions, and shows the results of the actual search tool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import yaml

from rally.data.row_files import DataError, Row, download, read_rows
from rally.recipes.data_files import WrittenFile, tool_answers, write_file
from rally.retrieval import IndexSpec, build_index
from rally.tools import ToolBox, ToolLimits, load_tools
from rally.types import Message

DATA_SOURCE = "searchR1_hotpotqa"
TOOL = "search"
Split = Literal["train", "test"]
SearchAll = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Prompt:
    """The prompt. `user` must contain {question}; an empty `system` is omitted."""

    system: str = "You answer questions from what you find with the tool `search`, not from memory."
    user: str = (
        "Question: {question}\n"
        "Think about what you need to know first, search for it, and search again for what is still missing. "
        "Give the answer alone, in a few words, as <answer>...</answer>."
    )

    @classmethod
    def read(cls, path: Path) -> Prompt:
        """The prompt of a YAML file with the keys `system`, `user` or both."""
        try:
            texts = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise DataError(f"the prompt file {path} cannot be read; write system: and user: into it") from error
        names = [field.name for field in fields(cls)]
        if (
            not isinstance(texts, dict)
            or not set(texts) <= set(names)
            or not all(isinstance(v, str) for v in texts.values())
        ):
            raise DataError(f"the prompt file {path} must have {' and '.join(names)}, each a text, and nothing else")
        return cls(**texts)

    def __post_init__(self) -> None:
        if "{question}" not in self.user:
            raise DataError("the user prompt must contain {question}, where the question goes")

    def messages(self, question: str) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        # `replace` and not `format`: a prompt may contain JSON with braces
        return [*system, {"role": "user", "content": self.user.replace("{question}", question)}]


class HotpotSource(NamedTuple):
    questions: list[Row]
    passages: list[Row]


def held_out(question_id: str) -> bool:
    """Whether the question belongs to the test split."""
    return int(hashlib.md5(question_id.encode(), usedforsecurity=False).hexdigest(), 16) % 5 == 0


def read_source(folder: Path | None) -> HotpotSource:
    """Questions and corpus, from a folder with train.jsonl and corpus.jsonl, or HotpotQA from the hub."""
    if folder is None:
        return _from_hub(download("HotpotQA", "hotpotqa/hotpot_qa", "distractor", "validation", _HOLDS))
    for name in ("train.jsonl", "corpus.jsonl"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} has no {name}; a source folder needs {_HOLDS}")
    return HotpotSource(list(read_rows(folder / "train.jsonl")), list(read_rows(folder / "corpus.jsonl")))


_HOLDS = "train.jsonl (id, question, golden_answers) and corpus.jsonl (id, title, text)"


def rows(questions: Iterable[Row], split: Split, prompt: Prompt | None = None) -> Iterator[Row]:
    """The questions of one split as rows."""
    prompt = prompt or Prompt()
    for index, item in enumerate(_checked(questions)):
        if held_out(item["id"]) != (split == "test"):
            continue
        about = {name: item[name] for name in ("supporting_titles", "type", "level") if name in item}
        yield {
            "data_source": DATA_SOURCE,
            "agent_name": "tool_agent",
            "prompt": prompt.messages(item["question"]),
            "ability": "search",
            "reward_model": {"style": "rule", "ground_truth": {"target": item["golden_answers"]}},
            "extra_info": {"split": split, "index": index, "id": item["id"], "question": item["question"], **about},
        }


def sft_rows(
    questions: Iterable[Row], search_all: SearchAll, tools: Sequence[dict[str, Any]], prompt: Prompt | None = None
) -> Iterator[Row]:
    """Conversations about train questions. `search_all` returns the results of the tool for each query.

    The question itself is searched first, then the missing titles, each only after it was mentioned in a result. A
    question whose passages cannot all be found this way is skipped, because it would train the model to guess.
    """
    prompt = prompt or Prompt()
    chosen = [item for item in _checked(questions) if not held_out(item["id"]) and item.get("supporting_titles")]
    wanted = {title for item in chosen for title in item["supporting_titles"]}
    queries = [*(item["question"] for item in chosen), *wanted]
    results = dict(zip(queries, search_all(queries), strict=True))
    for item in chosen:
        if steps := _search(item, results):
            turns = [turn for step in steps for turn in _turns(step)]
            answer = {"role": "assistant", "content": f"<answer>{item['golden_answers'][0]}</answer>"}
            yield {"messages": [*prompt.messages(item["question"]), *turns, answer], "tools": list(tools)}


class _Step(NamedTuple):
    thought: str
    query: str
    result: str


def _search(item: Row, results: Mapping[str, str]) -> list[_Step]:
    """The searches that find all supporting passages; empty if they cannot all be found."""
    question = item["question"]
    steps = [_Step("I search for the question as it is.", question, results[question])]
    read, missing = question + results[question], list(item["supporting_titles"])
    while missing := [title for title in missing if not _holds(read, title)]:
        named = next((title for title in missing if title.partition(" (")[0] in read), None)
        if named is None or not _holds(results[named], named):
            return []
        steps.append(_Step(f"I still need to know more about {named}.", named, results[named]))
        read += results[named]
    return steps


def _holds(text: str, title: str) -> bool:
    """Whether the tool's results have the passage of that title."""
    return f'(Title: "{title}")' in text


def _turns(step: _Step) -> Iterator[Message]:
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"query": step.query}}}
    yield {"role": "assistant", "content": step.thought, "tool_calls": [call]}
    yield {"role": "tool", "content": step.result, "name": TOOL}


def _checked(questions: Iterable[Row]) -> Iterator[Row]:
    for index, item in enumerate(questions):
        texts = [item.get("id"), item.get("question"), *(item.get("golden_answers") or [None])]
        if not all(isinstance(text, str) and text for text in texts):
            raise DataError(f"question {index}: there must be an id, a question and at least one golden answer")
        yield item


def _from_hub(items: Iterable[Mapping[str, Any]]) -> HotpotSource:
    questions: list[Row] = []
    passages: dict[str, str] = {}
    for item in items:
        context = item["context"]
        for title, sentences in zip(context["title"], context["sentences"], strict=True):
            passages.setdefault(title, "".join(sentences).strip())
        titles = list(dict.fromkeys(item["supporting_facts"]["title"]))
        about = {"supporting_titles": titles, "type": item["type"], "level": item["level"]}
        questions.append({"id": item["id"], "question": item["question"], "golden_answers": [item["answer"]], **about})
    corpus = [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(passages.items())]
    return HotpotSource(questions, corpus)


def write_search_r1(out: Path, source: Path | None, prompt_file: Path | None, sft: bool = False) -> list[WrittenFile]:
    """Write train.parquet, test.parquet, corpus.jsonl and, with `sft`, sft.parquet with BM25 search results."""
    prompt = Prompt.read(prompt_file) if prompt_file else Prompt()
    questions, passages = read_source(source)
    written = [
        write_file(out / "train.parquet", rows(questions, "train", prompt)),
        write_file(out / "test.parquet", rows(questions, "test", prompt)),
        write_file(out / "corpus.jsonl", passages),
    ]
    return [*written, _write_searches(out, questions, prompt)] if sft else written


def _write_searches(out: Path, questions: Sequence[Row], prompt: Prompt) -> WrittenFile:
    with TemporaryDirectory() as folder:
        index = build_index(out / "corpus.jsonl", Path(folder) / "index", IndexSpec()).path
        tool = {"name": TOOL, "config": {"index_path": str(index), "topk": 3}}
        tools = ToolBox(load_tools({"tools": [tool]}), ToolLimits(max_response_chars=2000, truncate_side="right"))
        searches = partial(tool_answers, tools, TOOL, "query")
        rows = sft_rows(questions, searches, tools.schemas(), prompt)
        return write_file(out / "sft.parquet", rows)
