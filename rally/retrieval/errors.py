"""Every mistake of a user of the search index is a RetrievalError whose sentence says what to do."""

from __future__ import annotations

import importlib
from typing import Any

from rally.types import RallyError


class RetrievalError(RallyError):
    """A corpus, an index or a search that is not what it must be."""


def require(module: str, package: str) -> Any:
    """An optional library, or the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise RetrievalError(f"this index needs the package {package}; run: pip install 'rally-rl[search]'") from None
