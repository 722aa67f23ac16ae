"""Data: reads rows as Tasks or Conversations, writes rows, and samples the rows of each step."""

from rally.data.conversations import Conversation, QuestionAnswer, load_conversations
from rally.data.curriculum import EasyToHard, EasyToHardOptions, SolvedSometimes, SolvedSometimesOptions
from rally.data.row_files import DataError, RowSet, write_rows
from rally.data.samplers import (
    RowSampler,
    SamplerSettings,
    batch_indices,
    draw,
    draw_further,
    episode_seed,
    learned,
    load_sampler_class,
    restore,
    steps_per_epoch,
    total_steps,
)
from rally.data.tasks import TaskSet, load_custom_rows, load_tasks

__all__ = [
    "Conversation",
    "DataError",
    "EasyToHard",
    "EasyToHardOptions",
    "QuestionAnswer",
    "RowSampler",
    "RowSet",
    "SamplerSettings",
    "SolvedSometimes",
    "SolvedSometimesOptions",
    "TaskSet",
    "batch_indices",
    "draw",
    "draw_further",
    "episode_seed",
    "learned",
    "load_conversations",
    "load_custom_rows",
    "load_sampler_class",
    "load_tasks",
    "restore",
    "steps_per_epoch",
    "total_steps",
    "write_rows",
]
