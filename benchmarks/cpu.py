"""Measures every speed that the documentation claims for a CPU, and prints one table of ratios.

    python -m benchmarks.cpu [--model FILE.gguf] [--out FOLDER]

Takes about ten minutes on two cores, and one minute more the first time, to train the demo's model. Everything runs on
all cores. If other work shares them, set OMP_NUM_THREADS=1: threads that wait for each other on a busy core are many
times slower, and the ratios then mean little.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from benchmarks.demo_models import demo_models
from benchmarks.engine_rows import second_turn_row, throughput_row
from benchmarks.episode_row import episodes_row
from benchmarks.grpo_row import grpo_row
from benchmarks.report import Circumstances, publish, summary
from benchmarks.sinks_row import sinks_row
from benchmarks.update_row import update_row
from rally.models.load import load_model
from rally.track import RunConsole
from rally.types import RallyError

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description="The table of ratios, on this CPU.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m.gguf", help="SmolLM2-135M, GGUF")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="where the table and the demo model go")
    options = parser.parse_args()
    disable_progress_bar()
    try:
        measure(options.model, options.out, Console())
    except RallyError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)


def measure(model_file: Path, out: Path, console: Console) -> None:
    if not model_file.is_file():
        raise RallyError(f"there is no model at {model_file}; get it with: python -m benchmarks.get_model {model_file}")
    circumstances = Circumstances()
    demo = demo_models(out / "demo", RunConsole(console))
    model = load_model(str(model_file))
    rows = []
    for name, row in (
        ("engine against generate", lambda: throughput_row(model)),
        ("second turn", lambda: second_turn_row(model)),
        ("episodes with slow tools", lambda: episodes_row(demo)),
        ("a GRPO step", lambda: grpo_row(demo)),
        ("its update", lambda: update_row(demo)),
        ("trackers and traces", lambda: sinks_row(demo)),
    ):
        console.print(f"measuring: {name} ...", highlight=False)
        rows.append(row())
        console.print(f"  {summary(rows[-1])}", highlight=False)
    publish(rows, circumstances, out, console)


if __name__ == "__main__":
    main()
