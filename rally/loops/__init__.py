"""Agent loops, which play episodes. Every Task becomes exactly one Episode with exactly one StopReason."""

from rally.loops.base import AgentLoopBase, AgentLoopOutput, EpisodeServer, LoopContext, LoopError, LoopSettings
from rally.loops.env_agent import EnvAgentLoop
from rally.loops.registry import LoopSpec, find_loop, load_loop_config, register
from rally.loops.runner import Admit, Finish, Job, Runner, codec_for
from rally.loops.single_turn import SingleTurnAgentLoop
from rally.loops.tool_agent import ToolAgentLoop

__all__ = [
    "Admit",
    "AgentLoopBase",
    "AgentLoopOutput",
    "EnvAgentLoop",
    "EpisodeServer",
    "Finish",
    "Job",
    "LoopContext",
    "LoopError",
    "LoopSettings",
    "LoopSpec",
    "Runner",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "codec_for",
    "find_loop",
    "load_loop_config",
    "register",
]
