"""Measures weight deltas on a real model: how many bytes an update changes, the size of a delta, and its times.

    python -m benchmarks.weight_deltas models/smollm2-135m.gguf [--lr 1e-6 1e-5] [--steps 5]

AdamW in float32 takes real steps on the text of the documentation. After each step the weights are rounded to bfloat16,
written as a model folder, and compared with those of the step before. The first step is left out: AdamW's first
update is larger than later ones.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from rally.engines.remote.weight_deltas import apply_in_place, read_delta, stored_tensors, write_delta
from rally.models.load import load_model, load_tokenizer

TOKENS = 128


class Measured(NamedTuple):
    """One update. Times are in seconds, sizes in bytes."""

    weights: float
    changed: float
    size: int
    full: int
    write: float
    read: float
    apply: float


def updates(path: str, lr: float) -> Iterator[dict[str, Tensor]]:
    """The weights in bfloat16, before the first update and after each one."""
    model = load_model(path, device=torch.device("cpu"), dtype="float32", option="MODEL").train()
    text = Path("docs/design.md").read_text(encoding="utf-8")
    ids = load_tokenizer(path, option="MODEL")(text, add_special_tokens=False)["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for at in itertools.cycle(range(0, len(ids) - TOKENS, TOKENS)):
        yield {name: value.detach().to(torch.bfloat16) for name, value in model.named_parameters()}
        batch = torch.tensor([ids[at : at + TOKENS]])
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure(old: Path, new: Path, delta: Path) -> Measured:
    began = time.perf_counter()
    changed = write_delta(old, new, delta, 0, 1)
    written = time.perf_counter()
    before = stored_tensors(old)
    loaded = time.perf_counter()
    apply_in_place(read_delta(delta), before)
    applied = time.perf_counter()
    after, base = stored_tensors(new), stored_tensors(old)
    assert all((before[name].data == after[name].data).all() for name in after), "the delta does not restore the bytes"
    full = sum(len(one.data) for one in after.values())
    moved = sum(int((base[name].data.view("u2") != after[name].data.view("u2")).sum()) for name in after)
    size = delta.stat().st_size
    return Measured(moved * 2 / full, changed, size, full, written - began, loaded - written, applied - loaded)


def run(path: str, lr: float, steps: int, work: Path) -> list[Measured]:
    rows = []
    for step, weights in zip(range(steps + 2), updates(path, lr), strict=False):
        folder = work / f"{lr}-{step}"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        if step >= 2:
            rows.append(measure(work / f"{lr}-{step - 1}", folder, work / "delta"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    print("| lr | weights changed | bytes changed | delta | of the full size | write | read full | apply |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for lr in asked.lr:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
            rows = run(asked.model, lr, asked.steps, Path(work))
        mean = Measured(*(fmean(column) for column in zip(*rows, strict=True)))
        print(
            f"| {lr:g} | {mean.weights:.2%} | {mean.changed:.2%} | {mean.size / 1e6:.1f} MB | "
            f"{mean.size / mean.full:.2%} of {mean.full / 1e6:.0f} MB | {mean.write:.2f} s | {mean.read:.2f} s | "
            f"{mean.apply:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
