"""Redacts secrets: no secret from the configuration or environment is in a text that `redact` returns.

Secrets are the values of configuration keys and environment variables whose names end in a word like token, api_key,
secret, password, cookie or authorization, in any spelling (`GITHUB_PAT`, `clientSecret`, `db-password`); credentials in
URLs (http://user:password@host); values interpolated with `${oc.env:NAME}`; and, in any text, what has the form of a
well-known kind of token (`ghp_...`, `sk-...`, `AKIA...`, JSON Web Tokens, private keys, Authorization headers). A value
from the environment is replaced by `${oc.env:NAME}`, so that a saved configuration can still be loaded; any other by
`***`. Values shorter than `SHORTEST` are hidden only under their keys, because they also occur by chance. An existing
path is not a secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
SHORTEST = 6
_HIDDEN_CREDENTIALS = f"//{HIDDEN}@"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset([
    "secret", "secrets", "password", "passwords", "passwd", "passwds", "passphrase", "passphrases", "pwd", "pat",
    "pats", "apikey", "apikeys", "authorization", "credential", "credentials", "cookie", "cookies", "jwt", "bearer",
    "dsn", "auth", "creds", "cred", "pw", "passcode", "passcodes", "psk", "pswd", "sshpass", "rootpw", "userpw",
    "sessionid", "mnemonic",
])  # fmt: skip
_SECRET_PAIRS = frozenset([
    ("connection", "string"), ("seed", "phrase"), ("auth", "header"), ("authorization", "header"), ("private", "pem"),
])  # fmt: skip
_SECRET_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "accesskey", "secretkey", "privatekey")
_VENDORS = frozenset([
    "anthropic", "aws", "azure", "bing", "brave", "cohere", "deepseek", "discord", "exa", "fireworks", "gcp", "gemini",
    "github", "gitlab", "google", "groq", "hf", "huggingface", "jina", "mistral", "neptune", "nvidia", "openai",
    "openrouter", "perplexity", "pinecone", "replicate", "sendgrid", "sentry", "serpapi", "serper", "slack", "stripe",
    "tavily", "telegram", "together", "twilio", "wandb", "wolfram",
])  # fmt: skip
_QUALIFIERS = _VENDORS | frozenset([
    "prod", "production", "dev", "development", "staging", "stage", "test", "testing", "live", "old", "backup", "value",
    "val", "base", "raw", "primary", "secondary", "ro", "rw", "readonly", "readwrite", "main", "b64", "hex", "v",
])  # fmt: skip
"""A name may end in such a word after the word for a secret: API_KEY_OPENAI, db_password_prod."""
_KINDS_OF_KEY = _VENDORS | frozenset([
    "api", "access", "secret", "private", "auth", "encryption", "signing", "master", "account", "client", "deploy",
    "license", "service", "shared", "ssh", "storage", "subscription", "webhook", "session", "hmac", "decryption",
    "crypto", "admin", "bot", "app", "fernet",
])  # fmt: skip
"""A `key` after one of these words is a secret; prompt_key names a column, primary_key a row."""
_KINDS_OF_PASS = frozenset([
    "admin", "db", "database", "ftp", "http", "mail", "mysql", "postgres", "proxy", "redis", "root", "smtp", "ssh",
    "user", "bind", "ldap", "login", "sudo", "keystore", "truststore", "vault",
])  # fmt: skip
_VOCABULARY = frozenset([
    "pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "video", "audio", "vision", "end", "start", "stop",
    "special", "next", "prev", "last", "first", "new", "per", "max", "min", "num", "prompt", "response", "control",
    "extra", "tool", "think", "placeholder",
])  # fmt: skip
"""A `token` after one of these words belongs to a tokenizer."""
_PATHS = ("PWD", "OLDPWD")

# An environment variable OPENAI_KEY is a secret, and so is a header X-Key.
_BARE_KEY = re.compile(r"^(?i:key)$|_KEY$|-(?i:key)$")
_SCHEME = re.compile(r"(?:Bearer|Basic|Token)\s+(\S+)", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"//[^/?#\s:@]*:([^/?#\s]+)@")
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")
_ASSIGNMENT = re.compile(r"-{0,2}([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)

_SHAPES = {
    **{f"gh{kind}_": rf"gh{kind}_[A-Za-z0-9]{{20,}}" for kind in "pousr"},
    "github_pat_": r"github_pat_\w{20,}",
    "glpat-": r"glpat-[\w-]{16,}",
    "sk-": r"sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}",
    "xox": r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "AKIA": r"AKIA[0-9A-Z]{16}\b",
    "ASIA": r"ASIA[0-9A-Z]{16}\b",
    "AIza": r"AIza[\w-]{35}",
    "ya29.": r"ya29\.[\w-]{20,}",
    "hf_": r"hf_[A-Za-z0-9]{30,}",
    "npm_": r"npm_[A-Za-z0-9]{36}\b",
    "pypi-": r"pypi-[\w-]{40,}",
    "SG.": r"SG\.[\w-]{16,}\.[\w-]{16,}",
    **{f"{kind}_live_": rf"{kind}_live_[A-Za-z0-9]{{16,}}" for kind in ("sk", "rk")},
    "sk_test_": r"sk_test_[A-Za-z0-9]{16,}",
    "gsk_": r"gsk_[A-Za-z0-9]{40,}",
    "nvapi-": r"nvapi-[\w-]{40,}",
    "pplx-": r"pplx-[A-Za-z0-9]{32,}",
    "xai-": r"xai-[A-Za-z0-9]{40,}",
    "shpat_": r"shpat_[a-f0-9]{32}\b",
    "dop_v1_": r"dop_v1_[a-f0-9]{64}\b",
    "AccountKey=": r"AccountKey=[A-Za-z0-9+/]{40,}={0,2}",
    "hooks.slack.com/": r"hooks\.slack\.com/services/[\w/]{20,}",
    "/api/webhooks/": r"discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,}",
    "eyJ": r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+",
}
"""Forms of well-known tokens, by a text that each of them contains."""
_TOKEN = re.compile(rf"(?<![\w-])(?:{'|'.join(_SHAPES.values())})")
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_HEADER = re.compile(r"(authorization\W{1,6}(?:bearer|basic|token)\s+)[^\s\"'\\,;*$]{6,}", re.IGNORECASE)

_known: dict[str, str] = {}


def says_secret(name: str) -> bool:
    """Whether the name of a key or variable says that its value is a secret: whether it ends in the word for one."""
    if _BARE_KEY.search(name):
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and (words[-1].isdecimal() or words[-1] in _QUALIFIERS):
        words.pop()
    if not words or name in _PATHS:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _SECRET_WORDS or last.endswith(_SECRET_ENDINGS) or (before, last) in _SECRET_PAIRS:
        return True
    if last in ("key", "keys"):
        return before in _KINDS_OF_KEY
    if last == "pass":
        return before in _KINDS_OF_PASS
    if last == "tokens":
        return before in _KINDS_OF_KEY or before in ("bearer", "refresh")
    return last.endswith("token") and (before if last == "token" else last.removesuffix("token")) not in _VOCABULARY


def redact(text: str) -> str:
    """The text without any known secret, and without what has the form of one."""
    for value, shown in _known.items():
        text = text.replace(value, shown)
    if any(mark in text for mark in _SHAPES):
        text = _TOKEN.sub(HIDDEN, text)
    if "PRIVATE KEY-----" in text:
        text = _PRIVATE_KEY.sub(HIDDEN, text)
    if "uthorization" in text or "UTHORIZATION" in text:
        text = _HEADER.sub(rf"\1{HIDDEN}", text)
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
            if says_secret(str(key)):
                _learn_below(item)
            learn_tree(item)
        if says_secret(str(written.get("name", ""))):  # as in [{name: X_TOKEN, value: ...}]
            _learn_below(written.get("value"))
    elif isinstance(written, (list, tuple)):
        for item in written:
            learn_tree(item)
        _learn_arguments(written)
    elif isinstance(written, str):
        learn_environment(_FROM_ENVIRONMENT.findall(written))
        for credentials in _IN_ADDRESS.finditer(written):
            if "${" not in credentials[0]:
                _learn(credentials[0], _HIDDEN_CREDENTIALS)
                _learn(credentials[1], HIDDEN)


def _learn_below(item: Any) -> None:
    """Register every text and number of a secret key."""
    if isinstance(item, Mapping):
        for inner in item.values():
            _learn_below(inner)
    elif isinstance(item, (list, tuple)):
        for inner in item:
            _learn_below(inner)
    elif isinstance(item, (str, int)) and not isinstance(item, bool) and "${" not in str(item):
        _learn(str(item), HIDDEN)
        _learn("".join(_SCHEME.findall(str(item))), HIDDEN)


def _learn_arguments(items: Sequence[Any]) -> None:
    """Register the secrets of a command line or a list of variables: `--token X`, `--token=X`, `TOKEN=X`."""
    texts = [item if isinstance(item, str) else "" for item in items]
    for text in texts:
        if (match := _ASSIGNMENT.fullmatch(text)) and says_secret(match[1]):
            _learn_below(match[2])
    for option, value in pairwise(texts):
        if option.startswith("-") and "=" not in option and says_secret(option.lstrip("-")):
            _learn_below(value)


def learn_environment(names: Iterable[str] | None = None) -> None:
    """Register the values of these environment variables; without `names`, of all with the name of a secret, and the
    credentials in the addresses of all others, such as DATABASE_URL."""
    for name in filter(says_secret, os.environ) if names is None else names:
        _learn(os.environ.get(name, ""), f"${{oc.env:{name}}}")
    for value in os.environ.values() if names is None else ():
        for credentials in _IN_ADDRESS.finditer(value):
            _learn(credentials[0], _HIDDEN_CREDENTIALS)
            _learn(credentials[1], HIDDEN)


def _learn(value: str, shown: str) -> None:
    if len(value) < SHORTEST or os.path.exists(value) or value == HIDDEN:
        return
    global _known
    quoted = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], quote(value, safe=""))
    known = dict.fromkeys((value, *quoted), shown) | _known
    # Longest first: if one secret begins another, the rest of the longer one must not remain. A new dictionary, because
    # other threads may be reading the old one.
    _known = dict(sorted(known.items(), key=lambda item: -len(item[0])))


def _unless_named(credentials: re.Match[str]) -> str:
    """The replacement of credentials. Those that are already `${oc.env:NAME}` stay."""
    return credentials[0] if "${" in credentials[0] else _HIDDEN_CREDENTIALS


def _under(key: str, item: Any) -> Any:
    return _hidden(item) if says_secret(key) else redact_tree(item)


def _hidden(item: Any) -> Any:
    """The value of a secret key: every text in it hidden, and every number."""
    if isinstance(item, Mapping):
        return {key: _hidden(inner) for key, inner in item.items()}
    if isinstance(item, (list, tuple)):
        return [_hidden(inner) for inner in item]
    if isinstance(item, str) and item:
        shown = redact(item)
        return shown if shown != item else HIDDEN
    return HIDDEN if isinstance(item, (int, float)) and not isinstance(item, bool) else item
