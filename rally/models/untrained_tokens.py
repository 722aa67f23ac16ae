"""Finds tokens of the chat format that the model never learned, and warns about them at the start of a run.

The last rows of an embedding belong to no token or to a reserved one. Training moves all of them in the same direction,
away from what occurs in texts, so they are nearly parallel. A token whose row is parallel to them was never in a text.

Shapes: V rows of the embedding, U of them at its end, H hidden size, N tokens examined.
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
PARALLEL = 0.99  # cosine similarity; lower for any two learned tokens


def untrained_tokens(model: str, tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> tuple[str, ...]:
    """The added tokens among `ids` that the model at this path never learned. Empty if its weights are not on this
    machine as safetensors, or if its vocabulary does not end in unused rows."""
    rows = _rows(model)
    names = {number: token for token, number in tokenizer.get_added_vocab().items()}
    asked = sorted(set(ids) & set(names))
    return tuple(names[number] for number in _parallel_to_last(rows, asked)) if rows and asked else ()


def chat_ids(codec: ChatCodec) -> tuple[int, ...]:
    """The tokens of a prompt and, if the template shows tool calls, of a call and its result."""
    asked = codec.encode_prompt([{"role": "user", "content": "?"}])
    if not codec.tools or not codec.probe().calls_shown:
        return asked
    name = codec.tools[0]["function"]["name"]
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}}
    answer = {"role": "tool", "name": name, "tool_call_id": "call_0", "content": "?"}
    reply = {"role": "assistant", "content": "", **codec.thought("?"), "tool_calls": [call]}
    with suppress(TemplateError):  # the template has no tool messages; loops then present results in their own way
        asked += codec.encode_assistant(reply)
        asked += codec.encode_delta([answer])
    return asked


def advice(tokens: Sequence[str], tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    """The warning, with what to do; `key` is the option that lists tokens to spell out."""
    text = f"the model has never learned {' and '.join(tokens)} (its weights for them are those of unused tokens)"
    control = {one.content for one in tokenizer.added_tokens_decoder.values() if one.special}.intersection(tokens)
    if ordinary := [token for token in tokens if token not in control]:
        which = " and ".join(ordinary) if control else "them"
        text += f"; spell {which} out in tokens that it knows: '{key}=[{','.join(ordinary)}]'"
    if control:
        text += "; control tokens can only be trained, with `rally sft` on conversations that contain them"
    return text


class EmbeddingRows(NamedTuple):
    """The file that contains the embedding, and its name in the file."""

    file: Path
    name: str


def _rows(model: str) -> EmbeddingRows | None:
    folder = weights_folder(model)
    candidates = (
        (EmbeddingRows(folder / file, name) for name, file in _places(folder) if name.endswith(NAMES)) if folder else ()
    )
    # An index may name files that are not downloaded yet.
    return next((rows for rows in candidates if rows.file.is_file()), None)


def _places(folder: Path) -> Iterable[tuple[str, str]]:
    """Each weight's name, and the file that contains it."""
    if not (folder / WHOLE).is_file():
        places: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return places.items()
    with safe_open(folder / WHOLE, "pt") as weights:
        return [(name, WHOLE) for name in weights.keys()]  # noqa: SIM118 - no mapping


def _parallel_to_last(rows: EmbeddingRows, asked: list[int]) -> list[int]:
    with safe_open(rows.file, "pt") as weights:
        whole_VH: Any = weights.get_slice(rows.name)
        size = whole_VH.get_shape()[0]
        asked = [number for number in asked if number < size]
        last_UH = normalize(whole_VH[max(0, size - LAST) :].float(), dim=1)
        asked_NH = normalize(torch.cat([whole_VH[:0], *(whole_VH[i : i + 1] for i in asked)]).float(), dim=1)
    mean_H: Tensor = last_UH.mean(0)
    if mean_H.norm() < PARALLEL:
        return []
    near_N = asked_NH @ normalize(mean_H, dim=0)
    return [number for number, near in zip(asked, near_N.tolist(), strict=True) if near > PARALLEL]


def warn_of_untrained_tokens(
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    ids: Iterable[int],
    key: str,
    warn_once: Callable[[str, str], None],
) -> None:
    """Warn about untrained tokens. Call it after loading the weights: for a hub name only the local cache is read."""
    if tokens := untrained_tokens(model, tokenizer, ids):
        warn_once("untrained_tokens", advice(tokens, tokenizer, key))
