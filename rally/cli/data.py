"""`rally data`: writes the rows of recipes, and the search index of a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from rally.cli.console import quiet_console
from rally.track.console import RunConsole

app = typer.Typer(help="Write rows to train on.", no_args_is_help=True)


Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")]


HotpotSource = Annotated[
    Path | None, typer.Option(help="A folder with train.jsonl and test.jsonl; downloaded if not given.")
]


Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]


T = TypeVar("T")


Flavor = Literal["tool", "interaction", "agent_loop"]


Tool = Literal["calc_gsm8k_reward", "calculator"]


@app.command()
def arithmetic(
    out: Out,
    train: Annotated[int, typer.Option(help="Training problems.", min=1)] = 4096,
    test: Annotated[int, typer.Option(help="Held-out problems.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Of the problems.")] = 0,
    sft: Annotated[int, typer.Option(help="Also write this many conversations for `rally sft`.", min=0)] = 0,
) -> None:
    """Problems such as 12*34+56 for an agent with a calculator."""
    from rally.recipes.arithmetic import data

    console = quiet_console()
    written = data.write_arithmetic(out, train, test, seed, _with_progress(console))
    if sft:
        written += data.write_arithmetic_sft(out, sft, {"good": 1.0}, seed, _with_progress(console))
    _show_written(written, console)


@app.command()
def gsm8k(
    out: Out,
    source: HotpotSource = None,
    flavor: Annotated[Flavor, typer.Option(help="Which kind of rows.")] = "agent_loop",
    tool: Annotated[Tool, typer.Option(help="The tool the prompt speaks of.")] = "calc_gsm8k_reward",
    sft: Annotated[bool, typer.Option(help="Also write conversations for `rally sft`, from the train split.")] = False,
) -> None:
    """Grade-school maths problems, as rows for one of the agent loops."""
    from rally.recipes.gsm8k_tool import data

    console = quiet_console()
    written = data.write_gsm8k(out, source, flavor, _with_progress(console), tool)
    if sft:
        written += data.write_gsm8k_sft(out, source, _with_progress(console))
    _show_written(written, console)


@app.command("search_r1")
def search_r1(
    out: Out,
    source: Annotated[
        Path | None,
        typer.Option(help="A folder with train.jsonl and corpus.jsonl; HotpotQA is downloaded if not given."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML with `system` and `user`, the prompt to use.")] = None,
    sft: Annotated[bool, typer.Option("--sft", help="Also write conversations for `rally sft`.")] = False,
) -> None:
    """Multi-hop questions for an agent that searches, held-out ones apart, and the corpus to index."""
    from rally.recipes.search_r1 import data

    _show_written(data.write_search_r1(out, source, config, sft), quiet_console())


@app.command()
def retool(
    out: Out,
    train: Annotated[int, typer.Option(help="Generated training problems.", min=1)] = 2048,
    test: Annotated[int, typer.Option(help="Generated problems held out.", min=1)] = 100,
    sft: Annotated[
        int, typer.Option(help="Conversations for `rally sft`; their programs are really run.", min=0)
    ] = 1280,
    gsm8k: Annotated[
        Path | None,
        typer.Option(
            help="A GSM8K folder, or `hub`: its train split is added, and of its test split --test rows to validate on."
        ),
    ] = None,
    aime: Annotated[Path | None, typer.Option(help="A folder with AIME's test.jsonl, to validate on.")] = None,
    seed: Seed = 0,
) -> None:
    """Whole-number problems with verified answers and levels, for an agent that writes code."""
    from rally.recipes.retool import data

    _show_written(data.write_retool(out, data.RetoolSizes(train, test, sft), gsm8k, aime, seed), quiet_console())


@app.command()
def triage(
    out: Out,
    train: Annotated[int, typer.Option(help="Training incidents.", min=1)] = 2048,
    test: Annotated[int, typer.Option(help="Incidents with codes that are held out.", min=1)] = 200,
    clean: Annotated[int, typer.Option(help="Conversations for `rally sft`, as they should be.", min=0)] = 160 * 48,
    mixed: Annotated[int, typer.Option(help="Conversations after these, with bad habits among them.", min=0)] = 60 * 48,
    seed: Seed = 0,
) -> None:
    """Incidents, the knowledge base that explains them, and conversations in two rounds."""
    from rally.recipes.triage import data

    _show_written(data.write_triage(out, data.TriageSizes(train, test, clean, mixed), seed), quiet_console())


@app.command()
def geometry(
    out: Out,
    train: Annotated[int, typer.Option(help="Training figures.", min=1)] = 1024,
    test: Annotated[int, typer.Option(help="Figures held out.", min=1)] = 128,
    level: Annotated[
        list[int] | None, typer.Option(help="1 to 3, given once for each; all if not given.", min=1, max=3)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="A folder with train and test files of images, problem and answer, such as geometry3k."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Figures with one unknown, drawn with verified answers, for an agent that sees."""
    from rally.recipes.geometry import data

    _show_written(
        data.write_geometry(out, data.GeometrySizes(train, test), tuple(level or (1, 2, 3)), source, seed),
        quiet_console(),
    )


@app.command("tool_use")
def tool_use(
    out: Out,
    sft: Annotated[int, typer.Option(help="Conversations for `rally sft`, of all kinds in turn.", min=1)] = 512,
    seed: Seed = 0,
) -> None:
    """Conversations with right calls of generated functions; the tasks of training and validation need no files."""
    from rally.recipes.tool_use.data import write_tool_use

    console = quiet_console()
    _show_written(write_tool_use(out, sft, seed, _with_progress(console)), console)


@app.command()
def repair(
    out: Out,
    train: Annotated[int, typer.Option(help="Training repositories.", min=1)] = 2048,
    test: Annotated[int, typer.Option(help="Held-out repositories, for each of two kinds.", min=1)] = 100,
    sft: Annotated[int, typer.Option(help="Conversations for `rally sft`, played by the agent.", min=0)] = 256,
    seed: Seed = 0,
) -> None:
    """Small repositories with one defect each, for mini-swe-agent; conversations need that package."""
    from rally.recipes.repair.data import RepairSizes, write_repair

    console = quiet_console()
    _show_written(write_repair(out, RepairSizes(train, test, sft), seed, _with_progress(console)), console)


@app.command()
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

    encoding = {"pooling": pooling, "query_prefix": query_prefix, "passage_prefix": passage_prefix}
    recipe = {**encoding, "max_length": max_length}
    if device != "cpu":  # torch is slow to import
        from rally.models.load import pick_device

        device = str(pick_device(device, "--device"))
    spec = IndexSpec(kind=kind, encoder=encoder, vectors=vectors, device=device, recipe=recipe, ready=faiss)
    console = quiet_console()
    built = build_index(corpus, out, spec, _with_progress(console))
    console.table("written", [[str(built.path), f"{built.passages:,} passages"], *built.facts()])


def _with_progress(console: RunConsole) -> Any:
    def follow(rows: Iterable[T], total: int | None, label: str) -> Iterable[T]:
        with console.phase(label, total) as phase:
            for row in rows:
                yield row
                phase.advance()

    return follow


def _show_written(written: Iterable[Any], console: RunConsole) -> None:
    console.table("written", [[str(w.path), f"{w.rows:,} rows"] for w in written])
