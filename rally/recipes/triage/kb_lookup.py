"""The tool `kb_lookup`: returns the articles that share the rarest words with the query.

    tools:
      - class_name: rally.recipes.triage.kb_lookup.KBLookup
        config: {articles: data/triage/articles.jsonl, topk: 1}

For a knowledge base of prose, see `examples/knowledge_base`, which uses a BM25 index.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from rally.recipes.triage.data import NOTHING, TOOL
from rally.tools import BaseTool, ToolConfigError

_WORD = re.compile(r"\w+")


class KBArgs(BaseModel):
    query: str = Field(description="A log code, or words to look for")


class KBLookup(BaseTool[KBArgs]):
    """Looks up articles by their words, weighted by inverse document frequency."""

    name = TOOL
    description = "Looks an incident up in the knowledge base."
    args_schema = KBArgs

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        path = Path(self.config.get("articles", "data/triage/articles.jsonl"))
        if not path.is_file():
            raise ToolConfigError(f"{path} does not exist; make it with: rally data triage --out {path.parent}")
        self._topk = int(self.config.get("topk", 1))
        self._articles = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self._having: dict[str, list[int]] = defaultdict(list)
        for number, article in enumerate(self._articles):
            for word in {*_words(article["title"]), *_words(article["text"])}:
                self._having[word].append(number)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, None, dict[str, int]]:
        weights: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_words(parameters["query"])):
            having = self._having.get(word, [])
            for number in having:
                weights[number] += math.log(1 + len(self._articles) / len(having))
        best = [self._articles[n] for n in heapq.nlargest(self._topk, weights, key=weights.__getitem__)]
        text = "\n".join(f"{article['title']}: {article['text']}" for article in best)
        return text or NOTHING, None, {"articles": len(best)}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
