"""How an encoder wants to be used is read from its own files, else known by its family, and kept with the index.

Pooling, normalisation and prefixes decide whether vectors mean anything, and nothing fails when they are wrong. So they
come, in this order, from what the user says, from the sentence-transformers files beside the weights, and from the
family that the model's name tells. What was decided stands in the index, and queries are encoded by that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rally.retrieval.errors import RetrievalError

Pooling = Literal["mean", "cls", "last", "max"]

LONGEST = 512
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`max_length` is in tokens, prefix and special tokens included."""

    pooling: Pooling = "mean"
    normalize: bool = True
    query_prefix: str = ""
    passage_prefix: str = ""
    max_length: int = LONGEST

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise RetrievalError(f"pooling must be one of {', '.join(get_args(Pooling))}, not {self.pooling!r}")
        if self.max_length < 1:
            raise RetrievalError(f"max_length must be at least 1 token, not {self.max_length}")


_FAMILIES: tuple[tuple[str, Recipe], ...] = (  # the first whose pattern is found in the model's name
    (r"\be5-.*instruct", Recipe(query_prefix=_WEB_SEARCH)),
    (r"\be5\b", Recipe(query_prefix="query: ", passage_prefix="passage: ")),
    (r"\bbge-m3\b", Recipe(pooling="cls")),
    (r"\bbge-.*\bzh\b", Recipe(pooling="cls", query_prefix="为这个句子生成表示以用于检索相关文章：")),
    (r"\bbge\b", Recipe(pooling="cls", query_prefix="Represent this sentence for searching relevant passages: ")),
    (r"\bcontriever\b", Recipe(normalize=False)),
)

_POOLING_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: dict[Any, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


def recipe_for(model: str, said: Mapping[str, Any]) -> Recipe:
    """The recipe of a folder or of a model on the Hugging Face hub; `said` is what the user gives, or None."""
    given = {name: value for name, value in said.items() if value is not None}
    return replace(_from_files(model, _of_family(model), given.get("pooling")), **given)


def _of_family(model: str) -> Recipe:
    name = Path(model).name.lower().replace("_", "-")
    return next((recipe for pattern, recipe in _FAMILIES if re.search(pattern, name)), Recipe())


def _from_files(model: str, recipe: Recipe, pooling: Pooling | None) -> Recipe:
    """What the encoder's own files say; a `pooling` that the user gives is not looked up."""
    modules = _read(model, "modules.json")
    if modules is None:
        return recipe
    by_kind = {str(module.get("type")).rpartition(".")[2]: module for module in modules}
    extra = sorted(set(by_kind) - {"Transformer", "Pooling", "Normalize"})
    if extra:
        raise RetrievalError(f"the encoder {model} has a {extra[0]} layer after pooling, which is not supported")
    settings = _read(model, "config_sentence_transformers.json") or {}
    recipe = replace(recipe, normalize="Normalize" in by_kind or not _by_dot_product(model, settings))
    if "Pooling" in by_kind and pooling is None:
        recipe = replace(recipe, pooling=_pooling(model, f"{by_kind['Pooling'].get('path', '1_Pooling')}/config.json"))
    prompts = settings.get("prompts") or {}
    if prompts.get("query"):
        passage = prompts.get("passage") or prompts.get("document") or ""
        recipe = replace(recipe, query_prefix=prompts["query"], passage_prefix=passage)
    length = (_read(model, "sentence_bert_config.json") or {}).get("max_seq_length")
    return replace(recipe, max_length=length) if length else recipe


def _by_dot_product(model: str, settings: Mapping[str, Any]) -> bool:
    """Older models say in their name alone that their vectors are not to be normalised."""
    return settings.get("similarity_fn_name") == "dot" or "-dot" in Path(model).name


def _pooling(model: str, file: str) -> Pooling:
    config = _read(model, file) or {}
    modes = {pooling for key, pooling in _POOLING_KEYS.items() if config.get(key)}
    modes |= {_POOLING_NAMES[config["pooling_mode"]]} if config.get("pooling_mode") in _POOLING_NAMES else set()
    if len(modes) != 1:
        raise RetrievalError(f"the pooling in {file} of the encoder {model} is not supported; give one with --pooling")
    return modes.pop()


def _read(model: str, file: str) -> Any:
    """A JSON file of the model; None where it has no such file."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(
            model, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError as error:
        raise RetrievalError(f"the encoder {model} cannot be found ({str(error).splitlines()[0]})") from None
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
