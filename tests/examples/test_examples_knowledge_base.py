"""The knowledge-base example works as shipped: its articles, its YAML, its state per episode."""

import json
from pathlib import Path

import pytest

from rally.retrieval import IndexSpec, build_index
from rally.tools import ToolBox, load_tools
from rally.types import Task, ToolCall

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "knowledge_base"


async def test_a_lookup_gives_a_summary_and_its_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KB_INDEX", str(tmp_path / "kb"))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    build_index(EXAMPLE / "articles.jsonl", tmp_path / "kb", IndexSpec())
    tools = load_tools(EXAMPLE / "tools.yaml")
    kwargs = {"kb_lookup": {"create_kwargs": {"service": "checkout"}}}
    task = Task(id="t", data_source="d", prompt=({"role": "user", "content": "why?"},), tools_kwargs=kwargs)
    session = ToolBox(tools).open(task, "e")
    call = ToolCall(name="kb_lookup", arguments={"query": "OOM command not allowed, hit rate down"})
    first, second = (await session.run([call]))[0], (await session.run([call]))[0]
    told = json.loads(first.response.text or "")
    assert told["summary"] == "Most likely: cache breakdown"
    assert [article["title"] for article in told["evidence"]] == ["Cache out of memory"], "login's is left out"
    assert told["evidence"][0]["snippet"].startswith("The hit rate falls")
    assert (first.reward, first.metrics) == (0.0, {"articles": 1, "new_articles": 1})
    again = json.loads(second.response.text or "")
    assert again["evidence"] == [{"title": "Cache out of memory", "snippet": "(told before)"}]
    nothing = (await session.run([ToolCall(name="kb_lookup", arguments={"query": "zebra"})]))[0]
    assert json.loads(nothing.response.text or "")["evidence"] == []
    await session.close()
