"""Policy losses by name, KL estimates and loss aggregation. Pure tensor functions.

Each objective maps log-probabilities and advantages to one loss per sampled token. A sequence is one row: the sampled
tokens of one segment. No objective depends on how rows are grouped into micro-batches. To add an objective, write a
function and register it with `register_policy_loss`, here or in a module of yours (docs/methods.md).

Shapes: M sampled tokens of R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from rally.platforms import fork_rng
from rally.types import RallyError

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class PolicyLoss(NamedTuple):
    """The loss of each token, and which tokens are clipped. The mean of each of `values`, one number per token, becomes
    the metric actor/<name>."""

    loss_M: Tensor
    clipped_M: Tensor
    clipped_lower_M: Tensor
    values: Mapping[str, Tensor] = MappingProxyType({})


class PolicyLossError(RallyError):
    """A registered policy loss that cannot be trained with."""


def clipped_policy_loss(
    logp_M: Tensor, old_logp_M: Tensor, advantages_M: Tensor, *, low: float, high: float, dual: float = 3.0
) -> PolicyLoss:
    """PPO's clipped objective with separate low and high clip and the dual clip for negative advantages."""
    ratio = torch.exp((logp_M - old_logp_M).clamp(-20, 20))
    free = -advantages_M * ratio
    clipped = -advantages_M * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(free, clipped)
    bounded = torch.minimum(pessimistic, -advantages_M * dual)
    negative = advantages_M < 0
    loss = torch.where(negative, bounded, pessimistic)
    return PolicyLoss(loss, clipped > free, negative & (pessimistic > -advantages_M * dual))


def kl_estimate(logp_M: Tensor, reference_logp_M: Tensor, kind: str = "low_var_kl") -> Tensor:
    """A per-token estimate of KL(policy || reference). `kind` is k1, k2, k3 or one of verl's names for them."""
    if kind.endswith("+"):  # the value of the estimator with the unbiased gradient of k2
        value, smooth = (kl_estimate(logp_M, reference_logp_M, k) for k in (kind[:-1], "k2"))
        return smooth + (value - smooth).detach()
    difference = logp_M - reference_logp_M
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference**2
    if kind in ("low_var_kl", "k3"):
        negative = (-difference).clamp(-20, 20)
        return (negative.exp() - negative - 1).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}; use k1, k2, k3, abs, kl, mse or low_var_kl, or one with +")


def token_weights(tokens_E: Tensor, mode: Aggregation, scale: float | None = None) -> Tensor:
    """The weight of a token of each episode, such that the loss of the batch is sum(weight * token loss).

    The weights are computed once for a mini-batch, so splitting it into micro-batches does not change the loss.
    """
    episodes = tokens_E.numel()
    tokens = tokens_E.double()
    if mode == "token-mean":
        weights = torch.full_like(tokens, 1.0) / tokens.sum().clamp(min=1)
    elif mode == "seq-mean-token-sum":
        weights = torch.full_like(tokens, 1.0 / episodes)
    elif mode == "seq-mean-token-mean":
        weights = 1.0 / (episodes * tokens.clamp(min=1))
    elif mode == "seq-mean-token-sum-norm":
        assert scale, "seq-mean-token-sum-norm needs a scale"
        weights = torch.full_like(tokens, 1.0 / (episodes * scale))
    else:
        raise ValueError(f"unknown loss_agg_mode {mode!r}")
    return weights.float()


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings:
    """The objective and its parameters."""

    mode: str = "vanilla"
    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0
    tau_positive: float = 1.0  # sapo
    tau_negative: float = 1.05
    marked_share: float = 2e-4  # clip_cov and kl_cov: the share of marked tokens
    covariance_low: float = 1.0  # clip_cov: bounds of the covariance of marked tokens
    covariance_high: float = 5.0
    marked_kl: float = 0.1  # kl_cov: weight of the KL on marked tokens
    dro_beta: float = 0.1  # dro: weight of the squared log-ratio
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of a registered loss
    keys: Mapping[str, Any] = field(default_factory=dict)  # the section `actor`, for a loss written for verl

    @property
    def marks_tokens(self) -> bool:
        return self.mode in ("clip_cov", "kl_cov")

    @property
    def needs_every_row(self) -> bool:
        """Whether rows whose advantages are all 0 may have a gradient."""
        return self.mode in ("kl_cov", "dro") or self.mode not in BUILT_IN


class Sampled(NamedTuple):
    """The sampled tokens of a micro-batch. `marked_M` are those that `mark_tokens` selected in the mini-batch."""

    logp_M: Tensor
    old_logp_M: Tensor
    advantages_M: Tensor
    row_M: Tensor
    rows: int
    marked_M: Tensor | None = None

    @property
    def log_ratio_M(self) -> Tensor:
        return (self.logp_M - self.old_logp_M).clamp(-20, 20)


def row_mean(values_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    """Per token: the mean over the sampled tokens of its row."""
    sums = torch.zeros(rows, dtype=values_M.dtype, device=values_M.device).index_add(0, row_M, values_M)
    sizes = torch.zeros_like(sums).index_add(0, row_M, torch.ones_like(values_M))
    return (sums / sizes.clamp(min=1))[row_M]


def vanilla(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """PPO's clip, with the dual clip."""
    return clipped_policy_loss(
        tokens.logp_M,
        tokens.old_logp_M,
        tokens.advantages_M,
        low=settings.low,
        high=settings.high,
        dual=settings.dual,
    )


def gspo(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """GSPO: the ratio of a token is the geometric mean over its row; its gradient is that of its own log-prob."""
    sequence_M = row_mean(tokens.log_ratio_M.detach(), tokens.row_M, tokens.rows)
    ratio = torch.exp(sequence_M + tokens.logp_M - tokens.logp_M.detach())
    free = -tokens.advantages_M * ratio
    held = -tokens.advantages_M * ratio.clamp(1 - settings.low, 1 + settings.high)
    return PolicyLoss(torch.maximum(free, held), held > free, torch.zeros_like(held, dtype=torch.bool))


def geo_mean(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """GMPO: one ratio per row, the geometric mean of the token ratios, each clipped to [exp(-low), exp(high)]."""
    sign = tokens.advantages_M.sign()
    free = tokens.log_ratio_M
    held = free.clamp(-settings.low, settings.high)
    pessimistic = sign * torch.minimum(sign * free, sign * held)
    ratio = torch.exp(row_mean(pessimistic, tokens.row_M, tokens.rows))
    advantage = row_mean(tokens.advantages_M, tokens.row_M, tokens.rows)
    return PolicyLoss(-advantage * ratio, sign * held < sign * free, torch.zeros_like(sign, dtype=torch.bool))


def cispo(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """CISPO: REINFORCE weighted by a clipped ratio. Gradients are bounded and never dropped."""
    ratio = torch.exp(tokens.log_ratio_M.detach())
    held = ratio.clamp(1 - settings.low, 1 + settings.high)
    loss = -held * tokens.advantages_M * tokens.logp_M
    return PolicyLoss(loss, held != ratio, torch.zeros_like(ratio, dtype=torch.bool))


def sapo(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """SAPO: a soft gate instead of the clip, 4/tau * sigmoid(tau * (ratio - 1)), with a tau for each sign."""
    advantages = tokens.advantages_M
    tau = torch.full_like(advantages, settings.tau_negative).masked_fill(advantages > 0, settings.tau_positive)
    gate = torch.sigmoid(tau * (torch.exp(tokens.log_ratio_M) - 1)) * 4 / tau
    nothing = torch.zeros_like(gate, dtype=torch.bool)
    return PolicyLoss(-advantages * gate, nothing, nothing)


def gpg(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """GPG: the plain policy gradient, without a ratio."""
    nothing = torch.zeros_like(tokens.logp_M, dtype=torch.bool)
    return PolicyLoss(-tokens.advantages_M * tokens.logp_M, nothing, nothing)


def dppo_tv(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """DPPO with the total variation of a token: no gradient once its probability has moved by more than the clip range
    in the direction of its advantage."""
    moved_M = (tokens.logp_M.exp() - tokens.old_logp_M.exp()).detach()
    kept_M = torch.where(tokens.advantages_M > 0, moved_M <= settings.high, moved_M >= -settings.low)
    return _within_divergence(tokens, kept_M, settings)


def dppo_kl(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """DPPO with the KL divergence of two outcomes, this token or another: no gradient once it is over the clip range
    and the probability has moved in the direction of the advantage."""
    logp_M = tokens.logp_M.detach()
    p_M, old_M = logp_M.exp(), tokens.old_logp_M.exp()
    others_M = ((1 - old_M + 1e-8) / (1 - p_M + 1e-8)).log()
    kl_M = old_M * (tokens.old_logp_M - logp_M) + (1 - old_M) * others_M
    kept_M = torch.where(
        tokens.advantages_M > 0,
        (kl_M <= settings.high) | (p_M <= old_M),
        (kl_M <= settings.low) | (p_M >= old_M),
    )
    return _within_divergence(tokens, kept_M, settings)


def _within_divergence(tokens: Sampled, kept_M: Tensor, settings: SurrogateSettings) -> PolicyLoss:
    """REINFORCE weighted by the ratio, of at most `settings.dual`, for the tokens that are kept."""
    ratio_M = tokens.log_ratio_M.detach().exp()
    loss_M = -tokens.advantages_M * ratio_M.clamp(max=settings.dual) * tokens.logp_M * kept_M
    return PolicyLoss(loss_M, ~kept_M, (ratio_M > settings.dual) & kept_M)


def dro(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """DRO: the policy gradient with a penalty on the squared log-ratio, instead of a clip."""
    moved_M = tokens.logp_M - tokens.old_logp_M
    loss_M = -tokens.advantages_M * tokens.logp_M + 0.5 * settings.dro_beta * moved_M**2
    nothing = torch.zeros_like(loss_M, dtype=torch.bool)
    return PolicyLoss(loss_M, nothing, nothing)


def clip_cov(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """Clip-Cov: vanilla, but marked tokens, whose training would reduce entropy most, get no gradient."""
    assert tokens.marked_M is not None
    loss = vanilla(tokens, settings)
    return loss._replace(
        loss_M=loss.loss_M.masked_fill(tokens.marked_M, 0.0), clipped_M=loss.clipped_M | tokens.marked_M
    )


def kl_cov(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """KL-Cov: no clip; marked tokens get a penalty on the distance from the old policy."""
    assert tokens.marked_M is not None
    moved = tokens.log_ratio_M
    loss = -tokens.advantages_M * torch.exp(moved) + settings.marked_kl * moved.abs() * tokens.marked_M
    return PolicyLoss(loss, tokens.marked_M, torch.zeros_like(tokens.marked_M))


def mark_tokens(logp_M: Tensor, advantages_M: Tensor, settings: SurrogateSettings) -> Tensor:
    """The tokens of a mini-batch that clip_cov or kl_cov marks, by the covariance of advantage and log-probability.

    kl_cov takes the largest; clip_cov draws among those within its bounds, with torch's global generator.
    """
    covariance = (advantages_M - advantages_M.mean()) * (logp_M - logp_M.mean())
    count = min(covariance.numel(), max(1, int(settings.marked_share * covariance.numel())))
    marked = torch.zeros_like(covariance, dtype=torch.bool)
    if settings.mode == "kl_cov":
        marked[covariance.topk(count).indices] = True
        return marked
    inside = ((covariance > settings.covariance_low) & (covariance < settings.covariance_high)).nonzero()[:, 0]
    drawn = torch.randperm(inside.numel())[:count]
    marked[inside[drawn]] = True
    return marked


Surrogate = Callable[..., "PolicyLoss | Tensor"]
"""(tokens, settings, **kwargs) -> the loss of each token, alone or as a PolicyLoss."""

SURROGATES: dict[str, Surrogate] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "gmpo": geo_mean,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
BUILT_IN = frozenset(SURROGATES)
F = TypeVar("F", bound=Surrogate)


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Decorator: `actor.policy_loss.loss_mode=name` trains with this function."""

    def add(function: F) -> F:
        if name in BUILT_IN:
            raise PolicyLossError(f"{name} is a policy loss of Rally; register yours under another name")
        SURROGATES[name] = function
        return function

    return add


def policy_loss(tokens: Sampled, settings: SurrogateSettings) -> PolicyLoss:
    """The loss of each token under the objective `settings.mode`."""
    made = SURROGATES[settings.mode](tokens, settings, **settings.kwargs)
    if isinstance(made, Tensor):
        nothing = torch.zeros_like(tokens.logp_M, dtype=torch.bool)
        made = PolicyLoss(made, nothing, nothing)
    if not isinstance(made, PolicyLoss):
        kind = type(made).__name__
        raise PolicyLossError(f"the policy loss {settings.mode} returns a {kind}; return one tensor or a PolicyLoss")
    return made


def check_policy_loss(settings: SurrogateSettings, device: torch.device | None = None) -> None:
    """Raise PolicyLossError unless a registered loss gives every token one finite number with a finite gradient, and
    a row the same numbers alone and beside other rows. It is tried on eight made-up tokens of three rows on the
    device, which is the CPU by default."""
    if settings.mode in BUILT_IN:
        return
    with fork_rng(device or torch.device("cpu")):
        _check(settings, device)


def _check(settings: SurrogateSettings, device: torch.device | None) -> None:
    problem = f"the policy loss {settings.mode}"
    tries = []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        tries.append(_tried(settings, [0, 1, 2], device))
    together = tries[0]
    if not all(_close(together, one) for one in tries):
        raise PolicyLossError(
            f"{problem} gives the same tokens other numbers each time, so they would depend on the division into "
            "micro-batches; use no random numbers"
        )
    if not together.gradient_M.any():
        raise PolicyLossError(f"{problem} has a gradient of 0 at each made-up token; correct the function")
    for row in (0, 1, 2):
        here = _Trial(together.loss_M[_row_M == row], together.gradient_M[_row_M == row])
        alone = _tried(settings, [row], device)
        if alone.names != together.names:  # a mean over the mini-batch counts all its tokens
            other = ", ".join(sorted(alone.names ^ together.names))
            raise PolicyLossError(f"{problem} gives {other} for some tokens only; give each value every time")
        if not _close(here, alone):
            raise PolicyLossError(
                f"{problem} gives a row other numbers beside other rows than alone, so they would depend on the "
                "division into micro-batches; compute them from each row by itself"
            )


DRAWS = 3
# Likely and unlikely tokens with large and small advantages, so that thresholds of a loss are crossed.
_row_M = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
_old_M = torch.tensor([-0.01, -6.0, -1.0, -3.0, -0.5, -9.0, -2.0, -0.1])
_moved_M = torch.tensor([-0.2, 0.5, 0.02, -0.4, 0.1, 0.3, -0.05, 0.0])
_advantages_M = torch.tensor([2.0, 2.0, 2.0, -1.5, 0.25, 0.25, 0.25, 0.25])


class _Trial(NamedTuple):
    loss_M: Tensor
    gradient_M: Tensor
    names: frozenset[str] = frozenset()  # of its values


def _close(one: _Trial, other: _Trial) -> bool:
    return all(torch.allclose(a_M, b_M, rtol=1e-4, atol=1e-6) for a_M, b_M in zip(one[:2], other[:2], strict=True))


def _tried(settings: SurrogateSettings, rows: list[int], device: torch.device | None) -> _Trial:
    """A registered loss and its gradient, for some of the made-up rows in one micro-batch."""
    problem = f"the policy loss {settings.mode}"
    in_M = torch.isin(_row_M, torch.tensor(rows))
    given = [one[in_M].to(device) for one in (_old_M + _moved_M, _old_M, _advantages_M, _row_M - rows[0])]
    logp_M, old_M, advantages_M, row_M = (one.clone() for one in given)
    tokens = Sampled(logp_M.requires_grad_(), old_M, advantages_M, row_M, len(rows))
    try:
        made = policy_loss(tokens, settings)
    except RallyError:
        raise
    except Exception as error:  # the function is the user's
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PolicyLossError(f"{problem} fails on made-up tokens: {reason}; correct the function") from error
    if not all(torch.equal(one, other) for one, other in zip(given, tokens[:4], strict=True)):
        raise PolicyLossError(f"{problem} changes the tensors that it gets; work on copies")
    clipped = {"clipped_M": made.clipped_M, "clipped_lower_M": made.clipped_lower_M}
    for name, value_M in {"the loss": made.loss_M, **clipped, **made.values}.items():
        if not isinstance(value_M, Tensor) or value_M.shape != logp_M.shape:
            found = list(value_M.shape) if isinstance(value_M, Tensor) else type(value_M).__name__
            raise PolicyLossError(f"{problem} gives {name} as {found} for {len(logp_M)} tokens; give each one a number")
    if taken := {"entropy", "ppo_kl", "kl_loss"} & set(made.values):
        raise PolicyLossError(f"{problem} reports {min(taken)}, a metric of Rally's own; give it another name")
    gradient_M = None
    if made.loss_M.requires_grad:
        [gradient_M] = torch.autograd.grad(made.loss_M.sum(), logp_M, allow_unused=True)
    if gradient_M is None:
        raise PolicyLossError(f"{problem} does not depend on tokens.logp_M, so nothing would be trained; use it")
    if not (made.loss_M.isfinite().all() and gradient_M.isfinite().all()):
        raise PolicyLossError(f"{problem} or its gradient is not finite on made-up tokens; correct the function")
    return _Trial(made.loss_M.detach().cpu(), gradient_M.cpu(), frozenset(made.values))
