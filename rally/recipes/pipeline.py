"""The stages of a recipe, from nothing to a trained and evaluated agent, each a command of its own.

`preparation` reads the recipe's `needs` and lists the commands that make them, in order, a supervised start with its
own needs before it. `evaluations_before` measure the model as it is, where the training does not: with a supervised
start, and on the data of the evaluations in the recipe's folder (eval*.yaml). Then come training and the same
evaluations of the last checkpoint. A stage whose outputs exist is done and is skipped, so a second call continues where
the first one ended. Training and fine-tuning resume by themselves. Outputs of a run with another model or other
settings are an error, not a reason to skip.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from rally.config import Config, load_config
from rally.config.yaml_files import leaves, merge, read_document
from rally.models.lora import is_adapter_folder
from rally.recipes.catalog import Command, RecipeError, evaluations_of, find_recipe
from rally.track.run_folder.folder import redacted_yaml
from rally.train.checkpoint.store import CheckpointStore
from rally.util.checksums import MANIFEST, reason

_log = logging.getLogger(__name__)

SOURCES = {"gsm8k": "--source", "search_r1": "--source", "geometry": "--source", "retool": "--gsm8k"}
"""The option of `rally data NAME` that names a folder to read instead of the hub."""
ADAPTERS = "actor_rollout_ref.model.lora_adapter_path"
OF_THE_RESULT = ("trainer.seed", "trainer.critic_warmup")
"""Keys of `trainer.*` that change what is trained; the others say how long, where to and how often."""
MODEL_KEYS: dict[Command, str] = {"train": "actor_rollout_ref.model.path", "sft": "model.path"}
TITLES = {"data": "data", "env": "environment"}


@dataclass(frozen=True)
class Stage:
    """One command: the arguments of `rally`, and the paths that it makes."""

    title: str
    args: tuple[str, ...]
    outputs: tuple[Path, ...]
    record: Path | None = None  # where the command that made the outputs is written
    stale: bool = False  # the outputs exist and are of something else

    @property
    def done(self) -> bool:
        return not self.stale and all(path.exists() for path in self.outputs)

    def check_record(self) -> None:
        """Outputs that another command made, such as one with another source, must not be taken for these."""
        made_by = self.record.read_text(encoding="utf-8") if self.record and self.record.is_file() else self.line
        if self.done and made_by != self.line:
            raise RecipeError(f"{self.outputs[0]} was made by `{made_by}`, not by `{self.line}`; move or remove it")

    def write_record(self) -> None:
        if self.record is not None:
            self.record.write_text(self.line, encoding="utf-8")

    def making(self, outputs: Iterable[Path]) -> Stage:
        """The same command where more of what it makes is read."""
        return replace(self, outputs=tuple(dict.fromkeys((*self.outputs, *outputs))))

    @property
    def line(self) -> str:
        return shlex.join(["rally", *self.args])


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What a user may change of a recipe: keys of the training, the base model of all stages, and a folder of data."""

    overrides: Sequence[str] = ()
    model: str | None = None
    source: str | None = None


def preparation(name: str, options: RecipeOptions) -> list[Stage]:
    """The stages that make what the recipe reads, each listed once."""
    stages: dict[str, Stage] = {}
    overrides = training_overrides(name, options)
    others = [_needs_of(other, "eval", options, _not_set_by(other, overrides)) for other in evaluations_of(name)]
    for stage in chain(_needs_of(name, "train", options, overrides), *others):
        stages[stage.line] = stages.get(stage.line, stage).making(stage.outputs)
    if options.source is not None and not any(options.source in stage.args for stage in stages.values()):
        raise RecipeError(f"{name} reads no data set from a source, so --source would have no effect; leave it out")
    return list(stages.values())


def training(name: str, options: RecipeOptions) -> Stage:
    """`rally train` over the whole recipe. It is done when the checkpoint of the last step exists."""
    overrides = training_overrides(name, options)
    config = load_config(find_recipe(name, "train"), overrides)
    config.require_training()
    if not config.trainer.total_training_steps:
        raise RecipeError("rally run must know the last step; set trainer.total_training_steps")
    last = config.run_dir / "checkpoints" / f"global_step_{config.trainer.total_training_steps}"
    _check_settings(config, finished=last.exists())
    return Stage("training", ("train", "--recipe", name, *overrides), (last,))


def evaluations_before(name: str, options: RecipeOptions) -> list[Stage]:
    """`rally eval` of the model as it is. Without a supervised start, training itself validates it on the recipe's own
    rows, before its first step. A model that the recipe makes with random weights is not evaluated."""
    overrides = training_overrides(name, options)
    config = load_config(find_recipe(name, "train"), overrides)
    base = _base_model(name, options)
    if base is None:
        return []
    measured = base == config.model.path and config.model.lora_adapter_path is None and config.trainer.val_before_train
    keys = (f"{MODEL_KEYS['train']}={base}", *([] if config.model.lora_adapter_path is None else [f"{ADAPTERS}=null"]))
    stages = [] if measured else [_evaluation("before training", name, name, options, keys, "before")]
    stages += [
        _evaluation("before training", name, other, options, keys, f"before_{other.partition('/')[2] or 'eval'}")
        for other in evaluations_of(name)
    ]
    for stage in stages:
        _check_evaluated(stage, base)
    return stages


def evaluations(name: str, options: RecipeOptions) -> list[Stage]:
    """`rally eval` of the last checkpoint, as it would be loaded by anybody else: on the recipe's rows, and on those of
    the evaluations in its folder."""
    config = load_config(find_recipe(name, "train"), training_overrides(name, options))
    checkpoint = CheckpointStore(config.run_dir / "checkpoints", warn=_log.warning).latest(clear=False)
    if checkpoint is None:
        raise RecipeError(f"{config.run_dir} has no checkpoint to evaluate; train first: rally run {name}")
    model = ADAPTERS if is_adapter_folder(checkpoint.actor) else MODEL_KEYS["train"]
    keys, step = (f"{model}={checkpoint.actor}",), checkpoint.path.name
    stages = [_evaluation("evaluation", name, name, options, keys, step)]
    stages += [
        _evaluation("evaluation", name, other, options, keys, f"{step}_{other.partition('/')[2] or 'eval'}")
        for other in evaluations_of(name)
    ]
    return [
        replace(stage, stale=metrics.is_file() and _older(metrics, checkpoint.path / MANIFEST))
        for stage in stages
        for metrics in stage.outputs
    ]


def _evaluation(
    title: str, training: str, name: str, options: RecipeOptions, model: Sequence[str], folder: str
) -> Stage:
    """`rally eval` with the recipe `name`, in a folder of the run that the recipe `training` makes."""
    overrides = training_overrides(training, options)
    config = load_config(find_recipe(training, "train"), overrides)
    if name != training:
        overrides = _not_set_by(name, overrides)
    out = config.run_dir / "eval" / folder
    keys = [*model, f"trainer.default_local_dir={out}"]
    if config.trainer.n_gpus_per_node > 1:
        keys.append("trainer.n_gpus_per_node=1")  # an evaluation has one process
    return Stage(title, ("eval", "--recipe", name, *overrides, *keys), (out / "eval" / "metrics.jsonl",))


def _not_set_by(name: str, overrides: Iterable[str]) -> tuple[str, ...]:
    """The overrides of the training that hold for an evaluation on other data: not those of its own keys."""
    own = [key for key, _ in leaves(read_document(find_recipe(name, "eval")).layers[-1])]
    named = {override: override.partition("=")[0].lstrip("+") for override in overrides}
    return tuple(o for o, key in named.items() if not any(_overlap(key, one) for one in own))


def _overlap(key: str, other: str) -> bool:
    """Whether two keys are the same, or one is in the section of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _base_model(name: str, options: RecipeOptions) -> str | None:
    """The model before anything of the recipe has trained it; None if the recipe makes that model itself."""
    config = load_config(find_recipe(name, "train"), training_overrides(name, options))
    start = next(_starts_of(name, options), None)
    if start is None or config.model.lora_adapter_path is not None:
        return config.model.path
    document = read_document(find_recipe(start, "sft"))
    path = options.model or str(document.merged["model"]["path"])
    return None if document.notes.read_by({"path": path}) else path


def _starts_of(name: str, options: RecipeOptions) -> Iterator[str]:
    """The recipes of the supervised starts that a training begins from."""
    document = read_document(find_recipe(name, "train"))
    keys = OmegaConf.to_container(OmegaConf.from_dotlist(list(training_overrides(name, options))))
    for line in document.notes.read_by(merge(document.merged, keys)).values():
        yield from (words[words.index("--recipe") + 1] for words in _commands(line) if words[0] == "sft")


def _check_evaluated(stage: Stage, model: str) -> None:
    """The evaluation of another model must not be taken for the one that is asked for."""
    path = stage.outputs[0].with_name("config.yaml")
    if not stage.done or not path.is_file():
        return
    evaluated = _read_config(path)["actor_rollout_ref"]["model"]["path"]
    if _portable(evaluated) != _portable(model):
        raise RecipeError(f"{path.parent} is the evaluation of {evaluated}, not of {model}; move or remove that folder")


def training_overrides(name: str, options: RecipeOptions) -> tuple[str, ...]:
    """The user's keys; the base model among them where training does not start from a supervised start."""
    document = read_document(find_recipe(name, "train"))
    path = str(document.merged["actor_rollout_ref"]["model"]["path"])
    if options.model is not None and any(key.startswith(f"{MODEL_KEYS['train']}=") for key in options.overrides):
        raise RecipeError(f"--model and {MODEL_KEYS['train']} both name the model; give one of them")
    own = bool(document.notes.read_by({"path": path}))
    base = () if options.model is None or own else (f"{MODEL_KEYS['train']}={options.model}",)
    return (*base, *options.overrides)


def _needs_of(name: str, command: Command, options: RecipeOptions, keys: Sequence[str]) -> Iterator[Stage]:
    document = read_document(find_recipe(name, command))
    tree = merge(document.merged, OmegaConf.to_container(OmegaConf.from_dotlist(list(keys))))
    for need, line in document.notes.read_by(tree).items():
        read = [Path(path) for path in document.notes.paths_below(need, tree)]
        for words in _commands(line):
            if words[0] == "sft":
                start = words[words.index("--recipe") + 1]
                yield from _needs_of(start, "sft", options, _sft_overrides(options))
                _check_model(Path(need).parents[2], start, options)
                yield Stage("supervised start", (*words, *_sft_overrides(options)), (Path(need),))
            else:
                made = [Path(value) for option, value in pairwise(words) if option == "--out"]
                stage = Stage(
                    TITLES.get(words[0], "model"),
                    _from_source(words, options.source),
                    tuple(dict.fromkeys((*made, *read))),
                    record=made[0].with_name(f".{made[0].name}.made_by"),
                )
                stage.check_record()
                yield stage


def _check_model(run: Path, name: str, options: RecipeOptions) -> None:
    """The supervised start of another model must not be taken for the one that is asked for."""
    wanted = options.model or str(read_document(find_recipe(name, "sft")).merged["model"]["path"])
    saved = _saved_config(run)
    if saved is not None and _portable(saved["model"]["path"]) != _portable(wanted):
        raise RecipeError(
            f"{run} is the supervised start of {saved['model']['path']}, not of {wanted}; move or remove that folder, "
            "or run in another one"
        )


def _check_settings(config: Config, *, finished: bool) -> None:
    """A run with other settings must not be taken for the one that is asked for. An unfinished one may continue with
    other settings, as `rally train` allows, but not with another model."""
    saved, asked = _saved_config(config.run_dir), yaml.safe_load(redacted_yaml(config.to_yaml()))
    changed = [] if saved is None else sorted(_differences(saved, asked, ""))
    if not finished:
        changed = [key for key in changed if key == MODEL_KEYS["train"]]
    if changed:
        raise RecipeError(
            f"{config.run_dir} holds a run with other settings ({', '.join(changed[:5])}); choose another "
            "trainer.experiment_name, or remove the folder"
        )


def _saved_config(run: Path) -> dict[str, Any] | None:
    """Of a run that has written a checkpoint; None if there is none to go on from."""
    path = run / "config.yaml"
    return _read_config(path) if path.is_file() and any((run / "checkpoints").glob("global_step_*")) else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        raise RecipeError(f"{path} cannot be read ({reason(problem)}); copy it again, or remove the folder") from None
    if not isinstance(saved, dict):
        raise RecipeError(f"{path} holds no configuration; copy it again, or remove the folder")
    return saved


def _differences(saved: Any, asked: Any, key: str) -> Iterator[str]:
    """The keys in which two configurations differ. A key that the saved one lacks is newer than it."""
    if isinstance(saved, dict) and isinstance(asked, dict):
        for name in saved.keys() & asked.keys():
            where = f"{key}.{name}" if key else name
            if not where.startswith("trainer.") or where in OF_THE_RESULT:
                yield from _differences(saved[name], asked[name], where)
    elif _portable(saved) != _portable(asked):
        yield key


def _portable(value: Any) -> Any:
    """Paths into this package differ between installations of it."""
    return re.sub(r"^.*/rally/recipes/", "recipes/", value) if isinstance(value, str) else value


def _sft_overrides(options: RecipeOptions) -> tuple[str, ...]:
    return () if options.model is None else (f"{MODEL_KEYS['sft']}={options.model}",)


def _commands(line: str) -> Iterator[tuple[str, ...]]:
    """`rally a && rally b` as the arguments of each."""
    for part in line.split("&&"):
        program, *words = shlex.split(part)
        assert program == "rally" and words, f"a recipe may only need commands of rally, not {part!r}"
        yield tuple(words)


def _from_source(words: tuple[str, ...], source: str | None) -> tuple[str, ...]:
    option = SOURCES.get(words[1]) if words[0] == "data" else None
    if source is None or option is None:
        return words
    if option in words:
        at = words.index(option)
        return (*words[: at + 1], source, *words[at + 2 :])
    return (*words, option, source)


def _older(file: Path, other: Path) -> bool:
    """Whether a file is empty, or was written before the other one."""
    return file.stat().st_size == 0 or file.stat().st_mtime < other.stat().st_mtime
