"""A public data set comes from the hub by its name, or one sentence says what to install or where else to look."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rally.data.read import DataError


def download(title: str, name: str, config: str, split: str, folder_holds: str) -> Iterable[dict[str, Any]]:
    """The rows of one split. `folder_holds` says what a folder must have that is named instead."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"downloading {title} needs the package datasets; run: "
            'pip install "rally-rl[hub]" (or name a source folder)'
        ) from error
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # The download stack raises many unrelated types; the way out is always the same.
        raise DataError(
            f"{title} could not be downloaded ({type(error).__name__}: {error}); "
            f"check the network, or name a source folder that holds {folder_holds}"
        ) from error
    return rows
