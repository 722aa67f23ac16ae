"""Redacts secrets: no secret from the configuration or environment is in a text that `redact` returns.

Secrets are the values of configuration keys and environment variables with names like token, api_key, secret, password
or authorization; credentials in URLs of a configuration (http://user:password@host); and values interpolated with
`${oc.env:NAME}`. A value from the environment is replaced by `${oc.env:NAME}`, so that a saved configuration can still
be loaded; any other by `***`. Values shorter than `SHORTEST` are hidden only under their keys, because they also occur
by chance. An existing path is not a secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
SHORTEST = 6
_HIDDEN_CREDENTIALS = f"//{HIDDEN}@"

# An environment variable OPENAI_KEY is a secret; the configuration key prompt_key names a column.
_SECRET_NAME = re.compile(
    r"(^|[_\-.])(?i:token|(api|access|secret|private|auth)[_-]?key|secret|passw(or)?d|authorization|credentials?)$"
    r"|^(?i:key)$|_KEY$|-(?i:key)$"
)
_SCHEME = re.compile(r"(?:Bearer|Basic|Token)\s+(\S+)", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"//[^/?#\s:@]*:([^/?#\s]+)@")
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")

_known: dict[str, str] = {}


def says_secret(name: str) -> bool:
    """Whether the name of a key or variable says that its value is a secret."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str) -> str:
    """The text without any known secret."""
    for value, shown in _known.items():
        text = text.replace(value, shown)
    return text


def redact_tree(value: Any) -> Any:
    """A tree of mappings and lists with every text redacted. Values of secret keys and all credentials in URLs are
    hidden, known or not."""
    if isinstance(value, Mapping):
        return {key: _under(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(item) for item in value]
    return _IN_ADDRESS.sub(_unless_named, redact(value)) if isinstance(value, str) else value


def redact_texts(value: Any) -> Any:
    """A tree of mappings and lists with every text redacted. Keys and numbers stay as they are."""
    if isinstance(value, Mapping):
        return {key: redact_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_texts(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def redacted_json(value: Any) -> str:
    """The value as ASCII JSON, with every text redacted."""
    text = json.dumps(value, allow_nan=False)
    # Walking the tree is slow, and there is rarely anything to hide.
    return text if redact(text) == text else json.dumps(redact_texts(value), allow_nan=False)


def learn_tree(written: Any) -> None:
    """Register the secrets of a configuration as written, before its interpolations are resolved."""
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
        for credentials in _IN_ADDRESS.finditer(written):
            if "${" not in credentials[0]:
                _learn(credentials[0], _HIDDEN_CREDENTIALS)
                _learn(credentials[1], HIDDEN)


def learn_environment(names: Iterable[str] | None = None) -> None:
    """Register the values of these environment variables; without `names`, of all with the name of a secret."""
    for name in filter(says_secret, os.environ) if names is None else names:
        _learn(os.environ.get(name, ""), f"${{oc.env:{name}}}")


def _learn(value: str, shown: str) -> None:
    if len(value) < SHORTEST or os.path.exists(value) or value == HIDDEN:
        return
    for spelling in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
        _known.setdefault(spelling, shown)
    # Longest first: if one secret begins another, the rest of the longer one must not remain.
    ordered = sorted(_known.items(), key=lambda item: -len(item[0]))
    _known.clear()
    _known.update(ordered)


def _unless_named(credentials: re.Match[str]) -> str:
    """The replacement of credentials. Those that are already `${oc.env:NAME}` stay."""
    return credentials[0] if "${" in credentials[0] else _HIDDEN_CREDENTIALS


def _under(key: str, item: Any) -> Any:
    if isinstance(item, str) and item and says_secret(key):
        shown = redact(item)
        return shown if shown != item else HIDDEN
    return redact_tree(item)
