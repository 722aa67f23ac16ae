"""Simulated users: how they are written, loaded from YAML, and called within their deadlines."""

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
