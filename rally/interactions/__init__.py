"""Guarantees: a simulated user answers within its deadline or fails by name, and is always told that it is over."""

from rally.interactions.base import BaseInteraction, InteractionError
from rally.interactions.gsm8k import Gsm8kInteraction
from rally.interactions.loader import load_interactions
from rally.interactions.session import Closing, Interactions, InteractionSession, UserReply

__all__ = [
    "BaseInteraction",
    "Closing",
    "Gsm8kInteraction",
    "InteractionError",
    "InteractionSession",
    "Interactions",
    "UserReply",
    "load_interactions",
]
