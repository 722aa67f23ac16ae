"""The run behind `rally eval`: validates a model and writes metrics and episodes to the run folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rally.config import Config
from rally.models.sharding import ALONE, Ranks
from rally.nodes import THIS_MACHINE, RunNodes
from rally.runs import build
from rally.runs.build.engines import check_servers_installed
from rally.runs.build.rollout import check_reward_function, loops_of
from rally.runs.build.run_inputs import RunError, RunInputs, RunOutcome, check_ranks, read_inputs
from rally.track import RunConsole, RunFolder, sole_writer
from rally.train.checkpoint.store import LATEST, CheckpointStore
from rally.train.trainer import run
from rally.util.private_files import private_folder


def evaluate(
    config: Config, console: RunConsole | None = None, ranks: Ranks = ALONE, nodes: RunNodes = THIS_MACHINE
) -> RunOutcome:
    """Validate `model.path` on `data.val_files` and write metrics and episodes to the run folder."""
    console = console or RunConsole()
    check_ranks(config.trainer, ranks)
    if not config.model.path:
        raise RunError("nothing to evaluate: actor_rollout_ref.model.path is not set; name a model folder")
    return evaluate_inputs(config, read_inputs(config, console, train=False), console, ranks, nodes)


def evaluate_inputs(
    config: Config, inputs: RunInputs, console: RunConsole, ranks: Ranks = ALONE, nodes: RunNodes = THIS_MACHINE
) -> RunOutcome:
    if inputs.val_tasks is None:
        raise RunError("nothing to evaluate: data.val_files is not set; name a file of rows, or set env.name")
    private_folder(config.run_dir)
    check_servers_installed(config)
    loops_of(config)
    check_reward_function(config)
    with sole_writer(config.run_dir / "eval"):  # apart from what training wrote
        return _validated(config, inputs, console, ranks, nodes)


def _validated(config: Config, inputs: RunInputs, console: RunConsole, ranks: Ranks, nodes: RunNodes) -> RunOutcome:
    folder = RunFolder(config.run_dir / "eval").create()
    build.set_evaluation_aside(folder)
    folder.save_config(config.to_yaml())
    folder.save_versions()
    _name_what_is_evaluated(config, console)
    store = CheckpointStore(config.run_dir / "checkpoints", warn=console.note)
    trainer = build.trainer_of(config, inputs, folder, store, None, 0, console, ranks, nodes)
    with closing(inputs.toolbox):
        return RunOutcome(folder.path, 0, run(trainer))


def _name_what_is_evaluated(config: Config, console: RunConsole) -> None:
    """Say so if the run has checkpoints, but its configuration names another model, such as the one it began with."""
    checkpoints, model = config.run_dir / "checkpoints", config.model
    evaluated, latest = model.lora_adapter_path or str(model.path), checkpoints / LATEST
    if latest.is_file() and checkpoints.resolve() not in Path(evaluated).resolve().parents:
        key = "lora_adapter_path" if model.lora_rank > 0 or model.lora_adapter_path else "path"
        actor = checkpoints / f"global_step_{latest.read_text().strip()}" / "actor"
        console.note(
            f"evaluating {evaluated}, not a checkpoint of this run; for its last one set "
            f"actor_rollout_ref.model.{key}={actor}"
        )
