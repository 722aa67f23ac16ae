"""Tokens that a chat format is written in and that the model never learned are told, before a run waits for them.

A vocabulary ends in rows that no token has, or one that is kept for later. No text ever moved them but away from what
was written, all in the same direction, so that they are alike; a token whose row is one more of them has never been in
a text either.

Shapes: V rows of the embedding, U of them at its end, H wide, N tokens looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerBase

from rally.chat import ChatCodec
from rally.chat.templates import TemplateError
from rally.models.load import INDEX, WHOLE, weights_folder

NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
KEY = "actor_rollout_ref.model.spelled_tokens"
LAST = 16
ALIKE = 0.99  # no two rows of tokens that were learned are


def untrained_tokens(model: str, tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> tuple[str, ...]:
    """Which of the added tokens among `ids` the model at this path never learned. None are known of a model whose
    weights are not here as safetensors, or whose vocabulary does not end in unused rows."""
    rows = _rows(model)
    names = {number: token for token, number in tokenizer.get_added_vocab().items()}
    asked = sorted(set(ids) & set(names))
    return tuple(names[number] for number in _like_the_last(rows, asked)) if rows and asked else ()


def chat_ids(codec: ChatCodec) -> tuple[int, ...]:
    """The tokens around every prompt, and around a call and its answer where the template shows calls."""
    asked = codec.encode_prompt([{"role": "user", "content": "?"}])
    if not codec.tools or not codec.probe().calls_shown:
        return asked
    name = codec.tools[0]["function"]["name"]
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}}
    answer = {"role": "tool", "name": name, "tool_call_id": "call_0", "content": "?"}
    asked += codec.encode_assistant({"role": "assistant", "content": "", "tool_calls": [call]})
    with suppress(TemplateError):  # a template may have no place for answers: a loop then gives them in its own way
        asked += codec.encode_delta([answer])
    return asked


def advice(tokens: Sequence[str], tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    """What to do about them, in one sentence; `key` is where tokens to spell out are named."""
    told = f"the model has never learned {' and '.join(tokens)} (its weights for them are those of unused tokens)"
    control = {one.content for one in tokenizer.added_tokens_decoder.values() if one.special}.intersection(tokens)
    if ordinary := [token for token in tokens if token not in control]:
        which = " and ".join(ordinary) if control else "them"
        told += f"; have {which} spelled out in tokens that it knows: '{key}=[{','.join(ordinary)}]'"
    if control:
        told += "; control tokens can only be taught, by `rally sft` over conversations that hold them"
    return told


class EmbeddingRows(NamedTuple):
    """The file that the embedding is in, and its name there."""

    file: Path
    name: str


def _rows(model: str) -> EmbeddingRows | None:
    folder = weights_folder(model)
    found = (
        (EmbeddingRows(folder / file, name) for name, file in _places(folder) if name.endswith(NAMES)) if folder else ()
    )
    return next((rows for rows in found if rows.file.is_file()), None)  # a hub's index comes before what it names


def _places(folder: Path) -> Iterable[tuple[str, str]]:
    """Every weight, and the file that it is in."""
    if not (folder / WHOLE).is_file():
        places: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return places.items()
    with safe_open(folder / WHOLE, "pt") as weights:
        return [(name, WHOLE) for name in weights.keys()]  # noqa: SIM118 - no mapping


def _like_the_last(rows: EmbeddingRows, asked: list[int]) -> list[int]:
    with safe_open(rows.file, "pt") as weights:
        whole_VH: Any = weights.get_slice(rows.name)
        size = whole_VH.get_shape()[0]
        asked = [number for number in asked if number < size]
        last_UH = normalize(whole_VH[max(0, size - LAST) :].float(), dim=1)
        asked_NH = normalize(torch.cat([whole_VH[:0], *(whole_VH[i : i + 1] for i in asked)]).float(), dim=1)
    way_H: Tensor = last_UH.mean(0)
    if way_H.norm() < ALIKE:
        return []
    near_N = asked_NH @ normalize(way_H, dim=0)
    return [number for number, near in zip(asked, near_N.tolist(), strict=True) if near > ALIKE]


def warn_of_untrained_tokens(
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    ids: Iterable[int],
    key: str,
    warn_once: Callable[[str, str], None],
) -> None:
    """To be called once the weights are here, since of a name on a hub only its cache is read."""
    if tokens := untrained_tokens(model, tokenizer, ids):
        warn_once("untrained_tokens", advice(tokens, tokenizer, key))
