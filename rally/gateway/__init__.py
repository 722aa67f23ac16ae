"""An agent that asks OpenAI's chat endpoint, however it is written, becomes episodes that are exact to the token."""

from rally.gateway.agent_runner import AgentClient
from rally.gateway.black_box import BlackBoxAgentLoop

__all__ = ["AgentClient", "BlackBoxAgentLoop"]
