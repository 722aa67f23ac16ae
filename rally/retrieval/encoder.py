"""The text encoder of dense search, run with transformers, and its settings by model family and model files.

The vector of a text does not depend on its batch, up to rounding. Truncated texts are counted.

Shapes: B texts of a batch, T tokens, H vector width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from rally.hub import on_disk_alone
from rally.retrieval.hits import RetrievalError

Pooling = Literal["mean", "cls", "last", "max"]

MAX_LENGTH = 512
ADVICE = "name the folder of an encoder, or a hub name that can be reached"
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """How texts are encoded. `max_length` is in tokens, including prefix and special tokens."""

    pooling: Pooling = "mean"
    normalize: bool = True
    query_prefix: str = ""
    passage_prefix: str = ""
    max_length: int = MAX_LENGTH

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise RetrievalError(f"--pooling must be one of {', '.join(get_args(Pooling))}, not {self.pooling!r}")
        if self.max_length < 1:
            raise RetrievalError(f"--max-length must be at least 1 token, not {self.max_length}")


_FAMILIES: tuple[tuple[str, EncoderSettings], ...] = (  # the first whose pattern matches the model's name
    (r"\be5-.*instruct", EncoderSettings(query_prefix=_WEB_SEARCH)),
    (r"\be5\b", EncoderSettings(query_prefix="query: ", passage_prefix="passage: ")),
    (r"\bbge-m3\b", EncoderSettings(pooling="cls")),
    (r"\bbge-.*\bzh\b", EncoderSettings(pooling="cls", query_prefix="为这个句子生成表示以用于检索相关文章：")),
    (
        r"\bbge\b",
        EncoderSettings(pooling="cls", query_prefix="Represent this sentence for searching relevant passages: "),
    ),
    (r"\bcontriever\b", EncoderSettings(normalize=False)),
)

_POOLING_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: dict[Any, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


def settings_for(model: str, overrides: Mapping[str, Any]) -> EncoderSettings:
    """The settings of a model folder or hub name; values of `overrides` that are not None take precedence."""
    chosen = {name: value for name, value in overrides.items() if value is not None}
    return replace(_from_files(model, _of_family(model), chosen.get("pooling")), **chosen)


def _of_family(model: str) -> EncoderSettings:
    name = Path(model).name.lower().replace("_", "-")
    return next((recipe for pattern, recipe in _FAMILIES if re.search(pattern, name)), EncoderSettings())


def _from_files(model: str, recipe: EncoderSettings, pooling: Pooling | None) -> EncoderSettings:
    """The settings in the encoder's own files. The pooling is not read if the user sets it."""
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
    """Whether vectors are compared without normalisation; older models say so only in their name."""
    return settings.get("similarity_fn_name") == "dot" or "-dot" in Path(model).name


def _pooling(model: str, file: str) -> Pooling:
    config = _read(model, file) or {}
    modes = {pooling for key, pooling in _POOLING_KEYS.items() if config.get(key)}
    modes |= {_POOLING_NAMES[config["pooling_mode"]]} if config.get("pooling_mode") in _POOLING_NAMES else set()
    if len(modes) != 1:
        raise RetrievalError(f"the pooling in {file} of the encoder {model} is not supported; set one with --pooling")
    return modes.pop()


def _read(model: str, file: str) -> Any:
    """A JSON file of the model; None if it has no such file."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(
            model, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError as error:
        raise RetrievalError(f"the encoder {model} cannot be found ({str(error).splitlines()[0]}); {ADVICE}") from None
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


if TYPE_CHECKING:
    import torch

BATCH = 64


class EncodedTexts(NamedTuple):
    """Vectors of texts."""

    vectors: np.ndarray[Any, Any]
    """One row of float32 per text."""
    cut: int
    """The number of texts that were truncated."""


class Encoder:
    """A loaded encoder."""

    def __init__(self, model: str, recipe: EncoderSettings, device: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            source, dtype = on_disk_alone(model), torch.float32 if device == "cpu" else torch.float16
            self._tokenizer = AutoTokenizer.from_pretrained(model, **source)
            loaded = AutoModel.from_pretrained(model, dtype=dtype, adapter_kwargs=source, **source)
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f"the encoder {model} cannot be loaded ({str(error).splitlines()[0]}); {ADVICE}"
            ) from None
        self._model = loaded.to(device).eval()
        positions = getattr(loaded.config, "max_position_embeddings", None) or recipe.max_length
        self._max_length = min(recipe.max_length, positions, self._tokenizer.model_max_length)
        self._recipe = recipe
        self._device = device

    @property
    def width(self) -> int:
        return int(self._model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> EncodedTexts:
        return self._encode([self._recipe.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> EncodedTexts:
        return self._encode([self._recipe.passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> EncodedTexts:
        """Encode in batches of similar length, to limit padding."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        vectors, cut = np.empty((len(clean), self.width), dtype=np.float32), 0
        by_length = sorted(range(len(clean)), key=lambda index: len(clean[index]))
        for start in range(0, len(clean), BATCH):
            rows = by_length[start : start + BATCH]
            vectors[rows], cut_here = self._encode_batch([clean[row] for row in rows])
            cut += cut_here
        return EncodedTexts(vectors, cut)

    def _encode_batch(self, texts: list[str]) -> EncodedTexts:
        import torch

        # One token more than fits, to detect truncated texts.
        longer = self._tokenizer(texts, truncation=True, max_length=self._max_length + 1)
        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            hidden_BTH = self._model(**batch).last_hidden_state.float()
            vectors_BH = pool(hidden_BTH, batch.attention_mask, self._recipe.pooling)
            if self._recipe.normalize:
                vectors_BH = torch.nn.functional.normalize(vectors_BH, dim=-1)
        return EncodedTexts(vectors_BH.cpu().numpy(), sum(len(ids) > self._max_length for ids in longer.input_ids))


def pool(hidden_BTH: torch.Tensor, mask_BT: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One vector per text from those of its tokens, ignoring padding on either side."""
    import torch

    rows_B = torch.arange(len(hidden_BTH), device=hidden_BTH.device)
    if pooling == "cls":
        return hidden_BTH[rows_B, mask_BT.argmax(dim=1)]
    if pooling == "last":
        last_B = mask_BT.shape[1] - 1 - mask_BT.flip(1).argmax(dim=1)
        return hidden_BTH[rows_B, last_B]
    mask_BT1 = mask_BT.unsqueeze(-1).bool()
    if pooling == "max":
        return hidden_BTH.masked_fill(~mask_BT1, float("-inf")).amax(dim=1)
    return hidden_BTH.masked_fill(~mask_BT1, 0.0).sum(dim=1) / mask_BT1.sum(dim=1)
