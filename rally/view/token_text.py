"""Every token has its own piece of text, and the pieces joined are the text of the whole; without a tokenizer there is
a sentence that says why.

Only files on this machine are read: a viewer asks no network, and runs no code of a model's folder.
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
UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet


class TokenizerLookup(NamedTuple):
    """A run's tokenizer, or why there is none."""

    decode: Decode | None
    note: str


def find_tokenizer(run: Path) -> TokenizerLookup:
    """From where the configuration says, or from a checkpoint of the run."""
    named = _named(run / "config.yaml")
    for place in _places(run, named):
        decode = _load(place)
        if decode is not None:
            return TokenizerLookup(decode, "")
    where = f"at {' or '.join(named)}" if named else "because the run names no model"
    shown = "tokens are shown as numbers beside the text of their turn; name its folder with --tokenizer"
    return TokenizerLookup(None, f"No tokenizer was found {where}: {shown}.")


def given_tokenizer(place: str) -> TokenizerLookup:
    """The one that the user names, for runs that were trained elsewhere."""
    decode = _load(place)
    if decode is None:
        raise RallyError(f"--tokenizer {place} holds no tokenizer; give a model's folder, or a name this machine has")
    return TokenizerLookup(decode, "")


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text of each token in its place. Bytes of one character go with the token that completes it."""
    alone = [decode([token]) for token in ids]
    return alone if "".join(alone) == decode(ids) else list(_in_context(decode, ids))


def _in_context(decode: Decode, ids: Sequence[int]) -> Iterator[str]:
    anchor = read = 0  # text up to token `read` is out; decoding begins at `anchor`, for its context
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
    """What the configuration calls the tokenizer, and the model it may come with."""
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return []
    for name in ("actor_rollout_ref", "model"):
        tree = tree.get(name) if isinstance(tree, dict) else None
    model = tree if isinstance(tree, dict) else {}
    values = (model.get(key) for key in ("tokenizer_path", "path"))
    return [value for value in values if isinstance(value, str) and value]


def _load(place: str) -> Decode | None:
    if (file := Path(place) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(file))
        return _remembering(lambda ids: str(plain.decode(list(ids), skip_special_tokens=False)))
    return _load_by_transformers(place)


def _load_by_transformers(place: str) -> Decode | None:
    """For names on the hub that this machine has already, GGUF files, and tokenizers of other kinds."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    folder, gguf = (
        (str(Path(place).parent), {"gguf_file": Path(place).name}) if place.endswith(".gguf") else (place, {})
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **gguf)
    except (OSError, ValueError, ImportError, KeyError):
        return None
    return _remembering(lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)))


def _remembering(decode: Decode) -> Decode:
    """Tokens alone are asked for again and again."""
    one = lru_cache(maxsize=None)(lambda token: decode([token]))
    return lambda ids: one(ids[0]) if len(ids) == 1 else decode(ids)
