"""The commands under `rally serve`: each starts one HTTP server that users can also run alone."""

from __future__ import annotations

import logging
import os
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Run a server that tools can use.", no_args_is_help=True)

Isolation = Literal["auto", "bubblewrap", "landlock", "unprotected"]


@app.command()
def sandbox(
    host: Annotated[str, typer.Option(help="Anything but this machine needs RALLY_SANDBOX_TOKEN.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen.", min=1, max=65535)] = 8080,
    isolation: Annotated[Isolation, typer.Option(help="auto takes the strongest that runs here.")] = "auto",
    memory_mb: Annotated[int, typer.Option(help="Of one execution that asks for no limit itself.", min=1)] = 1024,
    max_concurrent: Annotated[int | None, typer.Option(help="Executions at once; default twice the cores.")] = None,
) -> None:
    """Run code of strangers for tools and rewards (the SandboxFusion protocol)."""
    from rally.sandbox import Limits, SandboxSettings
    from rally.services.sandbox import serve

    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    settings = SandboxSettings(isolation=isolation, limits=Limits(memory_mb=memory_mb), max_concurrent=max_concurrent)
    serve(host, port, settings, os.environ.get("RALLY_SANDBOX_TOKEN"))
