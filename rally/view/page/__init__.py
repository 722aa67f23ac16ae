"""The page is written by us, shipped with the package and complete: it loads nothing but its own files."""

from __future__ import annotations

from importlib.resources import files

INDEX = "index.html"
MIME = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def page_files() -> dict[str, str]:
    """All files of the page by name. Whoever serves them looks a name up here and never on the disk."""
    found = (entry for entry in files(__name__).iterdir() if entry.name.rpartition(".")[2] in MIME)
    return {entry.name: entry.read_text(encoding="utf-8") for entry in found}
