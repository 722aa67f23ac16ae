"""`rally merge`: merges a checkpoint into one model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rally.cli.console import quiet_console
from rally.types import RallyError

app = typer.Typer()


@app.command()
def merge(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A checkpoint, a folder of adapters, or one of several shards.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", "--target_dir", help="By default `merged` inside the folder.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="The model of the adapters, if it has moved.")] = None,
    local_dir: Annotated[Path | None, typer.Option("--local_dir", help="The same as the argument.")] = None,
    backend: Annotated[Literal["fsdp"], typer.Option(help="What wrote the shards, if there are any.")] = "fsdp",
) -> None:
    """Merge LoRA adapters into their base, or weights in several files or FSDP shards, into one model folder."""
    folder = checkpoint or local_dir
    if folder is None or (checkpoint and local_dir):
        raise RallyError("name the folder to merge, once: rally merge FOLDER")
    console = quiet_console()
    from rally.train.checkpoint.merge import merge as run

    merged = run(folder, out, base)
    console.note(f"{merged.what}: {merged.folder}")
    if merged.warning:
        console.warn_once("tokenizer", merged.warning)
