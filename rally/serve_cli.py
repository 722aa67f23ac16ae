"""`rally serve ...`: the servers that agents' tools ask, each a thin command that runs until it is stopped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Run a service that tools ask.", no_args_is_help=True)

Isolation = Literal["auto", "bubblewrap", "landlock", "unprotected"]


@app.command()
def retrieval(
    index: Annotated[Path, typer.Argument(help="A folder written by `rally data index`.")],
    host: Annotated[str, typer.Option(help="Beyond this machine only with RALLY_RETRIEVAL_TOKEN set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where clients ask.", min=1, max=65535)] = 8000,
    topk: Annotated[int, typer.Option(help="Hits per query when the client names no number.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="Where a dense index is searched: cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Answer searches over HTTP, in the protocol of Search-R1 (POST /retrieve)."""
    from rally.retrieval import open_index
    from rally.services.serving import check_exposure, serve
    from rally.track import RunConsole

    token = check_exposure(host, "RALLY_RETRIEVAL_TOKEN")
    opened = open_index(index, device)

    def create() -> object:
        from rally.services.retrieval import create_app

        return create_app(opened, topk, token)

    RunConsole().note(f"{len(opened):,} passages ({opened.kind}) at http://{host}:{port}/retrieve")
    serve(create, host, port)


@app.command()
def sandbox(
    host: Annotated[str, typer.Option(help="Beyond this machine only with RALLY_SANDBOX_TOKEN set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where clients ask.", min=1, max=65535)] = 8080,
    isolation: Annotated[Isolation, typer.Option(help="auto takes the strongest that runs here.")] = "auto",
    memory_mb: Annotated[int, typer.Option(help="Of one execution that asks for no limit itself.", min=1)] = 1024,
    max_concurrent: Annotated[int | None, typer.Option(help="At once; default twice the cores.", min=1)] = None,
) -> None:
    """Run code of strangers for tools and rewards, in the protocol of SandboxFusion (POST /run_code)."""
    from rally.sandbox import Limits, Sandbox, SandboxSettings
    from rally.services.serving import check_exposure, serve

    token = check_exposure(host, "RALLY_SANDBOX_TOKEN")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    settings = SandboxSettings(isolation=isolation, limits=Limits(memory_mb=memory_mb), max_concurrent=max_concurrent)

    running = Sandbox(settings)
    running.start_now()  # what cannot be isolated here is told before anything listens

    def create() -> object:
        from rally.services.sandbox import create_app

        return create_app(running, token)

    serve(create, host, port, log_level="info")
