"""`AgentTrainer`: training from Python, with rows, tools and a reward as objects instead of paths.

What is given is written into `<out>/inputs`. The run is otherwise `rally train` with the same keys: tools and rewards
run in processes of their own, which import them from the file that defines them, so they must be functions of a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rally import distributed, importing
from rally.config import Config, load_config
from rally.config.yaml_files import Tree, at, leaves, merge, put
from rally.data import write_rows
from rally.redact import HIDDEN
from rally.rewards.completions import takes_completions
from rally.rewards.score import FACTS
from rally.runs.build.run_inputs import RunOutcome
from rally.runs.dry_run import dry_run
from rally.tools.function_tool import FunctionTool
from rally.track import RunConsole, RunFolder
from rally.train.interrupt_signals import EXIT_CODE, RunStopped
from rally.types import RallyError
from rally.util.atomic_files import atomic_file
from rally.util.subprocesses import start_tied

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file of rows, or rows: a list of mappings, a data set of the package datasets, a DataFrame or a pyarrow Table."""

PROGRAM = """
import runpy
from rally.util.process_guard import end_with_parent

end_with_parent()
runpy.run_module("rally.cli", run_name="__main__")
"""
COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables of a notebook by which a progress bar would take its output for a terminal."""
SOURCE = "rows"  # data_source of rows that name none
IN_ROWS = ("agent_name", "tools", "images")  # columns of complete rows that rows with an answer may have


class TrainerError(RallyError):
    """Arguments of an AgentTrainer that cannot be used."""


class AgentTrainer:
    """Trains an agent by reinforcement learning. A second call with the same `out` resumes.

    Args:
        model: a folder or a name on the Hub.
        rows: mappings with `prompt` (text or messages) and `answer`, or complete rows (docs/data.md), or their file.
            `data_source`, `images`, `agent_name` and `tools` are as there; further entries reach the reward function
            in `extra_info`.
        reward: a function of (data_source, solution_str, ground_truth, extra_info) in a file of yours, or, as in TRL,
            one or several of (prompts, completions, and columns of the rows). Without it, complete rows name built-in
            ones.
        reward_weights: a weight for each of several reward functions; 1 for all by default.
        tools: typed functions in a file of yours.
        val_rows: rows to validate on.
        out: the run folder.
        keys: any other keys of the configuration, such as {"trainer.total_training_steps": 10}; they win,
            and a warning names those that contradict an argument.
    """

    def __init__(
        self,
        model: str | Path,
        rows: Rows,
        reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        val_rows: Rows | None = None,
        out: str | Path = "runs/agent",
        keys: Mapping[str, Any] | None = None,
        console: RunConsole | None = None,
    ) -> None:
        if file := importing.being_imported():
            raise TrainerError(
                f"a process of the run imports {file} for a function of it, and would start another run; make the "
                "AgentTrainer under if __name__ == '__main__':"
            )
        self._inputs, self._console = Path(out).expanduser().absolute() / "inputs", console
        given: dict[str, Any] = {
            "actor_rollout_ref.model.path": str(model),
            "trainer.default_local_dir": str(self._inputs.parent),
            "data.train_files": self._file_of(rows, "train", reward),
        }
        if val_rows is not None:
            given["data.val_files"] = self._file_of(val_rows, "val", reward)
        if reward is not None:
            given |= self._reward_keys([reward] if callable(reward) else list(reward), reward_weights)
        if tools:
            given["actor_rollout_ref.rollout.multi_turn.function_tool_path"] = self._tools_file(tools)
        tree: Tree = {}
        for key, value in given.items():
            tree = put(tree, key, value)
        for key, value in (keys or {}).items():
            tree = merge(tree, put({}, key, value))  # a section leaves the others of its keys as they are
        if other := [key for key, value in given.items() if at(tree, key) != value]:
            text = f"keys sets {', '.join(other)}, so what the arguments of AgentTrainer say of it has no effect"
            warnings.warn(text, stacklevel=2)
        self.config: Config = load_config(base=tree)

    def train(self) -> RunOutcome:
        """Train to the end, and return the run folder, the number of steps and the last validation. In a notebook the
        run is a process of its own, whose output is shown. An interrupt ends it after its step with RunStopped, a
        KeyboardInterrupt."""
        self.config.require_training()
        return self._elsewhere("train") if _in_event_loop() else distributed.train(self.config, self._console)

    def evaluate(self) -> RunOutcome:
        """Validate the model on `val_rows` without training."""
        return self._elsewhere("eval") if _in_event_loop() else distributed.evaluate(self.config, self._console)

    def dry_run(self) -> None:
        """Print the configuration, the first prompt, the tools and the memory plan."""
        dry_run(self.config, self._console or RunConsole())

    def _reward_keys(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None) -> dict[str, Any]:
        places = [_place_of(function, "the reward function") for function in functions]
        section = "custom_reward_function"
        if not all(map(takes_completions, functions)):
            if len(functions) != 1 or weights is not None:
                raise TrainerError("several reward functions, or weights, need functions of completions, as in TRL")
            return {f"{section}.path": places[0].module, f"{section}.name": places[0].name}
        weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(weights) != len(functions):
            raise TrainerError(f"there are {len(functions)} reward functions and {len(weights)} weights; give as many")
        made = f"reward = completions_reward({[tuple(place) for place in places]!r}, {weights!r})"
        path = self._written("reward", ["from rally.rewards.completions import completions_reward", "", made])
        return {f"{section}.path": path, f"{section}.name": "reward", "reward_model.reward_manager": "batch"}

    def _written(self, name: str, lines: Sequence[str]) -> str:
        """A Python file of the run, whose name depends on its content."""
        text = "\n".join([f'"""The {name} of a run, written by rally.AgentTrainer."""', "", *lines, ""])
        path = self._inputs / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
        self._inputs.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part:
            part.write_text(text, encoding="utf-8")
        return str(path)

    def _file_of(self, rows: Rows, name: str, reward: object) -> str:
        if isinstance(rows, str | Path):
            return str(rows)
        records: Any = rows
        if hasattr(records, "iloc"):  # pandas, where NaN, NaT and NA say that a value is missing
            records = records.astype(object).where(records.notna(), None).to_dict("records")
        elif hasattr(records, "to_dicts"):  # polars
            records = records.to_dicts()
        elif hasattr(records, "to_pylist"):  # pyarrow
            records = records.to_pylist()
        complete = [_complete(row, number, reward) for number, row in enumerate(records)]
        if not complete:
            raise TrainerError(f"there are no {name} rows; give at least one")
        part = self._inputs / f"{name}.parquet"
        write_rows(complete, part)
        # Other rows have another name, so that a run that is resumed with them says so.
        path = part.with_stem(f"{name}-{hashlib.sha256(part.read_bytes()).hexdigest()[:12]}")
        part.replace(path)
        return str(path)

    def _tools_file(self, tools: Sequence[Callable[..., Any]]) -> str:
        functions = [tool.function if isinstance(tool, FunctionTool) else tool for tool in tools]
        places = [tuple(_place_of(function, "a tool")) for function in functions]
        names = ", ".join(f"tool_{number}" for number in range(len(places)))
        made = f"[{names}] = function_tools_of({places!r})"
        return self._written("tools", ["from rally.tools.loader import function_tools_of", "", made])

    def _elsewhere(self, command: str) -> RunOutcome:
        """Run `rally train` or `rally eval` as a child process and show what it prints."""
        path, text = self._inputs / f"{command}.yaml", self.config.to_yaml()
        if hidden := [key for key, value in leaves(yaml.safe_load(text)) if HIDDEN in str(value)]:
            raise TrainerError(
                f"{', '.join(hidden)} has a secret, and a run of a notebook reads its keys from a file, which gets no "
                'secrets; put it into os.environ["MY_API_KEY"] and write "${oc.env:MY_API_KEY}" instead'
            )
        self._inputs.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part:
            part.write_text(text, encoding="utf-8")
        words = [sys.executable, "-c", PROGRAM, command, str(path)]
        folders = [str(Path(entry or Path.cwd()).absolute()) for entry in sys.path]  # where this process finds modules
        environment = {name: value for name, value in os.environ.items() if name not in COLOURS}
        environment |= {"PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"}
        problem: list[str] = []
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # In a group of its own, because an interrupt reaches this process and is passed on once.
        with start_tied(words, env=environment, process_group=0, **options) as process:
            assert process.stdout is not None
            while True:
                try:
                    for line in process.stdout:
                        sys.stdout.write(line)
                        if line.startswith("rally: "):
                            problem = [line]
                        elif problem:
                            problem.append(line)
                    break
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
        if process.returncode == EXIT_CODE:
            raise RunStopped
        if process.returncode:
            told = "".join(problem).removeprefix("rally: ").strip()
            raise TrainerError(told or f"the run ended with exit code {process.returncode}; see its output")
        folder = RunFolder(self.config.run_dir if command == "train" else self.config.run_dir / "eval")
        rows = folder.read_metrics()
        validated = [row for row in rows if any(name.startswith("val-") for name in row.metrics)]
        return RunOutcome(folder.path, rows[-1].step, validated[-1].metrics if validated else {})


class _Place(NamedTuple):
    """Where another process imports a function: a file or pkg://module, and its name there."""

    module: str
    name: str


def _place_of(function: Callable[..., Any], what: str) -> _Place:
    name = getattr(function, "__qualname__", type(function).__name__)
    if not inspect.isfunction(function) or not name.isidentifier():
        raise TrainerError(f"{what} {name} must be a function at the top level of a file; define it there")
    module = sys.modules[function.__module__]
    file = getattr(module, "__file__", None)
    if file is None:
        raise TrainerError(
            f"{what} {name} is defined in a notebook or at a prompt, where no other process can import it; write it "
            "to a file (in a notebook: %%writefile my_agent.py) and import it from there"
        )
    found = getattr(module, name, None)
    if found is not function and getattr(found, "function", None) is not function:
        raise TrainerError(f"{what} {name} is not what {file} has under this name; give the function itself")
    known = module.__name__
    if known == "__main__" and module.__spec__ is not None:  # of python -m
        known = module.__spec__.name
    inside = "." in known or (known != "__main__" and hasattr(module, "__path__"))
    return _Place(f"pkg://{known}" if inside else str(Path(file).absolute()), name)


def _complete(row: object, number: int, reward: object) -> dict[str, Any]:
    """The row in the form of files (docs/data.md)."""
    if not isinstance(row, Mapping):
        raise TrainerError(f"row {number} is a {type(row).__name__}; give mappings with prompt and answer")
    in_columns = reward is not None and (not callable(reward) or takes_completions(reward))  # a function names columns
    if "reward_model" in row or ("data_source" in row and "answer" not in row and not in_columns):
        return dict(row)
    if reward is None and "data_source" not in row:
        raise TrainerError(f"row {number} has no data_source, and there is no reward function; give reward=")
    needed = ("prompt", *(() if in_columns else ("answer",)))
    missing = [name for name in needed if _is_missing(row.get(name))]
    if missing:
        raise TrainerError(f"row {number} has no {' and no '.join(missing)}, but {', '.join(map(str, row))}; add it")
    prompt, answer = row["prompt"], row.get("answer")
    read = {"prompt", *IN_ROWS, *(() if in_columns else ("answer", "data_source"))}
    others = {name: value for name, value in row.items() if name not in read}
    if clash := sorted(set(FACTS) & set(others)):
        raise TrainerError(f"row {number} has {clash[0]}, where a reward function gets that of the episode; rename it")
    return {
        "data_source": row.get("data_source", SOURCE),
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "reward_model": {"style": "model"} if _is_missing(answer) else {"style": "rule", "ground_truth": answer},
        **{name: row[name] for name in IN_ROWS if name in row},
        **({"extra_info": others} if others else {}),
    }


def _is_missing(value: object) -> bool:
    """Whether it is None or not a number, as a data set marks what a row does not have."""
    return value is None or (isinstance(value, float) and value != value)


def _in_event_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook, so that a run cannot start its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
