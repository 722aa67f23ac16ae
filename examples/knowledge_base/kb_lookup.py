"""A knowledge base as a tool: each lookup returns a summary and its source articles, as one JSON object.

    rally data index examples/knowledge_base/articles.jsonl --out runs/knowledge_base
    rally train ... actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/knowledge_base/tools.yaml

An episode is about one incident. A row may name the affected service
(`tools_kwargs: {kb_lookup: {create_kwargs: {service: checkout}}}`); then articles of other services are left out. The
tool remembers what the episode has read: it returns an article in full once, later only its title.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field

from rally.retrieval import open_index
from rally.tools import BaseTool, ToolConfigError, ToolResponse

CANDIDATES = 20


class KBArgs(BaseModel):
    query: str = Field(description="Symptoms, error messages or names to look for")


@dataclass
class Case:
    """The subject of one episode, and the titles it has read."""

    service: str | None
    read: set[str] = field(default_factory=set)


class KBLookup(BaseTool[KBArgs]):
    name = "kb_lookup"
    description = "Looks incidents up in the internal knowledge base; gives a summary and the articles it rests on."
    args_schema = KBArgs

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        if "index_path" not in self.config:
            raise ToolConfigError("kb_lookup needs index_path in its config; build one with: rally data index")
        self._index = open_index(self.config["index_path"])
        self._topk = int(self.config.get("topk", 3))
        self._cases: dict[str, Case] = {}

    async def create(
        self, instance_id: str | None = None, service: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._cases[instance_id] = Case(service)
        return instance_id, ToolResponse(text="ready")

    def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[dict[str, Any], float, dict[str, Any]]:
        """Not async, so it runs in a thread: it reads files."""
        case = self._cases[instance_id]
        found = [hit.document for hit in self._index.search([parameters["query"]], CANDIDATES)[0]]
        fitting = [article for article in found if case.service in (None, article["service"])][: self._topk]
        new = {article["title"] for article in fitting} - case.read
        case.read |= new
        evidence = [
            {"title": article["title"], "snippet": article["text"] if article["title"] in new else "(told before)"}
            for article in fitting
        ]
        summary = f"Most likely: {fitting[0]['cause']}" if fitting else "The knowledge base has nothing on this."
        return {"summary": summary, "evidence": evidence}, 0.0, {"articles": len(fitting), "new_articles": len(new)}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._cases[instance_id]
