"""Finds the command of verl in a shell script, and says what each of its keys becomes. The script is never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rally.config.errors import ConfigError, shown
from rally.config.load import Explanation, explain, is_own_file, keys_in
from rally.config.schema import Config
from rally.config.sft import SftConfig
from rally.config.shell_script import LITERAL, read_commands

TRAINERS = {
    "verl.trainer.main_ppo": "train",
    "verl.trainer.main_ppo_sync": "train",
    "recipe.dapo.main_dapo": "train",
    "recipe.entropy.main_entropy": "train",
    "verl.trainer.fsdp_sft_trainer": "sft",
    "verl.trainer.sft_trainer": "sft",
    "verl.trainer.sft_trainer_ray": "sft",
}
"""The modules of verl whose command lines are those of `rally train` and `rally sft`."""
SEPARATE = "trainer.v1.trainer_mode=separate_async"
ASYNC_TRAINERS = {
    "fully_async_policy.fully_async_main": (
        *(SEPARATE, "async_training.staleness_threshold=0.1", "async_training.trigger_parameter_sync_step=4"),
    ),
    "one_step_off_policy.main_ppo": (SEPARATE, "trainer.v1.separate_async.fixed_lag=true"),
}
"""The ends of the names of verl's asynchronous trainers, and the keys that say the same: their mode, and defaults of
their configuration files."""
PROGRAMS = {
    "main_generation": "rally eval, which samples and scores data.val_files",
    "main_eval": "rally eval, which samples and scores data.val_files",
    "model_merger": "rally merge, which takes the same options",
}
"""Modules of verl that train nothing, by the beginning of their name, and the command that does the same."""
UNKNOWN = "set_by_the_shell"
"""Stands for a value that only a shell knows."""


class VerlCommand(NamedTuple):
    """A command of verl as a script passes it."""

    module: str
    config_path: str | None
    config_name: str | None
    words: tuple[str, ...]
    options: tuple[str, ...] = ()  # of Hydra, which are not read


def rally_command(module: str) -> str:
    """`train` or `sft` for a module of verl, or a ConfigError that says why there is no such command."""
    if module in TRAINERS:
        return TRAINERS[module]
    if keys_of_trainer(module):
        return "train"
    if "async" in module or "one_step_off" in module or "partial_rollout" in module:
        raise ConfigError(
            f"{module} is an asynchronous trainer that is not built; use verl.trainer.main_ppo with {SEPARATE} or "
            "colocate_async."
        )
    for name, instead in PROGRAMS.items():
        if module.rpartition(".")[2].startswith(name):
            raise ConfigError(f"{module} is no trainer; use {instead}.")
    known = "verl.trainer.main_ppo, recipe.dapo.main_dapo and verl.trainer.sft_trainer"
    raise ConfigError(f"{module} is a trainer of its own, which is not built; Rally runs the command lines of {known}.")


def keys_of_trainer(module: str) -> tuple[str, ...]:
    """The keys that stand for an asynchronous trainer of verl; those of the command line follow them."""
    return next((keys for end, keys in ASYNC_TRAINERS.items() if module.endswith(f".{end}")), ())


def read_script(text: str) -> VerlCommand:
    """The last command of verl in the script, or a ConfigError if there is none."""
    found = _verl_commands(text)[0][-1]
    return found._replace(words=tuple(word.replace(LITERAL, "$") for word in found.words))


def _verl_commands(text: str) -> tuple[list[VerlCommand], tuple[str, ...]]:
    """The commands of verl that the script runs, and what was assumed to find them."""
    script = read_commands(text)
    found = [command for words in script.commands if (command := _verl_command(words))]
    if not found:
        raise ConfigError("the script has no command of verl, such as `python3 -m verl.trainer.main_ppo ...`.")
    return found, script.assumed


def from_verl(path: Path) -> str:
    """The command of Rally that does what the script does, after one line for each key that is not taken as it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; check the path of the script.") from None
    except (UnicodeDecodeError, IsADirectoryError):
        raise ConfigError(f"{path} is not a shell script of UTF-8 text; name one.") from None
    commands, assumed = _verl_commands(text)
    module, config_path, config_name, words, unread = commands[-1]
    command = rally_command(module)
    words = (*keys_of_trainer(module), *words)
    lines = [f"# assumed: {text}" for text in assumed]
    lines += [f"# not here: the script also starts {other.module}" for other in commands[:-1]]
    lines += [f"# dropped: {option}: it is an option of Hydra, which Rally does not run" for option in unread]
    file = _config_file(path, config_path, config_name)
    if file is not None and not file.exists() and not is_own_file(file):
        lines.append(f"# not read: {config_path or '.'}/{config_name} is not here, so its keys are not in these lines")
        file = None
    report = _explained(Config if command == "train" else SftConfig, file, words)
    renamed = dict(report.moved)
    lines += [f"# renamed: {old} is {new} here" for old, new in report.moved]
    lines += [f"# dropped: {key}={shown(value)}: {why}" for key, value, why in report.dropped]
    lines += [f"# refused: {problem}" for problem in report.problems]
    gone = {key for key, _, _ in report.dropped} | set(report.refused)
    named = config_name and not (file is not None and is_own_file(file) and not file.exists())
    options = [f"--config-path {_quoted(config_path)}"] if named and config_path else []
    options += [f"--config-name {_quoted(config_name)}"] if named and config_name else []
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and not _within(key, gone):
            target = renamed.get(key, key)  # with a value, if that changed too
            options.append(target if "=" in target else f"{target}={_quoted(value)}")
        elif equals and (inside := sorted(other for other in gone if other.startswith(f"{key}."))):
            lines.append(f"# not here: {key}={value} holds {', '.join(inside)}; write its other keys one by one")
    return "\n".join((*lines, " \\\n    ".join((f"rally {command}", *options))))


def _config_file(script: Path, folder: str | None, name: str | None) -> Path | None:
    """The configuration file that a command names. Scripts are started in the root of their repository, so a relative
    folder is looked for in all folders above the script."""
    if not name:
        return None
    here = re.sub(r"^(\$\(pwd\)|\$PWD|\$\{PWD\})/", "", (folder or ".").replace(LITERAL, "$"))
    relative = Path(here) / f"{name.removesuffix('.yaml')}.yaml"
    places = (relative, *(above / relative for above in script.absolute().parents))
    return next((place for place in places if place.exists()), relative)


def _explained(schema: type[Config] | type[SftConfig], file: Path | None, words: Sequence[str]) -> Explanation:
    """What becomes of each key. Of a value that only a shell knows, the key alone is judged."""
    known, unknown = [], set()
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if "$" not in value:
            known.append(word.replace(LITERAL, "$"))
        elif key not in set(schema.keys()):
            unknown.add(key)
            known.append(f"{key}={UNKNOWN}")
    report = explain(schema, file, known)
    targets = unknown | {new for old, new in report.moved if old in unknown}
    judged = [text for text in report.problems if text.startswith("unknown key") or not targets & set(keys_in(text))]
    dropped = [item._replace(value="$...") if item.key in unknown else item for item in report.dropped]
    return report._replace(
        problems=tuple(judged),
        dropped=tuple(dropped),
        refused=tuple(key for key in report.refused if key not in targets or any(key in text for text in judged)),
    )


def _within(key: str, keys: set[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _quoted(value: str) -> str:
    """The value as a shell reads it. What the shell of the reader must expand stays outside of single quotes."""
    if "$" in value:
        parts = re.split(r"(\$\([^()]*\))", value)  # quotes inside of a command belong to it
        escaped = (part if at % 2 else re.sub(r'(["\\`])', r"\\\1", part) for at, part in enumerate(parts))
        return '"' + "".join(escaped).replace(LITERAL, "\\$") + '"'
    return shlex.quote(value.replace(LITERAL, "$")) if value else ""


def _verl_command(words: Sequence[str]) -> VerlCommand | None:
    """The module and its arguments, if the words are a command of verl."""
    for at, word in enumerate(words):
        module = words[at + 1] if word == "-m" and at + 1 < len(words) else ""
        rest = words[at + 2 :]
        if not module and word.endswith(".py") and re.search(r"main_\w+\.py|sft_trainer\.py", word):
            module, rest = word.removesuffix(".py").lstrip("./").replace("/", "."), words[at + 1 :]
        if module.startswith(("verl.", "recipe.")) or ".main_" in f".{module}":
            return _arguments(module, rest)
    return None


def _arguments(module: str, words: Sequence[str]) -> VerlCommand:
    options: dict[str, str] = {}
    kept: list[str] = []
    unread: list[str] = []
    waiting = None
    for word in words:
        name, equals, value = word.partition("=")
        if waiting:
            options[waiting], waiting = word, None
        elif name in ("--config-path", "--config-name", "-cp", "-cn", "--config-dir"):
            name = {"-cp": "--config-path", "-cn": "--config-name"}.get(name, name)
            if equals:
                options[name] = value
            else:
                waiting = name
        elif re.fullmatch(r"\d*[<>&]+", word):
            waiting = "redirection"
        elif word.startswith("-") and word.strip("-"):
            unread.append(word)
        elif not re.match(r"\d*[<>]|-", word) and word.strip():
            kept.append(word)
    folder = options.get("--config-path") or options.get("--config-dir")
    return VerlCommand(module, folder, options.get("--config-name"), tuple(kept), tuple(unread))
