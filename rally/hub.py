"""Finds out with one request whether the model hub can be reached, so that offline machines use only their disk.

Without it, the hub's client retries six times for every missing file, with pauses and a log line for each. Retries are
right for a slow or busy hub, so only a failed connection counts here: unknown host, refused, bad certificate, or no
connection within CONNECT_SECONDS.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 1.0  # a hub that is connected but answers later is reachable
CACHED_SECONDS = 60.0  # a run loads several files, and a network may come back

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_name(path: str) -> bool:
    """Whether `path` may be a name on the hub and is not a local path."""
    return _NAME.fullmatch(path) is not None and not path.endswith(".gguf") and not Path(path).exists()


def on_disk_alone(path: str) -> dict[str, bool]:
    """Keywords for `from_pretrained` (for models also as `adapter_kwargs`): local files only if the hub is
    unreachable."""
    return {"local_files_only": True} if is_name(path) and why_unreachable() else {}


def why_unreachable() -> str | None:
    """Why the hub cannot be reached; None if it can, or if the user has set offline mode."""
    return _tried(time.monotonic() // CACHED_SECONDS)


@lru_cache(maxsize=1)
def _tried(_period: float) -> str | None:
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if is_offline_mode():
        return None
    session = get_session()
    httpx: Any = import_module(type(session).__module__.partition(".")[0])  # httpx or httpx2, as the client uses
    try:
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        session.head(constants.ENDPOINT, timeout=timeout, follow_redirects=False)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as problem:
        return f"{urlsplit(constants.ENDPOINT).hostname} cannot be reached: {str(problem) or type(problem).__name__}"
    except httpx.TransportError:  # connected
        return None
    return None
