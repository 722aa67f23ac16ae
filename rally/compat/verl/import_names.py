"""Makes verl's import names available, each as its counterpart in Rally.

If verl is not installed, `from verl.tools.base_tool import BaseTool` imports `rally.tools.BaseTool`, and so on for the
names in the table below. Tools, simulated users, rewards and agent loops written for verl then run unchanged. Importing
any other name fails as usual. An installed verl takes precedence.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

COMPAT = "rally.compat.verl"
TOOL = {"BaseTool": f"{COMPAT}.tools.VerlTool", "ToolResponse": "rally.tools.ToolResponse"}
SCHEMAS = {
    name: f"{COMPAT}.tool_schemas.{name}"
    for name in (
        *("OpenAIFunctionToolSchema", "OpenAIFunctionSchema", "OpenAIFunctionParsedSchema", "OpenAIFunctionCallSchema"),
        *("OpenAIFunctionParametersSchema", "OpenAIFunctionPropertySchema", "OpenAIFunctionToolCall"),
    )
}
LOOP = {
    "AgentLoopBase": f"{COMPAT}.agent_loops.VerlAgentLoop",
    "AgentLoopOutput": f"{COMPAT}.agent_loops.VerlLoopOutput",
    "AgentLoopMetrics": f"{COMPAT}.agent_loops.AgentLoopMetrics",
    "AsyncLLMServerManager": f"{COMPAT}.agent_loops.ServerManager",
    "LLMServerClient": f"{COMPAT}.agent_loops.ServerManager",
    "DictConfigWrap": f"{COMPAT}.agent_loops.DictConfigWrap",
    "ToolListWrap": f"{COMPAT}.agent_loops.ToolListWrap",
    "TokenOutput": f"{COMPAT}.agent_loops.TokenOutput",
    "SingleTurnAgentLoop": f"{COMPAT}.tool_loop.VerlSingleTurnLoop",
    "ToolAgentLoop": f"{COMPAT}.tool_loop.VerlToolLoop",
    "AgentData": f"{COMPAT}.tool_loop.AgentData",
    "AgentState": f"{COMPAT}.tool_loop.AgentState",
    "FunctionCall": f"{COMPAT}.tool_loop.FunctionCall",
    "ToolParser": f"{COMPAT}.tool_loop.ToolParser",
    "register": "rally.loops.register",
}
GPT_OSS = {
    name: f"{COMPAT}.tool_loop.{name}"
    for name in (
        *("format_gpt_oss_tool_response_manually", "add_generation_prompt_for_gpt_oss"),
        "build_gpt_oss_tool_response_text",
    )
}
DATA = {"DataProto": f"{COMPAT}.message_loops.DataProto"}
SCORES = "verl.utils.reward_score"
FUNCTIONS = f"{COMPAT}.reward_scores"
ROWS = {"RLHFDataset": "rally.data.tasks.FileRows"}
BOXES = {
    "last_boxed_only_string": f"{FUNCTIONS}.last_box",
    "remove_boxed": f"{FUNCTIONS}.remove_box",
    "is_equiv": f"{FUNCTIONS}.is_equivalent",
}

CORE = f"{COMPAT}.core_algos"
GROUPS = {name: f"{CORE}.{name}" for name in ("as_torch_index", "group_mean_std")}
MASKED = ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value")

NAMES: dict[str, dict[str, str]] = {
    "verl": DATA,
    "verl.protocol": DATA,
    "verl.tools.base_tool": TOOL | SCHEMAS,
    "verl.tools.schemas": {"ToolResponse": TOOL["ToolResponse"]} | SCHEMAS,
    "verl.tools.function_tool": {
        "function_tool": "rally.tools.function_tool.function_tool",
        "FunctionTool": "rally.tools.function_tool.FunctionTool",
        "normalize_function_tool_return": f"{COMPAT}.helpers.normalize_function_tool_return",
    },
    "verl.tools.gsm8k_tool": {"Gsm8kTool": "rally.tools.builtin.answer_check.Gsm8kTool"},
    "verl.tools.geo3k_tool": {"Geo3kTool": "rally.tools.builtin.answer_check.Geo3kTool"},
    "verl.tools.image_zoom_in_tool": {"ImageZoomInTool": "rally.tools.builtin.image_zoom.ImageZoomInTool"},
    "verl.tools.search_tool": {
        "SearchTool": f"{COMPAT}.tools.VerlSearchTool",
        "init_search_execution_pool": f"{COMPAT}.tools.init_execution_pool",
    },
    "verl.tools.sandbox_fusion_tools": {
        "SandboxFusionTool": f"{COMPAT}.tools.VerlSandboxTool",
        "init_execution_pool": f"{COMPAT}.tools.init_execution_pool",
    },
    "verl.tools.utils.tool_registry": {"initialize_tools_from_config": f"{COMPAT}.tools.initialize_tools_from_config"},
    "verl.tools.utils.search_r1_like_utils": {
        "perform_single_search_batch": f"{COMPAT}.tools.perform_single_search_batch",
        "call_search_api": f"{COMPAT}.tools.call_search_api",
        "_passages2string": f"{COMPAT}.tools.passages_to_string",
    },
    "verl.interactions.base": {"BaseInteraction": "rally.interactions.BaseInteraction"},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": "rally.interactions.gsm8k.Gsm8kInteraction"},
    "verl.interactions.utils.interaction_registry": {
        "initialize_interactions_from_config": f"{COMPAT}.helpers.initialize_interactions_from_config"
    },
    "verl.experimental.agent_loop": LOOP,
    "verl.experimental.agent_loop.agent_loop": LOOP,
    "verl.experimental.agent_loop.tool_agent_loop": LOOP,
    "verl.experimental.agent_loop.single_turn_agent_loop": LOOP,
    "verl.experimental.agent_loop.tool_parser": LOOP,
    "verl.experimental.agent_loop.utils": GPT_OSS,
    "verl.experimental.dataset.sampler": {
        name: f"{COMPAT}.samplers.{name}" for name in ("AbstractSampler", "AbstractCurriculumSampler")
    },
    "verl.workers.config": {"ActorConfig": f"{CORE}.VerlActorConfig"},
    "verl.workers.rollout.replica": {"TokenOutput": LOOP["TokenOutput"]},
    "verl.workers.rollout.schemas": {"Message": f"{COMPAT}.helpers.RolloutMessage"},
    "verl.workers.rollout.sglang_rollout.agent_loop.base": {
        "AgentLoopBase": f"{COMPAT}.message_loops.MessageLoop",
        "AgentLoopOutput": "rally.loops.AgentLoopOutput",
    },
    "verl.trainer.config": {"AlgoConfig": f"{CORE}.VerlAlgoConfig"},
    "verl.trainer.ppo.core_algos": {
        name: f"{CORE}.{name}"
        for name in (
            *("register_policy_loss", "register_adv_est", "agg_loss", "AdvantageEstimator", "kl_penalty"),
            *("compute_policy_loss_vanilla", "compute_grpo_outcome_advantage"),
        )
    },
    "verl.trainer.ppo.reward_score.base": {"RewardManager": "rally.rewards.custom_functions.RewardManager"},
    SCORES: dict.fromkeys(("default_compute_score", "_default_compute_score"), f"{FUNCTIONS}.default_compute_score"),
    f"{SCORES}.gsm8k": {
        "compute_score": f"{FUNCTIONS}.gsm8k",
        "extract_solution": "rally.scoring.verl_scores.gsm8k_answer",
    },
    f"{SCORES}.math": {"compute_score": f"{FUNCTIONS}.math"} | BOXES,  # the name until verl 0.5
    f"{SCORES}.math_reward": {"compute_score": f"{FUNCTIONS}.math"} | BOXES,
    f"{SCORES}.math_batch": {"compute_score_batched": f"{FUNCTIONS}.math_batch"},
    f"{SCORES}.math_verify": {"compute_score": f"{FUNCTIONS}.math_verify"},
    f"{SCORES}.math_dapo": {
        "compute_score": f"{FUNCTIONS}.math_dapo",
        "last_boxed_only_string": f"{FUNCTIONS}.last_braced_box",
        "remove_boxed": f"{FUNCTIONS}.remove_braced_box",
        "normalize_final_answer": "rally.scoring.verl_scores.minerva_form",
    },
    f"{SCORES}.geo3k": {
        "compute_score": f"{FUNCTIONS}.geo3k",
        "acc_reward": f"{FUNCTIONS}.geo3k_accuracy",
        "format_reward": f"{FUNCTIONS}.geo3k_format",
    },
    f"{SCORES}.prime_code": {"compute_score": f"{COMPAT}.code_scores.prime_code"},
    f"{SCORES}.prime_code.testing_util": {"run_test": f"{COMPAT}.code_scores.run_test"},
    f"{SCORES}.sandbox_fusion": {"compute_score": f"{COMPAT}.code_scores.sandbox_fusion"},
    f"{SCORES}.sandbox_fusion.utils": {"check_correctness": f"{COMPAT}.code_scores.check_correctness"},
    f"{SCORES}.search_r1_like_qa_em": {
        "compute_score": f"{FUNCTIONS}.search_r1",
        "compute_score_subem": f"{FUNCTIONS}.search_r1_contains",
        "extract_solution": "rally.scoring.answer_extraction.last_tagged",
    },
    "verl.utils.dataset": ROWS,
    "verl.utils.dataset.rl_dataset": ROWS,
    "verl.utils": GROUPS,
    "verl.utils.groupwise": GROUPS,
    "verl.utils.torch_functional": {
        "postprocess_data": f"{COMPAT}.helpers.tokenized_here",
        **{name: f"{CORE}.{name}" for name in MASKED},
    },
    "verl.utils.model": {"compute_position_id_with_mask": f"{COMPAT}.helpers.tokenized_here"},
    "verl.utils.fs": {"copy_to_local": f"{COMPAT}.helpers.copy_to_local"},
    "verl.utils.hdfs_io": {"copy": f"{COMPAT}.helpers.no_hdfs", "makedirs": f"{COMPAT}.helpers.no_hdfs"},
    "verl.utils.import_utils": {"deprecated": f"{COMPAT}.helpers.deprecated"},
    "verl.utils.ray_utils": {"get_event_loop": f"{COMPAT}.helpers.get_event_loop"},
    "verl.utils.profiler": {"simple_timer": f"{COMPAT}.agent_loops.simple_timer"},
    "verl.utils.rollout_trace": {"rollout_trace_op": f"{COMPAT}.agent_loops.rollout_trace_op"},
}
"""For each module, its names and the dotted paths of their counterparts, which are imported on access."""

PACKAGES = {".".join(name.split(".")[:depth]) for name in NAMES for depth in range(1, name.count(".") + 2)}


class VerlNameFinder(MetaPathFinder, Loader):
    """Finds the modules of the table. An installed verl takes precedence; a checkout in the working directory, where
    the examples of verl are started, does not."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = fullname.split(".")[0]
        if root != "verl" or not (self._is_absent() if fullname == root else self._is_own(root)):
            return None
        if fullname not in PACKAGES:
            raise ModuleNotFoundError(f"Rally has no counterpart of {fullname}", name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def _is_own(self, root: str) -> bool:
        spec = getattr(sys.modules.get(root), "__spec__", None)
        return spec is not None and spec.loader is self

    @staticmethod
    def _is_absent() -> bool:
        here = Path.cwd()
        elsewhere = [entry for entry in sys.path if Path(entry or here).resolve() != here]
        spec = PathFinder.find_spec("verl", elsewhere)
        return spec is None or spec.origin is None  # None for a folder without __init__.py

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
        sys.meta_path.insert(0, VerlNameFinder())
