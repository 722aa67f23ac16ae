"""`rally doctor`: checks a run before it starts, and returns the result as its exit code."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from rally.cli.config_args import LOOSE, ConfigArgs, RecipeName, recipe_path, split_config_args
from rally.cli.console import quiet_console

app = typer.Typer()


@app.command(context_settings=LOOSE)
def doctor(
    args: ConfigArgs = None,
    recipe: RecipeName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
    model_check: Annotated[
        bool, typer.Option("--model-check", help="Load the model itself, however large, to compare log-probs.")
    ] = False,
    answer: Annotated[
        str | None, typer.Option(help="An answer to the first row that the reward function must reward.")
    ] = None,
) -> None:
    """Check a run before it starts: exit code 0 without problems, 1 with warnings, 2 with errors."""
    path, overrides = split_config_args(args)
    where = recipe_path(recipe, path, "train")
    console = quiet_console()
    from rally.doctor import doctor as checks
    from rally.doctor.check_context import DoctorOptions

    began, findings = time.perf_counter(), []
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # output of a user's code must not break the JSON
        for finding in checks.examine(where, overrides, DoctorOptions(model_check=model_check, answer=answer)):
            findings.append(finding)
            if not as_json:
                console.console.print(checks.as_text(finding), soft_wrap=True)
    code, seconds = checks.exit_code(findings), time.perf_counter() - began
    if as_json:
        _print({"exit_code": code, "seconds": round(seconds, 2), "findings": [checks.as_json(one) for one in findings]})
    else:
        console.note(_summary([one.status for one in findings], seconds))
    raise typer.Exit(code)


def _print(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(report, indent=1, ensure_ascii=False))


def _summary(statuses: list[str], seconds: float) -> str:
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("ok", "warning", "error"))
    return f"{counts}, in {seconds:.1f} s"
