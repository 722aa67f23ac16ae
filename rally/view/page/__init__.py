"""The files of the viewer's page, which loads nothing else."""

from __future__ import annotations

from importlib.resources import files

INDEX = "index.html"
MIME = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def page_files() -> dict[str, str]:
    """All files of the page by name. The server looks names up here, never on the disk."""
    found = (entry for entry in files(__name__).iterdir() if entry.name.rpartition(".")[2] in MIME)
    return {entry.name: entry.read_text(encoding="utf-8") for entry in found}
