"""Row 5: the update of one GRPO step of the demo agent, in tokens a second, against a padded batch in transformers.

Both train on the same episodes, sampled once: the same rows, mini-batches, clipped loss, clipping and AdamW. Tokens are
those of the trained rows, including prompts and observed tokens, however many of them are computed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.demo_models import DemoModels
from benchmarks.measure import Row, alternate
from rally.algos import losses
from rally.config import load_config
from rally.demo.demo import CALCULATOR
from rally.demo.training_stages import CourseSettings, course_config
from rally.models import attention
from rally.models.load import load_model
from rally.runs import train as run
from rally.track import RunConsole, RunFolder
from rally.train import packing
from rally.train.batch import TrainBatch, build_batch
from rally.train.policy import OptimizerSettings, Policy
from rally.train.update import UpdateSettings, update_policy

Step = Callable[[], object]

MINI_BATCH = 16  # prompts
SETTINGS = UpdateSettings(mini_batch_groups=MINI_BATCH)
OPTIMIZER = OptimizerSettings(lr=1e-9)  # the work of a step, without moving away from the start


def update_row(demo: DemoModels) -> Row:
    batch = sampled_batch(demo)
    tokens = sum(len(row.ids) for row in batch.rows if row.advantages.any())
    ours, other = _rally(demo, batch), _padded(demo, batch)
    timings = alternate(lambda: _seconds(ours), lambda: _seconds(other), repetitions=5)
    assert timings.other_median is not None
    rates = f"{tokens / timings.ours_median:,.0f} against {tokens / timings.other_median:,.0f} tokens/s"
    return Row(
        what=f"the update of one GRPO step of the demo agent: {tokens:,} tokens in 2 mini-batches",
        against="the same loss on one padded batch for each mini-batch, transformers",
        goal=1.0,
        timings=timings,
        note=rates,
    )


def sampled_batch(demo: DemoModels) -> TrainBatch:
    """The episodes of the first step of a run, 32 prompts x 8, with their advantages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        base = course_config(CALCULATOR, demo.folder, CourseSettings(grpo_steps=1))
        overrides = [f"trainer.default_local_dir={folder}", "trainer.test_freq=-1", "data.val_files=null"]
        run.train(load_config(overrides=overrides, base=base), RunConsole(Console(file=StringIO())))
        return build_batch(RunFolder(folder).read_episodes(1))


def _rally(demo: DemoModels, batch: TrainBatch) -> Step:
    model = load_model(str(demo.start))
    attention.install(model)
    policy = Policy(model, OPTIMIZER, 1000)
    return lambda: update_policy(policy, batch, SETTINGS)


def _padded(demo: DemoModels, batch: TrainBatch) -> Step:
    """The same update with transformers alone."""
    model = load_model(str(demo.start))
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr, fused=True)
    parts = batch.mini_batches(MINI_BATCH, range(batch.num_groups))
    chosen = [[row for row in batch.rows if row.episode in set(part) and row.advantages.any()] for part in parts]
    counts = [int(batch.tokens_N[part].sum()) for part in parts]

    def step() -> None:
        model.train()
        for rows, tokens in zip(chosen, counts, strict=True):
            (padded_losses(model, rows).sum() / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def padded_losses(model: PreTrainedModel, rows: Sequence[packing.Row]) -> Tensor:
    """The clipped loss of every sampled token."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in rows])
    mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows])
    places = torch.tensor([(i, at - 1) for i, row in enumerate(rows) for at in row.sampled])
    targets = torch.tensor([row.ids[at] for row in rows for at in row.sampled])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[places[:, 0], places[:, 1]]
    logp = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    old = torch.tensor([p for row in rows for p in row.logprobs.tolist()])
    advantages = torch.tensor([a for row in rows for a in row.advantages.tolist()])
    return losses.clipped_policy_loss(logp, old, advantages, low=0.2, high=0.2).loss_M


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
