"""The text of each token of a recorded run, and the lookup of the run's tokenizer.

The pieces joined are the text of the whole. Without a tokenizer the lookup says why. Only local files are read: the
viewer uses no network and runs no code from model folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rally.types import RallyError

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # the decoder's replacement for incomplete or invalid bytes


class TokenizerLookup(NamedTuple):
    """A run's tokenizer, or the reason why there is none."""

    decode: Decode | None
    note: str


def find_tokenizer(run: Path) -> TokenizerLookup:
    """The tokenizer that the configuration names, or that of a checkpoint of the run."""
    named = _named(run / "config.yaml")
    for place in _places(run, named):
        decode = _load(place)
        if decode is not None:
            return TokenizerLookup(decode, "")
    where = f"at {' or '.join(named)}" if named else "because the run names no model"
    shown = "tokens are shown as numbers beside the text of their turn; name its folder with --tokenizer"
    return TokenizerLookup(None, f"No tokenizer was found {where}: {shown}.")


def given_tokenizer(place: str) -> TokenizerLookup:
    """The tokenizer that the user names, for runs that were trained elsewhere."""
    decode = _load(place)
    if decode is None:
        raise RallyError(f"--tokenizer {place} has no tokenizer; name a model folder or a cached model")
    return TokenizerLookup(decode, "")


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text of each token. A character that spans tokens belongs to the token that completes it."""
    alone = [decode([token]) for token in ids]
    return alone if "".join(alone) == decode(ids) else list(_in_context(decode, ids))


def _in_context(decode: Decode, ids: Sequence[int]) -> Iterator[str]:
    anchor = read = 0  # text up to token `read` has been returned; decoding starts at `anchor`, for context
    for end in range(1, len(ids) + 1):
        before, text = decode(ids[anchor:read]), decode(ids[anchor:end])
        if text.endswith(UNFINISHED) and end - read < 8 and end < len(ids):
            yield ""
            continue
        yield text[len(before) :]
        anchor, read = read, end


def _places(run: Path, named: Sequence[str]) -> Iterator[str]:
    for value in named:
        yield from (str(p) for p in (run / value, run.parent / value) if p.exists() and not Path(value).exists())
        yield value
    checkpoints = sorted((run / "checkpoints").glob("global_step_*/actor"), key=lambda p: p.stat().st_mtime)
    yield from map(str, reversed(checkpoints))


def _named(path: Path) -> list[str]:
    """The tokenizer and the model that the configuration names."""
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    for name in ("actor_rollout_ref", "model"):
        tree = tree.get(name) if isinstance(tree, dict) else None
    model = tree if isinstance(tree, dict) else {}
    values = (model.get(key) for key in ("tokenizer_path", "path"))
    return [value for value in values if isinstance(value, str) and value]


def _load(place: str) -> Decode | None:
    if (file := Path(place) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            plain = Tokenizer.from_file(str(file))
        except Exception:  # noqa: BLE001 - the package raises Exception itself, here for a damaged file
            return None
        return _cached(lambda ids: str(plain.decode(list(ids), skip_special_tokens=False)))
    return _load_by_transformers(place)


def _load_by_transformers(place: str) -> Decode | None:
    """Loads cached hub models, GGUF files and tokenizers without a tokenizer.json."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    folder, gguf = (
        (str(Path(place).parent), {"gguf_file": Path(place).name}) if place.endswith(".gguf") else (place, {})
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **gguf)
    except Exception:  # noqa: BLE001 - the package tokenizers raises Exception itself
        return None
    return _cached(lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)))


def _cached(decode: Decode) -> Decode:
    """Caches the text of single tokens."""
    one = lru_cache(maxsize=None)(lambda token: decode([token]))
    return lambda ids: one(ids[0]) if len(ids) == 1 else decode(ids)
