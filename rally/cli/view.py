"""`rally view`: shows runs in a browser, or exports them as one file."""

from __future__ import annotations

import os
import socket
import sys
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from rally.cli.console import quiet_console
from rally.types import RallyError

app = typer.Typer()

PORT = 8640
TOKEN = "RALLY_VIEW_TOKEN"

Runs = Annotated[list[Path], typer.Argument(help="Run folders, finished or running.", metavar="RUN...")]
Host = Annotated[str, typer.Option(help=f"Beyond this machine only with {TOKEN} set.")]
Port = Annotated[
    int | None, typer.Option(help=f"Default {PORT}, or any free one.", min=1, max=65535, show_default=False)
]
Export = Annotated[Path | None, typer.Option(help="Write one self-contained HTML file instead of serving.")]
Chosen = Annotated[str, typer.Option("--filter", help="Of an export: 'step=10..20&kind=val', as in the page's links.")]
Limit = Annotated[int, typer.Option(help="Of an export: the most episodes of each run.", min=1)]
Tokens = Annotated[str | None, typer.Option("--tokenizer", help="A folder, for runs that were trained elsewhere.")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Only print the address.")]


@app.command()
def view(
    runs: Runs,
    host: Host = "127.0.0.1",
    port: Port = None,
    export: Export = None,
    chosen: Chosen = "",
    limit: Limit = 512,
    tokenizer: Tokens = None,
    no_browser: NoBrowser = False,
) -> None:
    """Look at what agents did: curves, timelines, every episode and token; live while a run trains."""
    console = quiet_console()
    from rally.view.run_data import open_runs

    opened = open_runs(runs, tokenizer)
    if export is not None:
        from rally.view.page_export import write_export

        written = write_export(opened, export, chosen, limit)
        console.note(f"{written.path}: {written.episodes:,} episodes, {written.left_out:,} left out")
        return
    if chosen:
        raise RallyError("--filter chooses what is exported; give --export FILE with it, or filter in the page")
    from rally.services.http_server import check_exposure, check_free, serve

    token = check_exposure(host, TOKEN)
    check_free(host, port or 0)
    port = port or _free_port(host)
    link = f"http://{f'[{host}]' if ':' in host else host}:{port}/" + (
        f"?token={quote(token, safe='')}" if token else ""
    )

    def create() -> object:
        from rally.view.server import create_app

        return create_app(opened, token)

    console.note(f"looking at {', '.join(map(str, runs))}: {link} (Ctrl-C ends it)")
    if not no_browser and _has_screen():
        threading.Timer(1.0, webbrowser.open, [link]).start()
    with suppress(KeyboardInterrupt):  # the way to stop it
        serve(create, host, port, "warning", None if token else ())  # with a token any host name: requests carry it


def _has_screen() -> bool:
    """Whether a graphical browser can open; over ssh a text browser would."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _free_port(host: str) -> int:
    """The default port, so that links stay valid; another one if it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if os.name == "posix":  # as the server binds: connections in TIME_WAIT do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, PORT))
        except OSError:
            probe.bind((host, 0))
        return int(probe.getsockname()[1])
