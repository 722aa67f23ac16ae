"""Defines `BaseInteraction`, the base class of simulated users: a name and four methods.

One object serves all episodes. It keeps the state of an episode under an instance id, from `start_interaction` to
`finalize_interaction`. Methods may be plain or `async`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from rally.types import Message, RallyError


class InteractionError(RallyError):
    """A simulated user is configured wrongly, failed, or did not answer in time."""


class BaseInteraction:
    """A simulated user. A subclass defines `generate_response`."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.name = str(self.config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start an episode. The row's interaction_kwargs are passed as keywords. Returns the instance id to use."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the policy's last turn. Returns (whether the episode ends, text, score of the turn, info to keep)."""
        raise NotImplementedError(f"{type(self).__name__} must define generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """The score of the whole episode, called once at its end; None when this user gives none."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release what `start_interaction` opened, also if it failed half way."""
