"""Rows become Tasks, recipes write rows, and the sampler is a pure function of (seed, step)."""

from rally.data.read import DataError, RowSet
from rally.data.rows import TaskSet, load_tasks
from rally.data.sampler import batch_indices, episode_seed, steps_per_epoch, total_steps
from rally.data.sft import Conversation, load_conversations
from rally.data.write import write_rows

__all__ = [
    "Conversation",
    "DataError",
    "RowSet",
    "TaskSet",
    "batch_indices",
    "episode_seed",
    "load_conversations",
    "load_tasks",
    "steps_per_epoch",
    "total_steps",
    "write_rows",
]
