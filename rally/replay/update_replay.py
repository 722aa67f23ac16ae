"""`rally replay --update`: repeats a recorded update from the checkpoint before it and compares every bit.

An update is a function of the checkpoint and of the episodes that it trained on, whatever sampled them and in whatever
order they ended. So an asynchronous run, too, can be checked step by step.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rally.config import Config
from rally.models.sharding import model_state
from rally.runs import build
from rally.runs.build.policy_and_critic import policy_of
from rally.runs.build.run_inputs import RunInputs, read_inputs
from rally.runs.build.update_settings import total_steps_of
from rally.track import RunConsole, RunFolder
from rally.track.timing import untimed
from rally.train.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint
from rally.train.policy import Policy
from rally.types import Episode, RallyError


class UpdateReplayError(RallyError):
    """The update cannot be repeated."""


@dataclass(frozen=True)
class ReplayedUpdate:
    """The numbers that differ from the checkpoint after the step: (name, largest difference)."""

    step: int
    episodes: int
    compared: int
    differences: tuple[tuple[str, float], ...]


def replay_update(run: Path, step: int, config: Config, console: RunConsole) -> ReplayedUpdate:
    """Repeat the update of a step with the recorded episodes. Nothing in the run folder changes."""
    if (count := config.trainer.world_size) > 1:
        raise UpdateReplayError(
            f"the update of step {step} was made by {count} ranks, which sum gradients in another order than one "
            "process, so its last bits differ; only updates of one GPU are repeated"
        )
    before = _checkpoint(run, step - 1) if step > 1 else None
    after = _checkpoint(run, step)
    trained = trained_episodes(RunFolder(run), step)
    inputs = read_inputs(config, console, train=True)
    with tempfile.TemporaryDirectory() as scratch, closing(inputs.toolbox):
        now = _update(Path(scratch), step, config, inputs, before, trained, console)
    recorded = _state(policy_of(config, after, step))
    assert recorded.keys() == now.keys(), "both policies are built from one configuration"
    apart = ((name, _apart(value, now[name])) for name, value in recorded.items())
    return ReplayedUpdate(step, len(trained), len(recorded), tuple(pair for pair in apart if pair[1] != 0))


def trained_episodes(folder: RunFolder, step: int) -> list[Episode]:
    """The episodes that the update of a step trained on, in its order."""
    episodes = folder.read_episodes(step)
    ids = folder.read_advantages(step).keys()
    if not ids:
        raise UpdateReplayError(f"the update of step {step} trained on no episode; choose another step")
    by_id = {episode.id: episode for episode in episodes}
    trained = [by_id[id] for id in ids]
    consumed = {row.step: row.groups for row in folder.read_consumed()}
    if step in consumed and tuple(dict.fromkeys(e.group for e in trained)) != consumed[step]:
        raise UpdateReplayError(
            f"consumed.jsonl and advantages/ of {folder.path} do not name the same groups for step {step}; one of them "
            "was changed"
        )
    return trained


def _checkpoint(run: Path, step: int) -> Checkpoint:
    path = run / "checkpoints" / f"global_step_{step}"
    if not path.exists():
        raise UpdateReplayError(
            f"{path} does not exist, and repeating an update needs the checkpoints before and after it; keep more of "
            "them with trainer.save_freq=1, or choose another step"
        )
    return open_checkpoint(path)


def _update(
    scratch: Path,
    step: int,
    config: Config,
    inputs: RunInputs,
    before: Checkpoint | None,
    trained: list[Episode],
    console: RunConsole,
) -> dict[str, Tensor]:
    """The tensors of the policy and its optimizer after the update."""
    assert inputs.train_tasks is not None
    steps = total_steps_of(config, len(inputs.train_tasks))
    folder = RunFolder(scratch).create()
    store = CheckpointStore(scratch / "checkpoints", warn=console.note)
    trainer = build.trainer_of(config, inputs, folder, store, before, steps, console)
    try:
        trainer.learn_from(step, trained, untimed)
        return _state(trainer.policy)
    finally:
        trainer.recorder.close()
        asyncio.run(trainer.engine.close())


def _state(policy: Policy) -> dict[str, Tensor]:
    """The weights and the optimizer state of a policy, by name."""
    return dict(_leaves({"actor": model_state(policy.model), **policy.state()}))


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested state by their paths."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 only if all bits are equal."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")
