"""Reads the inputs of a run before any weight is loaded: tokenizer, tools, simulated users, codec and rows.

All errors in them are raised here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rally.chat import ChatCodec
from rally.chat.formats import load_formats
from rally.config import Config
from rally.config.trainer import RunConfig
from rally.data import TaskSet
from rally.envs import Environments
from rally.interactions import Interactions
from rally.interactions.loader import load_interactions
from rally.models import fp8
from rally.models.load import load_model_config, pick_device, pick_dtype
from rally.models.sharding import Ranks
from rally.runs.build.data import env_tasks_of, environments_of, tasks_of
from rally.runs.build.models import patches_of, stop_ids_at, tokenizer_of
from rally.runs.env_checks import EnvCheck
from rally.runs.row_checks import check_rows, fitting, missing_tools
from rally.tools import ToolBox
from rally.tools.base import BaseTool
from rally.tools.limits import ToolLimits
from rally.tools.loader import load_function_tools, load_tools
from rally.track import RunConsole
from rally.types import RallyError


class RunError(RallyError):
    """A run that cannot start or resume as configured."""


@dataclass(frozen=True)
class RunOutcome:
    """The run folder, the number of steps and the metrics of the last validation."""

    folder: Path
    steps: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run."""

    tokenizer: PreTrainedTokenizerBase
    toolbox: ToolBox
    interactions: Interactions
    codec: ChatCodec
    train_tasks: TaskSet | None
    val_tasks: TaskSet | None
    environments: Environments = field(default_factory=Environments)
    loops: frozenset[str] = frozenset()  # the names of the loops that rows of files ask for


def read_inputs(config: Config, console: RunConsole, *, train: bool = True) -> RunInputs:
    _check_quantization(config)
    tokenizer = tokenizer_of(config)
    toolbox = toolbox_of(config)
    interactions = interactions_of(config)
    codec = codec_of(config, tokenizer, toolbox)
    report = codec.probe()
    environments = environments_of(config)
    check = EnvCheck(config, environments, codec, console)
    train_rows, val_rows = check.fitting(
        env_tasks_of(config, environments) if train else None, env_tasks_of(config, environments, validate=True)
    )
    tools = bool(toolbox.names) or check.have_tools
    refusal = report.refusal(config.history, tools=tools, users=bool(interactions.names) or check.answers)
    if tools:
        refusal = refusal or codec.format_problem()
    if refusal and config.agent_loop_name in ("tool_agent", "env_agent"):
        raise RunError(refusal)
    if not report.append_only and config.rollout.multi_turn.tokenization_sanity_check_mode != "disable":
        console.warn_once("template", f"{report.words}\nmulti_turn.history is '{config.history}'.")
    elif toolbox.schemas() and report.problems:
        console.warn_once("template", report.problems)
    for note in codec.form_notes if tools else ():
        console.note(note)

    loops: set[str] = set()

    def tasks(files: Sequence[str], validate: bool) -> TaskSet | None:
        if not files:
            return None
        task_set = fitting(tasks_of(config, files, validate=validate), codec, config, console)
        loops.update(check_rows(config, task_set, interactions, toolbox))
        if missing := missing_tools(config, task_set, toolbox):
            console.warn_once("missing tools", missing)
        return task_set

    train_tasks = train_rows or (tasks(config.data.train_files, False) if train else None)
    val_tasks = val_rows or tasks(config.data.val_files, True)
    return RunInputs(tokenizer, toolbox, interactions, codec, train_tasks, val_tasks, environments, frozenset(loops))


def _check_quantization(config: Config) -> None:
    """Raise if the model or the device cannot sample in FP8, as far as is known before weights are loaded."""
    if config.rollout.quantization is None:
        return
    model, path = config.model, str(config.model.path)
    device = pick_device(config.trainer.device)
    fp8.check_device(device, pick_dtype(model.dtype, device))
    if not path.endswith(".gguf"):  # slow to read; the engine checks it
        fp8.check_config(load_model_config(path, trust_remote_code=model.trust_remote_code))


def check_ranks(trainer: RunConfig, ranks: Ranks) -> None:
    if trainer.world_size != ranks.world_size:
        keys = f"trainer.nnodes={trainer.nnodes} and n_gpus_per_node={trainer.n_gpus_per_node}"
        raise RunError(
            f"{keys} need `rally train`, `rally eval`, `rally sft` or rally.distributed, which start the other "
            "processes; leave them out here"
        )


def toolbox_of(config: Config) -> ToolBox:
    tools: list[BaseTool[Any]] = []
    if config.tool_config_path:
        tools += load_tools(config.tool_config_path, processes=True)
    if config.function_tool_path:
        tools += load_function_tools(config.function_tool_path, processes=True)
    offered = config.rollout.agent_loop_config.tools
    if offered:
        known = {tool.name for tool in tools}
        builtin = [{"name": name} for name in offered if name not in known]
        tools = [t for t in tools if t.name in offered] + (load_tools({"tools": builtin}) if builtin else [])
    multi_turn = config.rollout.multi_turn
    for tool in tools:
        tool.prepare()
    return ToolBox(
        tools,
        ToolLimits(
            timeout=multi_turn.tool_timeout,
            max_parallel=multi_turn.max_parallel_calls or 0,
            max_response_chars=multi_turn.max_tool_response_length,
            truncate_side=multi_turn.tool_response_truncate_side,
        ),
        on_outage=multi_turn.on_tool_outage,
    )


def interactions_of(config: Config) -> Interactions:
    path = config.rollout.multi_turn.interaction_config_path
    return Interactions(load_interactions(path) if path else (), config.rollout.multi_turn.tool_timeout)


def codec_of(config: Config, tokenizer: PreTrainedTokenizerBase, toolbox: ToolBox) -> ChatCodec:
    multi_turn = config.rollout.multi_turn
    if multi_turn.format_path:
        load_formats(multi_turn.format_path)
    return ChatCodec(
        tokenizer,
        multi_turn.format,
        toolbox.schemas(),
        stop_ids=stop_ids_at(str(config.model.path)),
        template_kwargs=dict(config.data.apply_chat_template_kwargs),
        patches=patches_of(config),
    )
