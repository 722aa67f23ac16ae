"""The command line: parse, load the configuration, call one function. A mistake is one sentence and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from rally import __version__, doctor_cli, recipe_cli, serve_cli, view_cli, watch_cli
from rally.cli_console import quiet_console as _console
from rally.cli_system import system_sentence
from rally.cli_words import LOOSE, ConfigName, ConfigPath, Words, split_words
from rally.recipe_cli import Name as RecipeName
from rally.recipe_cli import recipe_path
from rally.redact import redact
from rally.types import RallyError

if TYPE_CHECKING:
    from rally.track import RunConsole

app = typer.Typer(
    name="rally",
    help="Train language-model agents that use tools over several turns, with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Write rows to train on.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(serve_cli.app, name="serve")
app.add_typer(recipe_cli.app)
app.add_typer(watch_cli.app)
app.add_typer(doctor_cli.app)
app.add_typer(view_cli.app)
data_app.add_typer(recipe_cli.data_app)


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be run, and stop.")]
Check = Annotated[
    bool,
    typer.Option("--check", help="Prove that every conversation teaches what would be sampled; 1 if one does not."),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")]
Source = Annotated[Path | None, typer.Option(help="A folder with train.jsonl and test.jsonl; downloaded if not given.")]
T = TypeVar("T")
Flavor = Literal["tool", "interaction", "agent_loop"]
Tool = Literal["calc_gsm8k_reward", "calculator"]


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the weights, the problems and all sampling.")] = 0,
    steps: Annotated[int, typer.Option(help="GRPO steps.", min=1)] = 40,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides of the GRPO stage.", metavar="[KEY=VALUE]...", show_default=False),
    ] = None,
) -> None:
    """Train a small agent from nothing, on a CPU, in a few minutes: it learns to use a calculator."""
    console = _console()
    from rally.demo import DemoSettings, run_demo

    run_demo(out, DemoSettings(seed=seed, grpo_steps=steps), console, words or [])


@app.command(context_settings=LOOSE)
def train(
    words: Words = None,
    recipe: RecipeName = None,
    dry_run: DryRun = False,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Train an agent by reinforcement learning. The same command resumes a run that was cut off."""
    from rally.config import load_config

    path, overrides = split_words(words, config_path, config_name)
    config = load_config(recipe_path(recipe, path, "train"), overrides)
    config.require_training()
    console = _console()
    if dry_run:
        from rally.train.dry_run import dry_run as show

        show(config, console)
        return
    from rally.cluster import train as run
    from rally.track import run_summary, write_curve

    outcome = run(config, console)
    console.show(run_summary(outcome.folder))
    console.note(f"curve: {write_curve(outcome.folder).html}, every episode: rally view {outcome.folder}")


@app.command(context_settings=LOOSE)
def sft(
    words: Words = None,
    recipe: RecipeName = None,
    dry_run: DryRun = False,
    check: Check = False,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Fine-tune on conversations with tools; the loss is on assistant turns only."""
    from rally.config import load_sft_config

    path, overrides = split_words(words, config_path, config_name)
    config = load_sft_config(recipe_path(recipe, path, "sft"), overrides)
    config.require_training()
    console = _console()
    from rally.train import sft_run

    if check:
        raise typer.Exit(0 if sft_run.check(config, console) else 1)
    if dry_run:
        sft_run.show(config, console)
        return
    from rally.cluster import sft as run

    outcome = run(config, console)
    console.note(f"done: {outcome.steps} steps, checkpoints in {outcome.folder / 'checkpoints'}")


@app.command("eval", context_settings=LOOSE)
def evaluate(words: Words = None, recipe: RecipeName = None) -> None:
    """Validate a model on data.val_files, without training."""
    from rally.config import load_config

    path, overrides = split_words(words)
    config = load_config(recipe_path(recipe, path, "train"), overrides)
    console = _console()
    from rally.train.run import evaluate as run

    outcome = run(config, console)
    rows = [[name, f"{value:.4f}"] for name, value in sorted(outcome.metrics.items()) if name.startswith("val-")]
    console.table("validation", rows)
    console.note(f"episodes and metrics are in {outcome.folder}")


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
    """Make one plain model folder of LoRA adapters and their base, of weights in several files, or of FSDP's shards."""
    folder = checkpoint or local_dir
    if folder is None or (checkpoint and local_dir):
        raise RallyError("name the folder to merge, once: rally merge FOLDER")
    console = _console()
    from rally.train.merge import merge as run

    merged = run(folder, out, base)
    console.note(f"{merged.what}: {merged.folder}")


@data_app.command()
def arithmetic(
    out: Out,
    train: Annotated[int, typer.Option(help="Training problems.", min=1)] = 4096,
    test: Annotated[int, typer.Option(help="Held-out problems.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Of the problems.")] = 0,
    sft: Annotated[int, typer.Option(help="Also write this many conversations for `rally sft`.", min=0)] = 0,
) -> None:
    """Problems such as 12*34+56 for an agent with a calculator."""
    from rally.data import commands

    console = _console()
    written = commands.write_arithmetic(out, train, test, seed, _progress(console))
    if sft:
        written += commands.write_arithmetic_sft(out, sft, {"good": 1.0}, seed, _progress(console))
    _tell(written, console)


@data_app.command()
def gsm8k(
    out: Out,
    source: Source = None,
    flavor: Annotated[Flavor, typer.Option(help="Which kind of rows.")] = "agent_loop",
    tool: Annotated[Tool, typer.Option(help="The tool the prompt speaks of.")] = "calc_gsm8k_reward",
    sft: Annotated[bool, typer.Option(help="Also write conversations for `rally sft`, from the train split.")] = False,
) -> None:
    """Grade-school maths problems, as rows for one of the agent loops."""
    from rally.data import commands

    console = _console()
    written = commands.write_gsm8k(out, source, flavor, _progress(console), tool)
    if sft:
        written += commands.write_gsm8k_sft(out, source, _progress(console))
    _tell(written, console)


@data_app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="JSON lines with `contents`, or with `title` and `text`.")],
    out: Out,
    kind: Annotated[Literal["bm25", "dense", "hybrid"], typer.Option(help="By words, by vectors, or both.")] = "bm25",
    encoder: Annotated[str | None, typer.Option(help="For vectors: a folder, or a name such as BAAI/bge-m3.")] = None,
    vectors: Annotated[Literal["flat", "hnsw"], typer.Option(help="Exact, or faster and approximate.")] = "flat",
    device: Annotated[str, typer.Option(help="Where the encoder runs: cpu, cuda.")] = "cpu",
    pooling: Annotated[str | None, typer.Option(help="mean, cls, last or max, if not the encoder's own.")] = None,
    query_prefix: Annotated[str | None, typer.Option(help="Before queries, if not the encoder's own.")] = None,
    passage_prefix: Annotated[str | None, typer.Option(help="Before passages, if not the encoder's own.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens the encoder reads of a text.", min=1)] = None,
    faiss: Annotated[Path | None, typer.Option(help="Vectors that were made before, such as e5_Flat.index.")] = None,
) -> None:
    """Make a corpus searchable, for `rally serve retrieval` and the tool `search`."""
    from rally.retrieval import IndexSpec, build_index

    said = {"pooling": pooling, "query_prefix": query_prefix, "passage_prefix": passage_prefix}
    recipe = {**said, "max_length": max_length}
    spec = IndexSpec(kind=kind, encoder=encoder, vectors=vectors, device=device, recipe=recipe, ready=faiss)
    console = _console()
    built = build_index(corpus, out, spec, _progress(console))
    console.table("written", [[str(built.path), f"{built.passages:,} passages"], *built.facts()])


@app.command()
def version() -> None:
    """Print the version."""
    _console().note(f"rally {__version__}")


def _version_wanted(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version_wanted, is_eager=True)
    ] = False,
) -> None:
    """What stands before a command; its help is the application's."""


def _progress(console: RunConsole) -> Any:
    def follow(rows: Iterable[T], total: int | None, label: str) -> Iterable[T]:
        with console.phase(label, total) as phase:
            for row in rows:
                yield row
                phase.advance()

    return follow


def _tell(written: Iterable[Any], console: RunConsole) -> None:
    console.table("written", [[str(w.path), f"{w.rows:,} rows"] for w in written])


def main() -> None:
    """Entry point: turns a user's mistake into one sentence."""
    try:
        app(prog_name="rally")
    except RallyError as mistake:
        sys.stderr.write(f"rally: {redact(str(mistake))}\n")
        sys.exit(2)
    except OSError as refusal:
        said = system_sentence(refusal)
        if said is None:
            raise
        sys.stderr.write(f"rally: {redact(said)}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
