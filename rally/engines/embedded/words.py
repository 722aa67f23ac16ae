"""A sentence about a setting names it as its user wrote it: a key of a run, or an option of a command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a user calls what he can change; the defaults are the keys of a training run."""

    max_model_len: str = "rollout.max_model_len"
    lengths: str = "data.max_prompt_length, data.max_response_length or rollout.max_model_len"
    """What makes histories shorter."""
    memory: str = "rollout.gpu_memory_utilization"
    plain: str = "rollout.attention_backend=gather"
    """What makes attention run in plain torch."""
