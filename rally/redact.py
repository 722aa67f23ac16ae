"""Guarantees: a secret that Rally was told of, by configuration or environment, is in no text that `redact` returned.

Known secrets are the values of configuration keys and environment variables whose names say so (token, api_key, secret,
password, authorization, ...), users and passwords in addresses that a configuration holds (http://user:password@host),
and what `${oc.env:NAME}` put into it. A value from the environment becomes the `${oc.env:NAME}` it came from, so that a
saved configuration can still be loaded; any other becomes `***`. Values of fewer than `SHORTEST` characters are hidden
under their keys only, for they also occur by chance; a path that exists is no secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
SHORTEST = 6
_NOBODY = f"//{HIDDEN}@"

# A variable OPENAI_KEY is a secret; a configuration's prompt_key names a column.
_SECRET_NAME = re.compile(
    r"(^|[_\-.])(?i:token|(api|access|secret|private|auth)[_-]?key|secret|passw(or)?d|authorization|credentials?)$"
    r"|^(?i:key)$|_KEY$|-(?i:key)$"
)
_SCHEME = re.compile(r"(?:Bearer|Basic|Token)\s+(\S+)", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"//[^/?#\s:@]*:([^/?#\s]+)@")
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")

_known: dict[str, str] = {}


def says_secret(name: str) -> bool:
    """Whether a key or variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str) -> str:
    """The text without any known secret."""
    for value, shown in _known.items():
        text = text.replace(value, shown)
    return text


def redact_tree(value: Any) -> Any:
    """Mappings and lists, with the values of keys that say so and all users and passwords in addresses hidden, and
    every text redacted."""
    if isinstance(value, Mapping):
        return {key: _under(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(item) for item in value]
    return _IN_ADDRESS.sub(_unless_named, redact(value)) if isinstance(value, str) else value


def redact_texts(value: Any) -> Any:
    """Mappings and lists with every text redacted; a number or a name that a secret happens to be stays as it is."""
    if isinstance(value, Mapping):
        return {key: redact_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_texts(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def redacted_json(value: Any) -> str:
    """The value as JSON in ASCII, without any known secret in its texts."""
    text = json.dumps(value, allow_nan=False)
    # The walk is slow, and nearly always there is nothing to hide.
    return text if redact(text) == text else json.dumps(redact_texts(value), allow_nan=False)


def learn_tree(written: Any) -> None:
    """Learn the secrets of a configuration as it was written, its interpolations not yet resolved."""
    if isinstance(written, Mapping):
        for key, item in written.items():
            if isinstance(item, str) and "${" not in item and says_secret(str(key)):
                _learn(item, HIDDEN)
                _learn("".join(_SCHEME.findall(item)), HIDDEN)
            learn_tree(item)
    elif isinstance(written, (list, tuple)):
        for item in written:
            learn_tree(item)
    elif isinstance(written, str):
        learn_environment(_FROM_ENVIRONMENT.findall(written))
        for found in _IN_ADDRESS.finditer(written):
            if "${" not in found[0]:
                _learn(found[0], _NOBODY)
                _learn(found[1], HIDDEN)


def learn_environment(names: Iterable[str] | None = None) -> None:
    """Learn the values of these environment variables; without names, of all whose names say that they are secret."""
    for name in filter(says_secret, os.environ) if names is None else names:
        _learn(os.environ.get(name, ""), f"${{oc.env:{name}}}")


def _learn(value: str, shown: str) -> None:
    if len(value) < SHORTEST or os.path.exists(value) or value == HIDDEN:
        return
    for spelling in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
        _known.setdefault(spelling, shown)
    # Longest first: of two secrets of which one begins the other, the rest of the longer one must not stay behind.
    ordered = sorted(_known.items(), key=lambda item: -len(item[0]))
    _known.clear()
    _known.update(ordered)


def _unless_named(credentials: re.Match[str]) -> str:
    """What hides a user and password; where they come from the environment, it is named already."""
    return credentials[0] if "${" in credentials[0] else _NOBODY


def _under(key: str, item: Any) -> Any:
    if isinstance(item, str) and item and says_secret(key):
        shown = redact(item)
        return shown if shown != item else HIDDEN
    return redact_tree(item)
