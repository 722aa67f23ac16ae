"""`rally train --dry-run`: prints the configuration, a prompt, tools, budgets and the memory plan without training."""

from __future__ import annotations

import json

import torch
from rich.text import Text
from transformers import PreTrainedModel

from rally.config import Config
from rally.config.checks.multi_gpu import with_rollout_servers
from rally.engines.embedded.memory_plan import plan_memory
from rally.runs import build
from rally.runs.build.rollout import check_reward_function
from rally.runs.build.run_inputs import RunInputs, read_inputs
from rally.runs.build.update_settings import check_objective, total_steps_of
from rally.runs.cost_estimate import shown_bytes, training_costs
from rally.runs.env_checks import opening_of
from rally.runs.planned_models import size_of
from rally.track import RunConsole
from rally.track.display_text import visible
from rally.types import Task


def dry_run(config: Config, console: RunConsole) -> None:
    """Load everything that can fail before training, including the reward function, and print the plan."""
    config.require_training()
    config = with_rollout_servers(config)
    inputs = read_inputs(config, console)
    check_objective(config)
    check_reward_function(config)
    tasks = inputs.train_tasks or inputs.val_tasks
    assert tasks is not None
    console.note(config.to_yaml().rstrip())
    console.table("tools", [[s["function"]["name"], json.dumps(s)] for s in inputs.toolbox.schemas()] or [["none", ""]])
    _show_prompt(inputs, tasks[0], console)
    console.table("template", [["", inputs.codec.probe().words]])
    _show_budgets(config, inputs, console)
    _show_memory(config, inputs, console)
    console.note("dry run: nothing was trained")


def _show_prompt(inputs: RunInputs, task: Task, console: RunConsole) -> None:
    codec, prompt = inputs.codec, list(task.prompt)
    if not prompt:
        prompt, tools = opening_of(inputs.environments, task)
        codec = codec.with_tools(tools)
        console.table(
            "tools of the environment", [[s["function"]["name"], json.dumps(s)] for s in tools] or [["none", ""]]
        )
    ids = codec.encode_prompt(prompt)
    console.banner("first prompt", {"row": task.id, "tokens": f"{len(ids)}, all observed (mask 0); replies get mask 1"})
    console.show(Text(visible(inputs.codec.decode(ids)), style="dim"))
    console.show(Text("<the policy's turn, mask 1>", style="green"))


def _show_budgets(config: Config, inputs: RunInputs, console: RunConsole) -> None:
    data = config.data
    rows = [
        ["prompt tokens, at most", str(config.prompt_length)],
        ["response tokens, at most", f"{config.response_length} (sampled and observed together)"],
        ["history, at most", f"{config.max_model_len} tokens"],
        ["assistant turns, at most", str(config.max_turns or "no limit")],
        ["agent loop", config.agent_loop_name],
        ["simulated users", ", ".join(inputs.interactions.names) or "none"],
        ["environments", ", ".join(inputs.environments.labels) or "none"],
        ["history policy", config.history],
    ]
    if inputs.train_tasks is not None:
        steps = total_steps_of(config, len(inputs.train_tasks))
        sampler = build.sampler_of(config, inputs.train_tasks, steps)  # so that its errors show here
        rows += [
            ["training rows", str(len(inputs.train_tasks))],
            ["rows chosen by", type(sampler).__name__],
            ["steps", f"{steps} of {data.train_batch_size} prompts x {config.rollout.n} episodes"],
        ]
    if inputs.val_tasks is not None:
        rows.append(["validation rows", str(len(inputs.val_tasks))])
    console.table("budgets", rows)


def _show_memory(config: Config, inputs: RunInputs, console: RunConsole) -> None:
    model = build.model_of(config)
    width = torch.empty((), dtype=model.dtype).element_size()
    costs = training_costs(config, model.config, size_of(model), width)
    rows = [[cost.what, shown_bytes(cost.bytes)] for cost in costs]
    if (ranks := config.trainer.world_size) > 1:
        rows.append(["ranks", f"{ranks}, each with its shard of weights, gradients and optimizer states"])
    console.table("memory plan", [*rows, *_engine_rows(config, inputs, model), ["device", str(model.device)]])


def _engine_rows(config: Config, inputs: RunInputs, model: PreTrainedModel) -> list[list[str]]:
    if config.rollout.name != "embedded":
        return [["engine", f"{config.rollout.name}, in separate processes"]]
    settings = build.engine_settings_of(config, None if config.samples_in_ranks else inputs)
    plan, demand = plan_memory(model, settings), []
    if (known := settings.demand) is not None:
        used = f"{known.pages(settings.page_size) * settings.page_size:,} tokens of it"
        demand = [["a rollout can use", f"{used}, for {known.histories:,} histories of up to {known.tokens:,} tokens"]]
    return [
        ["KV cache", f"{shown_bytes(plan.kv_bytes)} for {plan.pages * settings.page_size:,} tokens"],
        *demand,
        ["one step of the engine", shown_bytes(plan.step_bytes)],
        *([["the rollout's FP8 weights", shown_bytes(plan.fp8_bytes)]] if plan.fp8_bytes else []),
    ]
