"""A machine that cannot reach the model hub learns it from one request, and then looks on its own disk alone.

The hub's client asks six times for every file it lacks, with pauses between and a line for each. That is right where a
hub is slow or busy, so only a connection that cannot be made counts here: no such host, refused, no certificate, or
nobody there within CONNECT_SECONDS.
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
ANSWER_SECONDS = 1.0  # a hub that takes longer is there
REMEMBERED_SECONDS = 60.0  # a run asks for several files, and a network may come back

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_name(path: str) -> bool:
    """Whether it could be a name on the hub, and is nothing that lies here."""
    return _NAME.fullmatch(path) is not None and not path.endswith(".gguf") and not Path(path).exists()


def on_disk_alone(path: str) -> dict[str, bool]:
    """What `from_pretrained` is told beside a path or name; that of a model also as its `adapter_kwargs`."""
    return {"local_files_only": True} if is_name(path) and why_unreachable() else {}


def why_unreachable() -> str | None:
    """Why no connection to the hub can be made; None where one can, or where the user wants none to be tried."""
    return _asked(time.monotonic() // REMEMBERED_SECONDS)


@lru_cache(maxsize=1)
def _asked(_when: float) -> str | None:
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if is_offline_mode():
        return None
    session = get_session()
    httpx: Any = import_module(type(session).__module__.partition(".")[0])  # or httpx2: the one that the client has
    try:
        patience = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        session.head(constants.ENDPOINT, timeout=patience, follow_redirects=False)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as problem:
        return f"{urlsplit(constants.ENDPOINT).hostname} cannot be reached: {str(problem) or type(problem).__name__}"
    except httpx.TransportError:  # somebody is there
        return None
    return None
