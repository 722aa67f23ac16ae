"""Each function writes the files of one recipe, whole, and says what it wrote; the command line calls them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from rally.data import arithmetic, gsm8k
from rally.data.arithmetic import ArithmeticSpec
from rally.data.conversations import conversations
from rally.data.read import Row
from rally.data.write import write_rows


class Progress(Protocol):
    """Passes rows through and shows how many have come, of `total` if that is known."""

    def __call__(self, rows: Iterable[Row], total: int | None, label: str) -> Iterable[Row]: ...


class Written(NamedTuple):
    path: Path
    rows: int


def write_arithmetic(
    out_dir: Path, train: int, test: int, seed: int, progress: Progress, spec: ArithmeticSpec | None = None
) -> list[Written]:
    """train.parquet and test.parquet of the arithmetic demo."""
    counts: dict[arithmetic.Split, int] = {"train": train, "test": test}
    return [
        _write(out_dir / f"{split}.parquet", progress(arithmetic.rows(count, seed, split, spec), count, split))
        for split, count in counts.items()
    ]


def write_arithmetic_sft(
    out_dir: Path,
    count: int,
    mix: Mapping[str, float],
    seed: int,
    progress: Progress,
    spec: ArithmeticSpec | None = None,
) -> list[Written]:
    """sft.parquet of the arithmetic demo: conversations with the habits of `mix`, none about a test problem."""
    rows = conversations(count, mix, spec or ArithmeticSpec(), seed)
    return [_write(out_dir / "sft.parquet", progress(rows, count, "sft"))]


def write_gsm8k(
    out_dir: Path,
    source: Path | None,
    flavor: gsm8k.Flavor,
    progress: Progress,
    tool: gsm8k.Tool = "calc_gsm8k_reward",
) -> list[Written]:
    """train.parquet and test.parquet of GSM8K."""
    splits: tuple[gsm8k.Split, ...] = ("train", "test")
    return [
        _write(out_dir / f"{split}.parquet", progress(gsm8k.build(source, flavor, split, tool), None, split))
        for split in splits
    ]


def write_gsm8k_sft(out_dir: Path, source: Path | None, progress: Progress) -> list[Written]:
    """sft.parquet of GSM8K: the train solutions, told with the calculator."""
    return [_write(out_dir / "sft.parquet", progress(gsm8k.sft_rows(source), None, "sft"))]


def _write(path: Path, rows: Iterable[Row]) -> Written:
    return Written(path, write_rows(rows, path))
