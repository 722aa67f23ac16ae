"""`rally doctor`: runs all checks of a configuration before a run, on a CPU, in under a minute.

Every check runs, whatever the others found. A check that crashes becomes an error finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from rally.config import Config, ConfigError, read_config
from rally.doctor import chat_template, environment, memory_and_time, reward_function, rollout_logprobs, tool_calls
from rally.doctor import rows as doctor_rows
from rally.doctor.check_context import DoctorCase, DoctorOptions, Finding, MissingPart
from rally.redact import redact
from rally.track.display_text import OBSERVED_STYLE, PROMPT_STYLE, SAMPLED_STYLE, visible
from rally.types import RallyError

CheckFunction = Callable[[DoctorCase], Iterator[Finding]]
EXIT_CODES = {"ok": 0, "warning": 1, "error": 2}
STATUS_STYLES = {"ok": "green", "warning": "bold yellow", "error": "bold red"}
PIECE_STYLES = {"note": "", "prompt": PROMPT_STYLE, "sampled": SAMPLED_STYLE, "observed": OBSERVED_STYLE}


class Check(NamedTuple):
    name: str
    run: CheckFunction


ENVIRONMENT = (Check("environment", environment.packages), Check("device", environment.device))
CHECKS = (
    *ENVIRONMENT,
    Check("tokenizer", chat_template.tokenizer),
    Check("rows", doctor_rows.rows),
    Check("loops", doctor_rows.loops),
    Check("tools", tool_calls.tools),
    Check("template", chat_template.template),
    Check("lengths", doctor_rows.lengths),
    Check("prompt", chat_template.prompt),
    Check("objective", reward_function.objective),
    Check("reward", reward_function.reward),
    Check("policy", rollout_logprobs.policy),
    Check("memory", memory_and_time.cost),
)
"""In order: a part is first built by the check that reports its failure."""


def examine(
    path: str | Path | None, overrides: Sequence[str] = (), options: DoctorOptions | None = None
) -> Iterator[Finding]:
    """The findings about a configuration, one by one as the checks run."""
    config, problems = read_config(path, overrides)
    problems = (*problems, *(_missing_keys(config) if config is not None else ()))
    yield from (Finding("config", "error", text) for text in problems)
    if not problems:
        yield Finding("config", "ok", f"{path or 'the command line'} describes a run")
    case = DoctorCase(config or Config(), options)
    try:
        for check in CHECKS if config is not None and config.model.path else ENVIRONMENT:
            yield from run_check(check, case)
    finally:
        case.close()


def _missing_keys(config: Config) -> tuple[str, ...]:
    try:
        config.require_training()
    except ConfigError as error:
        return error.problems
    return ()


def run_check(check: Check, case: DoctorCase) -> Iterator[Finding]:
    """The findings of a check. An exception becomes a finding too."""
    try:
        yield from check.run(case)
    except MissingPart as missing:
        yield Finding(check.name, "warning", f"skipped, because {missing} could not be loaded (see above)")
    except RallyError as error:
        yield Finding(check.name, "error", str(error))
    except Exception as error:  # noqa: BLE001 - a user's code, files and model may fail in any way, and the other checks must run
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        yield Finding(check.name, "error", f"this check failed ({reason}); fix the cause and try again")


def exit_code(findings: Iterable[Finding]) -> int:
    return max((EXIT_CODES[one.status] for one in findings), default=0)


def as_text(finding: Finding) -> Text:
    """The finding as a line, with its text indented below."""
    text = Text.assemble((f"{finding.status:<8}", STATUS_STYLES[finding.status]), (f"{finding.check:<12}", "bold"))
    text.append(visible(finding.text))
    for number, piece in enumerate(finding.shown):
        text.append("\n    " if number == 0 else "")
        text.append(visible(piece.text).replace("\n", "\n    "), style=PIECE_STYLES[piece.kind])
    return text


def as_json(finding: Finding) -> dict[str, Any]:
    shown = [{"kind": piece.kind, "text": redact(piece.text)} for piece in finding.shown]
    line = {"check": finding.check, "status": finding.status, "text": redact(finding.text)}
    return line | ({"shown": shown} if shown else {})
