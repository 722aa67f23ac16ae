"""Aliases of keys. An alias sets its key; if both are set, they must agree.

The default of an alias is None, which means that it was not set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
Pairs = Sequence[tuple[str, str]]

SAME_AS: Pairs = (
    (f"{R}.prompt_length", "data.max_prompt_length"),
    (f"{R}.response_length", "data.max_response_length"),
    (f"{R}.dtype", "actor_rollout_ref.model.dtype"),
    (f"{R}.log_prob_micro_batch_size", f"{R}.log_prob_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
    (f"{A}.ppo_micro_batch_size", f"{A}.ppo_micro_batch_size_per_gpu"),
    (f"{A}.optim.warmup_style", f"{A}.optim.lr_scheduler_type"),
    (f"{A}.optim.clip_grad", f"{A}.grad_clip"),
    ("critic.optim.warmup_style", "critic.optim.lr_scheduler_type"),
    ("critic.optim.clip_grad", "critic.grad_clip"),
    ("reward_model.num_workers", "reward.num_workers"),
    ("reward_model.micro_batch_size", "reward_model.micro_batch_size_per_gpu"),
)
"""Pairs of an alias and its key."""
SFT_SAME_AS: Pairs = (
    ("data.micro_batch_size", "data.micro_batch_size_per_gpu"),
    ("optim.warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
)


def resolve_aliases(tree: dict[str, Any], pairs: Pairs) -> dict[str, Any]:
    """The tree with the key of every alias set, unless the key was set itself."""
    for alias, key in pairs:
        value = _at(tree, alias)
        if value is not None and _at(tree, key) is None:
            tree = _put(tree, key.split("."), value)
    return tree


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _put(tree: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    below = tree.get(head)
    return {**tree, head: _put(below if isinstance(below, dict) else {}, rest, value) if rest else value}
