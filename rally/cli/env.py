"""`rally env list` and `rally env try`: which environments there are, and one episode by hand or with a model."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rally.cli.config_args import written_as
from rally.cli.console import quiet_console
from rally.types import RallyError, ToolCall

if TYPE_CHECKING:
    from rally.config import Config
    from rally.envs import EnvTurn
    from rally.track import RunConsole

app = typer.Typer(help="List environments, and play one.", no_args_is_help=True)

CALL = "/call"
SHORTEST_ROOM = 4096
"""Tokens that a prompt may have, however few a response has."""


@app.command("list")
def list_environments(
    adapter: Annotated[str | None, typer.Argument(help="Only those of this adapter, such as reasoning_gym.")] = None,
) -> None:
    """List the adapters, or the environments of one."""
    from rally.envs import EnvError
    from rally.envs.registry import ADAPTERS, names_of

    if adapter is not None and adapter not in ADAPTERS:
        raise EnvError(f"there is no adapter {adapter!r}; the adapters are {', '.join(ADAPTERS)}")
    if adapter is not None:
        typer.echo("\n".join(names_of(adapter)))
        return
    for name in ADAPTERS:
        try:
            count = len(names_of(name))
            typer.echo(f"{name}: {count} environment{'' if count == 1 else 's'}; rally env list {name}")
        except EnvError as missing:
            typer.echo(f"{name}: {missing}")
    typer.echo("your own: the dotted path of a subclass of rally.envs.Environment")


@app.command("make")
def make_environment(
    adapter: Annotated[str, typer.Argument(help="An adapter whose package conflicts with Rally's, such as bfcl.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the new Python environment.")],
) -> None:
    """Install the package of an adapter into a Python environment of its own, for env.python."""
    from rally.envs import EnvError
    from rally.envs.registry import ADAPTERS

    known = [name for name, about in ADAPTERS.items() if about.requirements]
    if adapter not in known:
        raise EnvError(
            f"`rally env make` knows {', '.join(known)}, not {adapter!r}; `rally env list` says how to install"
        )
    if out.exists():
        raise EnvError(f"{out} exists already; choose another folder, or remove it")
    python, wanted = out / "bin" / "python", ADAPTERS[adapter].requirements
    install = ["-m", "pip", "install", "--quiet", "--no-deps", *wanted]
    complete = False
    try:
        for command in ([sys.executable, "-m", "venv", str(out)], [str(python), *install]):
            if subprocess.run(command).returncode:
                raise EnvError(f"{shlex.join(command)} failed; its output says why")
        complete = True
    finally:
        if not complete:  # a part would be taken for the whole
            shutil.rmtree(out, ignore_errors=True)
    quiet_console().note(f"{adapter} is installed; set env.python={python}")


@app.command("try")
def try_environment(
    name: Annotated[str, typer.Argument(help="As env.name: reasoning_gym/chain_sum, or package.module.Class.")],
    args: Annotated[list[str] | None, typer.Option("--args", help="key=value, once for each argument.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the episode, or the number of its task.", min=0)] = 0,
    model: Annotated[str | None, typer.Option(help="A model that plays, instead of you.")] = None,
    python: Annotated[str | None, typer.Option(help="As env.python: the python whose process it runs in.")] = None,
    tokens: Annotated[int, typer.Option(help="With a model: tokens of the whole response.", min=1)] = 1024,
) -> None:
    """Play one episode by hand, or let a model play it. A tool is called with: /call NAME {"argument": 1}"""
    console = quiet_console()
    from rally.config import load_config
    from rally.runs.build.data import environments_of

    if not name.strip():
        raise RallyError("NAME is empty; `rally env list` lists the environments")
    for one in args or ():
        if not all(part.strip() for part in one.partition("=")[:2]):
            raise RallyError(f"--args {one} is not of the form key=value, such as --args difficulty=2")
    seeds = ["env.val_size=1", f"env.val_seed={seed}"]
    apart = [] if python is None else [f"env.python={python}"]
    with written_as(OPTIONS):
        config = load_config(overrides=[f"env.name={name}", *(f"env.args.{one}" for one in args or ()), *apart, *seeds])
        if model is None:
            asyncio.run(_by_hand(environments_of(config), name, seed))
            return
        room = _room(model, tokens)
        with tempfile.TemporaryDirectory(prefix="rally-env-") as folder:
            entry = json.dumps([{"name": name, "args": config.env.args, "python": python, "weight": 0}])  # no training
            given = [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}"]
            lengths = [f"data.max_response_length={tokens}", f"data.max_prompt_length={room}"]
            _by_model(load_config(overrides=[f"env.mixture={entry}", *seeds, *given, VAL_ONLY, *lengths]), console)


VAL_ONLY = "trainer.val_only=true"
OPTIONS = {
    "env.name": "NAME",
    "env.args": "--args",
    "the override 'env.args.": "--args '",
    "env.python": "--python",
    "env.val_seed": "--seed",
    "model.path": "--model",
    "actor_rollout_ref.model.path": "--model",
}
"""The options of `rally env try`, by the keys that they set."""


def _room(model: str, tokens: int) -> int:
    """Tokens of the longest prompt. The model must have room for it and for a response of `tokens`."""
    from rally.models.load import load_model_config

    if not model:
        raise RallyError("--model is empty; name a folder or a hub name, or leave it out to play yourself")
    text = load_model_config(model, option="--model").get_text_config()
    longest: int | None = getattr(text, "max_position_embeddings", None)
    if longest is not None and tokens >= longest:
        raise RallyError(
            f"--tokens={tokens} leaves no room for a prompt: {model} takes {longest} tokens at most; lower --tokens"
        )
    room = max(4 * tokens, SHORTEST_ROOM)
    return room if longest is None else min(room, longest - tokens)


def _by_model(config: Config, console: RunConsole) -> None:
    from rally.data import DataError
    from rally.runs.evaluate import evaluate
    from rally.track import RunFolder

    room, tokens = config.prompt_length, config.response_length
    try:
        outcome = evaluate(config, console)
    except DataError as problem:
        if "data.max_prompt_length" not in str(problem):
            raise
        advice = "raise" if room in (4 * tokens, SHORTEST_ROOM) else "lower"
        raise RallyError(
            f"the first prompt has more than the {room} tokens that --tokens={tokens} leaves for it; {advice} --tokens"
        ) from problem
    for episode in RunFolder(outcome.folder).read_episodes(0, validate=True):
        for message in episode.task.prompt:
            _say(message["role"], message["content"])
        for turn in episode.turns:
            _say(turn.role, turn.text, turn.reward)
        failure = f", {episode.error}" if episode.error else ""
        _say("end", f"{episode.stop_reason}, reward {episode.reward}{failure}")


async def _by_hand(environments: Any, name: str, seed: int) -> None:
    from rally.types import Task

    session = environments.open(Task(id=name, data_source=name, prompt=(), row={"env": name, "seed": seed}))
    earned = 0.0
    try:
        messages, tools = await session.reset()
        for message in messages:
            _say(message["role"], message["content"])
        for tool in tools:
            _say("tool schema", json.dumps(tool["function"]))
        done = False
        while not done:
            turn = _typed(session.parameters)
            if turn is None:
                _say("end", f"left before the end, reward so far {earned:g}")
                return
            messages, reward, done, info = await session.step(turn)
            earned += reward or 0.0
            for message in messages:
                _say(message["role"], message["content"])
            _say("reward", f"{reward}{f', {json.dumps(info)}' if info else ''}")
        _say("end", f"reward {earned:g}")
    finally:
        for failure in await session.close():
            _say("close", failure)


def _typed(parameters: Any) -> EnvTurn | None:
    """A turn from the terminal: text, or a line `/call NAME {...}`. None at the end of the input."""
    from rally.envs import EnvTurn
    from rally.tools.session import CallOutcome, checked_arguments

    while True:
        try:
            line = input("> ")
        except EOFError:
            return None
        if not line.startswith(CALL):
            return EnvTurn(text=line)
        called, _, written = line.removeprefix(CALL).strip().partition(" ")
        try:
            call = ToolCall(name=called, id="call_0", arguments=json.loads(written or "{}"), raw=line)
            arguments = checked_arguments(call, parameters)
        except (ValueError, RallyError, TypeError, AttributeError) as error:
            _say("call", f"the arguments must be a JSON object ({error})")
            continue
        if isinstance(arguments, CallOutcome):
            _say("call", str(arguments.answer.response.text))
            continue
        return EnvTurn(text="", calls=(ToolCall(name=called, id="call_0", arguments=arguments, raw=line),))


def _say(role: str, text: str, reward: float | None = None) -> None:
    from rally.track.display_text import visible

    earned = "" if reward is None else f" (reward {reward:g})"
    typer.echo(f"{role}{earned}: {visible(text)}")
