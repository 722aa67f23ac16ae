"""Trains agents over OpenAI's or Anthropic's API: an HTTP gateway records their completions as token-exact episodes."""

from rally.gateway.agent_runner import AgentClient
from rally.gateway.black_box_loop import BlackBoxAgentLoop

__all__ = ["AgentClient", "BlackBoxAgentLoop"]
