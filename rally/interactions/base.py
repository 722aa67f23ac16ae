"""Guarantees: a class derived from BaseInteraction is a simulated user: a name, and four methods over one exchange.

One object serves every episode; what belongs to an episode is kept under its instance id, from `start_interaction` to
`finalize_interaction`. Methods may be plain or `async`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from rally.types import Message, RallyError


class InteractionError(RallyError):
    """A simulated user that is set up wrongly or did not answer, in one sentence."""


class BaseInteraction:
    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.name = str(self.config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Open an episode's exchange; the row's interaction_kwargs arrive one by one. Returns the id to use."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the policy's last turn: (whether the exchange is over, text, the turn's score, anything to keep)."""
        raise NotImplementedError(f"{type(self).__name__} must define generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """What the whole exchange earned, asked once at its end; None when this user does not score."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of what `start_interaction` opened, or had begun to open when it failed."""
