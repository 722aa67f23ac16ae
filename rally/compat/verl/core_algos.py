"""Policy losses and advantage estimators written for verl, and what their files import from its `core_algos`.

They work on padded matrices with one row per sequence and columns for its sampled tokens: tokens of tools, which verl
keeps with mask 0, are not there. A policy loss must return what `agg_loss` returned, whose argument is the loss of each
token: the mean is taken over the whole mini-batch, not over the micro-batch that the function sees.

Shapes: R rows of at most L sampled tokens, M sampled tokens in all; N episodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from rally.algos import advantages, credit_assignment, losses
from rally.algos.credit_assignment import CreditSettings, EstimatorError, Scored, token_rewards
from rally.algos.losses import PolicyLoss, PolicyLossError, Sampled, SurrogateSettings, kl_estimate
from rally.compat.verl.config_for_loops import as_written

F = TypeVar("F", bound=Callable[..., Any])
AdvantageEstimator = StrEnum(  # type: ignore[misc]
    "AdvantageEstimator", {name.upper(): name for name in sorted(credit_assignment.BUILT_IN)}
)


class VerlActorConfig(DictConfig):
    """The keys of `actor_rollout_ref.actor`, as a loss reads them."""


class VerlAlgoConfig(DictConfig):
    """The keys of `algorithm`, as an estimator reads them. A loss that gets them is refused by verl's own ones."""


class Aggregated(NamedTuple):
    """A call of `agg_loss`: its result and arguments."""

    result: Tensor
    loss_RL: Tensor
    mask_RL: Tensor
    mode: str


_aggregated: ContextVar[list[Aggregated] | None] = ContextVar("aggregated", default=None)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """The mean of token losses. What a policy loss returns is not used: its tokens have the weights of the update."""
    tokens_R = loss_mask.sum(-1)
    rows = (tokens_R > 0).sum() if global_batch_size is None else global_batch_size
    sums_R = torch.where(loss_mask.bool(), loss_mat * loss_mask, torch.zeros_like(loss_mat)).sum(-1)
    if loss_agg_mode == "token-mean":
        loss = sums_R.sum() / (tokens_R.sum() if batch_num_tokens is None else batch_num_tokens) * dp_size
    elif loss_agg_mode == "seq-mean-token-sum":
        loss = sums_R.sum() / rows * dp_size
    elif loss_agg_mode == "seq-mean-token-mean":
        loss = (sums_R / (tokens_R + 1e-8)).sum() / rows * dp_size
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        loss = sums_R.sum() / (loss_scale_factor or loss_mask.shape[-1])
    else:
        raise ValueError(f"unknown loss_agg_mode {loss_agg_mode!r}")
    if (calls := _aggregated.get()) is not None:
        calls.append(Aggregated(loss, loss_mat, loss_mask, loss_agg_mode))
    return loss


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Decorator: `actor.policy_loss.loss_mode=name` trains with this function, written for verl."""

    def add(function: F) -> F:
        def loss(tokens: Sampled, settings: SurrogateSettings, **kwargs: Any) -> PolicyLoss:
            return _padded_loss(name, function, tokens, settings, kwargs)

        losses.register_policy_loss(str(name))(loss)
        return function

    return add


def register_adv_est(name_or_enum: str) -> Callable[[F], F]:
    """Decorator: `algorithm.adv_estimator=name` uses this function, written for verl."""
    name = str(getattr(name_or_enum, "value", name_or_enum))

    def add(function: F) -> F:
        def estimator(scored: Scored, settings: CreditSettings, **kwargs: Any) -> Tensor:
            return _padded_advantages(name, function, scored, settings, kwargs)

        credit_assignment.register_token_estimator(name)(estimator)
        return function

    return add


def _padded_loss(
    name: str, function: Callable[..., Any], tokens: Sampled, settings: SurrogateSettings, kwargs: Mapping[str, Any]
) -> PolicyLoss:
    places = _places(torch.bincount(tokens.row_M, minlength=tokens.rows), tokens.row_M)
    old_RL, logp_RL, advantages_RL, mask_RL = (
        _padded(values_M, places, tokens.rows)
        for values_M in (tokens.old_logp_M, tokens.logp_M, tokens.advantages_M, torch.ones_like(tokens.logp_M))
    )
    keys = {**settings.keys, "policy_loss": {**settings.keys["policy_loss"], **kwargs}, "global_batch_info": {}}
    given = {
        "old_log_prob": old_RL,
        "log_prob": logp_RL,
        "advantages": advantages_RL,
        "response_mask": mask_RL,
        "loss_agg_mode": settings.keys["loss_agg_mode"],
        "config": VerlActorConfig(as_written(keys)),
        "rollout_is_weights": None,  # they multiply the loss of each token afterwards
        "rollout_log_probs": None,
    }
    problem = f"the policy loss {name}"
    with _recording() as calls:
        returned = function(**_accepted(function, given, problem, PolicyLossError))
    loss, *others = returned if isinstance(returned, tuple) else (returned,)
    made = next((call for call in calls if call.result is loss), None)
    if made is None:
        raise PolicyLossError(f"{problem} must return what agg_loss(loss of each token, ...) returned, unchanged")
    if made.mode != given["loss_agg_mode"]:
        raise PolicyLossError(f"{problem} averages by {made.mode}; set actor_rollout_ref.actor.loss_agg_mode to it")
    if made.mode == "seq-mean-token-mean" and not torch.equal(made.mask_RL.to(mask_RL), mask_RL):
        raise PolicyLossError(f"{problem} changes the mask of agg_loss; multiply the loss of the tokens instead")
    nothing_M = torch.zeros_like(tokens.logp_M, dtype=torch.bool)
    values = {key: torch.full_like(tokens.old_logp_M, number) for key, number in _metrics(others, problem).items()}
    return PolicyLoss((made.loss_RL * made.mask_RL)[places], nothing_M, nothing_M, values)


def _metrics(others: list[Any], problem: str) -> dict[str, float]:
    """The numbers that a policy loss returned beside its loss. Rally computes actor/ppo_kl itself."""
    if len(others) == 1 and isinstance(others[0], Mapping):
        named = others[0]
    else:  # until verl 0.6
        named = dict(zip(("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"), others, strict=False))
    try:
        numbers = {
            str(key).removeprefix("actor/"): float(value.detach() if isinstance(value, Tensor) else value)
            for key, value in named.items()
        }
    except (TypeError, ValueError):
        raise PolicyLossError(f"{problem} must return its metrics as a mapping from names to numbers") from None
    return {key: number for key, number in numbers.items() if key != "ppo_kl"}


def _padded_advantages(
    name: str, function: Callable[..., Any], scored: Scored, settings: CreditSettings, kwargs: Mapping[str, Any]
) -> Tensor:
    count = len(scored.tokens_N)
    episode_M = torch.arange(count).repeat_interleave(scored.tokens_N)
    places = _places(scored.tokens_N, episode_M)
    rewards_NL = _padded(token_rewards(scored, settings).float(), places, count)
    mask_NL = _padded(torch.ones(len(episode_M)), places, count)
    empty_N = scored.tokens_N == 0  # their reward counts in their group
    rewards_NL[empty_N, 0] = scored.rewards_N[empty_N].float()
    given = {
        "token_level_rewards": rewards_NL,
        "response_mask": mask_NL,
        "index": np.array([str(number) for number in scored.groups_N.tolist()], dtype=object),
        "config": VerlAlgoConfig(as_written({**settings.keys, **kwargs})),
        **({} if scored.baselines_N is None else {"reward_baselines": scored.baselines_N.float()}),
        **kwargs,
    }
    problem = f"the advantage estimator {name}"
    parameters = inspect.signature(function).parameters
    for key, value in {"gamma": settings.gamma, "lam": settings.lam}.items():
        if key in parameters and parameters[key].default is inspect.Parameter.empty:  # verl leaves a default as it is
            given.setdefault(key, value)
    returned = function(**_accepted(function, given, problem, EstimatorError))
    advantages_NL = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(advantages_NL, Tensor) or advantages_NL.shape != mask_NL.shape:
        raise EstimatorError(f"{problem} must return (advantages, returns), both of the shape of response_mask")
    return advantages_NL[places]


Places = tuple[Tensor, Tensor]


def _places(lengths_R: Tensor, row_M: Tensor) -> Places:
    """The row and the column of each token. The tokens of a row are in order, wherever they are."""
    order = torch.argsort(row_M, stable=True)
    column_M = torch.empty_like(row_M)
    starts_R = torch.cumsum(lengths_R, 0) - lengths_R
    column_M[order] = torch.arange(len(row_M), device=row_M.device) - starts_R[row_M[order]]
    return row_M, column_M


def _padded(values_M: Tensor, places: Places, rows: int) -> Tensor:
    length = int(places[1].max()) + 1 if len(values_M) else 1
    return values_M.new_zeros(rows, length).index_put(places, values_M)


@contextmanager
def _recording() -> Iterator[list[Aggregated]]:
    calls: list[Aggregated] = []
    token = _aggregated.set(calls)
    try:
        yield calls
    finally:
        _aggregated.reset(token)


def _accepted(
    function: Callable[..., Any], given: Mapping[str, Any], problem: str, error: type[Exception]
) -> dict[str, Any]:
    """The arguments that the function takes. `error` names those that it needs and does not get."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in given]
    if missing:
        raise error(f"{problem} needs {', '.join(missing)}, which Rally does not compute; give it a default")
    free = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {key: value for key, value in given.items() if free or key in named}


# What such files use from verl beside the registries.


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """An estimate of the KL divergence of each token."""
    return kl_estimate(logprob, ref_logprob, kl_penalty)


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped loss over padded matrices."""
    low, high = (
        config.clip_ratio if bound is None else bound for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    made = losses.clipped_policy_loss(
        log_prob, old_log_prob, advantages, low=low, high=high, dual=config.get("clip_ratio_c", 3.0)
    )
    loss_RL = made.loss_M if rollout_is_weights is None else made.loss_M * rollout_is_weights
    metrics = {
        "actor/pg_clipfrac": float(masked_mean(made.clipped_M.float(), response_mask)),
        "actor/pg_clipfrac_lower": float(masked_mean(made.clipped_lower_M.float(), response_mask)),
    }
    return agg_loss(loss_RL, response_mask, loss_agg_mode, **config.get("global_batch_info", {})), metrics


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """GRPO's advantages over padded matrices."""
    rewards_N, groups_N = token_level_rewards.sum(-1).cpu(), as_torch_index(index)
    advantages_N = advantages.grpo(rewards_N, groups_N, by_std=norm_adv_by_std_in_grpo, epsilon=epsilon)
    advantages_NL = advantages_N.to(response_mask.device)[:, None] * response_mask
    return advantages_NL, advantages_NL


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """The sum over an axis, or over all axes. What the mask hides may be NaN."""
    seen = torch.where(mask.bool(), values, torch.zeros_like(values)) * mask
    return seen.sum() if axis is None else seen.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    count = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    count = mask.sum()
    if unbiased and count <= 1:
        raise ValueError(f"the unbiased variance needs two values, and the mask has {int(count)}")
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values of variance 1, and of mean 0 with `shift_mean`."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


def as_torch_index(index: Any, device: Any = None) -> Tensor:
    """Group labels as numbers: whole numbers as they are, others by their order."""
    labels = np.asarray(index.cpu() if isinstance(index, Tensor) else index).reshape(-1)
    try:
        numbers = labels.astype(np.int64)
        exact = bool((numbers.astype(str) == labels.astype(str)).all()) or labels.dtype.kind in "iuf"
    except (TypeError, ValueError):
        exact = False
    if not exact:
        _, numbers = np.unique(labels.astype(str), return_inverse=True)
    return torch.as_tensor(np.ascontiguousarray(numbers, dtype=np.int64), device=device)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the unbiased standard deviation (of a variance of at least `eps`) and the size of each group; 0 and 1
    for a group of one."""
    scores, gidx = scores.reshape(-1).float().to(device), gidx.reshape(-1).to(device)
    groups = int(gidx.max()) + 1 if gidx.numel() else 0
    zeros_G = torch.zeros(groups, device=scores.device)
    count_G = zeros_G.index_add(0, gidx, torch.ones_like(scores))
    mean_G = zeros_G.index_add(0, gidx, scores) / count_G.clamp_min(1)
    squares_G = zeros_G.index_add(0, gidx, (scores - mean_G[gidx]) ** 2)
    std_G = (squares_G / (count_G - 1).clamp_min(1)).clamp_min(eps).sqrt()
    alone_G = count_G <= 1
    return mean_G.masked_fill(alone_G, 0.0), std_G.masked_fill(alone_G, 1.0), count_G
