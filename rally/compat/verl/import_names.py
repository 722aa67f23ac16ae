"""Makes verl's import names available, each as its counterpart in Rally.

If verl is not installed, `from verl.tools.base_tool import BaseTool` imports `rally.tools.BaseTool`, and so on for the
names in the table below. Tools, simulated users, rewards and agent loops written for verl then run unchanged. Importing
any other name fails as usual. An installed verl takes precedence.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TOOL = {"BaseTool": "rally.tools.BaseTool", "ToolResponse": "rally.tools.ToolResponse"}
SCHEMAS = {
    name: f"rally.compat.verl.tool_schemas.{name}"
    for name in (
        *("OpenAIFunctionToolSchema", "OpenAIFunctionSchema"),
        *("OpenAIFunctionParametersSchema", "OpenAIFunctionPropertySchema"),
    )
}
LOOP = {
    "AgentLoopBase": "rally.compat.verl.agent_loops.VerlAgentLoop",
    "AgentLoopOutput": "rally.loops.AgentLoopOutput",
    "AgentLoopMetrics": "rally.compat.verl.agent_loops.AgentLoopMetrics",
    "AsyncLLMServerManager": "rally.compat.verl.agent_loops.ServerManager",
    "SingleTurnAgentLoop": "rally.loops.SingleTurnAgentLoop",
    "ToolAgentLoop": "rally.loops.ToolAgentLoop",
    "register": "rally.loops.register",
}
DATA = {"DataProto": "rally.compat.verl.agent_loops.DataProto"}
SCORES = "verl.utils.reward_score"
SCORE_FUNCTIONS = "rally.compat.verl.reward_scores"

NAMES: dict[str, dict[str, str]] = {
    "verl": DATA,
    "verl.protocol": DATA,
    "verl.tools.base_tool": TOOL | SCHEMAS,
    "verl.tools.schemas": {"ToolResponse": TOOL["ToolResponse"]} | SCHEMAS,
    "verl.tools.gsm8k_tool": {"Gsm8kTool": "rally.tools.builtin.answer_check.Gsm8kTool"},
    "verl.tools.search_tool": {"SearchTool": "rally.tools.builtin.search.SearchTool"},
    "verl.tools.sandbox_fusion_tools": {"SandboxFusionTool": "rally.tools.builtin.code_interpreter.CodeInterpreter"},
    "verl.interactions.base": {"BaseInteraction": "rally.interactions.BaseInteraction"},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": "rally.interactions.gsm8k.Gsm8kInteraction"},
    "verl.experimental.agent_loop": LOOP,
    "verl.experimental.agent_loop.agent_loop": LOOP,
    "verl.experimental.agent_loop.tool_agent_loop": LOOP,
    "verl.experimental.agent_loop.single_turn_agent_loop": LOOP,
    "verl.workers.rollout.replica": {"TokenOutput": "rally.compat.verl.agent_loops.TokenOutput"},
    "verl.workers.rollout.sglang_rollout.agent_loop.base": {
        "AgentLoopBase": "rally.compat.verl.agent_loops.MessageLoop",
        "AgentLoopOutput": "rally.loops.AgentLoopOutput",
    },
    "verl.trainer.ppo.reward_score.base": {"RewardManager": "rally.rewards.custom_functions.RewardManager"},
    SCORES: dict.fromkeys(
        ("default_compute_score", "_default_compute_score"), f"{SCORE_FUNCTIONS}.default_compute_score"
    ),
    f"{SCORES}.gsm8k": {
        "compute_score": f"{SCORE_FUNCTIONS}.gsm8k",
        "extract_solution": "rally.scoring.verl_scores.gsm8k_answer",
    },
    f"{SCORES}.math": {"compute_score": f"{SCORE_FUNCTIONS}.math"},  # the name until verl 0.5
    f"{SCORES}.math_reward": {"compute_score": f"{SCORE_FUNCTIONS}.math"},
    f"{SCORES}.math_dapo": {"compute_score": f"{SCORE_FUNCTIONS}.math_dapo"},
    f"{SCORES}.search_r1_like_qa_em": {
        "compute_score": f"{SCORE_FUNCTIONS}.search_r1",
        "compute_score_subem": f"{SCORE_FUNCTIONS}.search_r1_contains",
        "extract_solution": "rally.scoring.answer_extraction.last_tagged",
    },
    "verl.utils.dataset": {"RLHFDataset": "rally.data.tasks.FileRows"},
    "verl.utils.dataset.rl_dataset": {"RLHFDataset": "rally.data.tasks.FileRows"},
    "verl.utils.profiler": {"simple_timer": "rally.compat.verl.agent_loops.simple_timer"},
    "verl.utils.rollout_trace": {"rollout_trace_op": "rally.compat.verl.agent_loops.rollout_trace_op"},
}
"""For each module, its names and the dotted paths of their counterparts, which are imported on access."""

PACKAGES = {".".join(name.split(".")[:depth]) for name in NAMES for depth in range(1, name.count(".") + 2)}


class VerlNameFinder(MetaPathFinder, Loader):
    """Finds the modules of the table. It is last in sys.meta_path, so that an installed verl is found first."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in PACKAGES else None

    def exec_module(self, module: ModuleType) -> None:
        names = NAMES.get(module.__name__, {})

        def import_counterpart(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"Rally has no counterpart of {module.__name__}.{name}")
            target_module, _, attribute = names[name].rpartition(".")
            return getattr(importlib.import_module(target_module), attribute)

        module.__getattr__ = import_counterpart  # type: ignore[method-assign]


def offer_verl_names() -> None:
    """Install the finder, so that files written for verl can be imported in this process."""
    if not any(isinstance(finder, VerlNameFinder) for finder in sys.meta_path):
        sys.meta_path.append(VerlNameFinder())
