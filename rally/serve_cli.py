"""`rally serve ...`: the servers that agents' tools ask, each a thin command that runs until it is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rally.types import RallyError

app = typer.Typer(help="Run a service that tools ask.", no_args_is_help=True)


@app.command()
def retrieval(
    index: Annotated[Path, typer.Argument(help="A folder written by `rally data index`.")],
    host: Annotated[str, typer.Option(help="Beyond this machine only with RALLY_RETRIEVAL_TOKEN set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where clients ask.", min=0, max=65535)] = 8000,
    topk: Annotated[int, typer.Option(help="Hits per query when the client names no number.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="Where a dense index is searched: cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Answer searches over HTTP, in the protocol of Search-R1 (POST /retrieve)."""
    try:
        import uvicorn

        from rally.services.retrieval import check_exposure, create_app
    except ModuleNotFoundError as error:
        raise RallyError(f"serving needs the package {error.name}; run: pip install 'rally-rl[search]'") from None
    from rally.retrieval import open_index
    from rally.track import RunConsole

    token = os.environ.get("RALLY_RETRIEVAL_TOKEN") or None
    check_exposure(host, token)
    opened = open_index(index, device)
    RunConsole().note(f"{len(opened):,} passages ({opened.kind}) at http://{host}:{port}/retrieve")
    uvicorn.run(create_app(opened, topk, token), host=host, port=port, log_level="warning", access_log=False)
