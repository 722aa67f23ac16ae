"""Rows become Tasks, recipes write rows, and samplers are pure functions of (seed, step) and a state that is saved."""

from rally.data.curriculum import EasyToHard, EasyToHardOptions, SolvedSometimes, SolvedSometimesOptions
from rally.data.custom import load_custom_rows
from rally.data.read import DataError, RowSet
from rally.data.rows import TaskSet, load_tasks
from rally.data.sampler import batch_indices, episode_seed, steps_per_epoch, total_steps
from rally.data.samplers import (
    RowSampler,
    SamplerSettings,
    draw,
    draw_further,
    learned,
    load_sampler_class,
    restore,
)
from rally.data.sft import Conversation, QuestionAnswer, load_conversations
from rally.data.write import write_rows

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
