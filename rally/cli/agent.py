"""`rally agent`: play the episodes of a run with a program on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Annotated

import typer

from rally.cli.console import quiet_console
from rally.types import RallyError

app = typer.Typer()
TOKEN = "RALLY_AGENT_TOKEN"


@app.command(context_settings={"ignore_unknown_options": True})
def agent(
    command: Annotated[list[str], typer.Argument(help="The agent's program and its arguments, after --.")],
    gateway: Annotated[str, typer.Option(help="The address of the run's gateway, such as http://10.0.0.1:8200.")],
    jobs: Annotated[int, typer.Option(help="Episodes at a time.", min=1, max=1024)] = 1,
    patience: Annotated[float, typer.Option(help="Seconds without a gateway after which it ends.", min=0)] = 600.0,
) -> None:
    """Play the episodes of a run whose agent_loop_config has workers=true. RALLY_AGENT_TOKEN must be the run's."""
    from rally.services.agent_worker import AgentWorkerSettings, WorkerError, work

    token = os.environ.get(TOKEN)
    if not token:
        raise WorkerError(f"set {TOKEN} to the token that the run was started with")
    if not gateway.startswith(("http://", "https://")):
        raise WorkerError(f"--gateway {gateway} is no address; give one such as http://10.0.0.1:8200")
    if shutil.which(command[0]) is None:
        raise RallyError(f"there is no program {command[0]!r}; correct the command after --")
    console = quiet_console()
    settings = AgentWorkerSettings(gateway=gateway, token=token, command=command, jobs=jobs, patience=patience)
    console.note(f"agent worker {settings.name}: waits for episodes of {gateway}")
    played = asyncio.run(work(settings, console.note))
    console.note(f"{played} episodes were played")
