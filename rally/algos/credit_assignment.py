"""Credit assignment: turns the rewards of a batch of episodes into one advantage per sampled token.

Pure tensor functions. The samples to compare and the estimator are chosen independently: the samples may be episodes,
all turns of a group, turns with the same number, or turns in the same state, and any group-relative estimator applies.
`register_adv_estimator` and `register_token_estimator` add estimators of a user's module (docs/methods.md).

Shapes: N episodes, K assistant turns of all of them in order, M sampled tokens in the same order, C components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from rally.algos.advantages import ESTIMATORS, Estimator, discounted, group_sum, grpo, optimal_token_baseline, whiten
from rally.types import RallyError

TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
BUILT_IN = frozenset(
    (*ESTIMATORS, *TOKEN_BASELINES, "reinforce_plus_plus", "remax", "gdpo", "gigpo", "gae", "turn_gae")
)
TurnRewards = Literal["trajectory", "returns", "turn_baseline"]


@dataclass(frozen=True, kw_only=True)
class CreditSettings:
    """The estimator, and whether turns have their own rewards."""

    estimator: str = "grpo"
    by_std: bool = True
    turn_rewards: TurnRewards = "trajectory"
    gamma: float = 1.0
    lam: float = 1.0
    step_weight: float = 1.0  # weight of GiGPO's step advantage, added to that of the episode
    components: tuple[str, ...] = ()  # of the reward, which GDPO normalizes separately
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of a registered estimator
    keys: Mapping[str, Any] = field(default_factory=dict)  # the section `algorithm`, for an estimator written for verl

    @property
    def needs_greedy(self) -> bool:
        return self.estimator == "remax"

    @property
    def needs_energies(self) -> bool:
        return self.estimator in TOKEN_BASELINES

    @property
    def needs_turns(self) -> bool:
        return self.turn_rewards != "trajectory" or self.estimator in ("gigpo", "turn_gae")


class Turns(NamedTuple):
    """Every assistant turn: its episode, number of sampled tokens, reward, and a number for the state it answered."""

    episode_K: Tensor
    tokens_K: Tensor
    rewards_K: Tensor
    states_K: Tensor

    @property
    def number_K(self) -> Tensor:
        """0 for the first turn of an episode, 1 for the second."""
        earlier = torch.cumsum(torch.ones_like(self.episode_K), 0) - 1
        return earlier - torch.searchsorted(self.episode_K, self.episode_K)


class Scored(NamedTuple):
    """A batch of scored episodes: the reward of each episode, rewards of tokens (a KL penalty), the reward of a greedy
    episode on the same prompt (ReMax), the components of the reward (GDPO), and the energies of tokens, 1 - 2 p +
    sum(p^2) over the vocabulary (optimal token baseline)."""

    rewards_N: Tensor
    groups_N: Tensor
    tokens_N: Tensor
    token_rewards_M: Tensor | None = None
    turns: Turns | None = None
    baselines_N: Tensor | None = None
    components_NC: Tensor | None = None
    energies_M: Tensor | None = None


TokenEstimator = Callable[..., Tensor]
"""(scored, settings, **kwargs) -> the advantage of each sampled token, episode by episode."""

TOKEN_ESTIMATORS: dict[str, TokenEstimator] = {}
E = TypeVar("E", bound=Callable[..., Tensor])


class EstimatorError(RallyError):
    """A registered advantage estimator that cannot be trained with."""


def register_adv_estimator(name: str) -> Callable[[E], E]:
    """Decorator: `algorithm.adv_estimator=name` compares samples (episodes, or turns if these have rewards) with this
    function of (rewards_N, groups_N, tokens_N, by_std, **kwargs), which returns their advantages."""
    return _registering(name, ESTIMATORS)


def register_token_estimator(name: str) -> Callable[[E], E]:
    """Decorator: `algorithm.adv_estimator=name` uses this function of (scored, settings, **kwargs), which returns the
    advantage of each sampled token."""
    return _registering(name, TOKEN_ESTIMATORS)


def _registering(name: str, registry: dict[str, Estimator]) -> Callable[[E], E]:
    def add(function: E) -> E:
        if name in BUILT_IN:
            raise EstimatorError(f"{name} is an advantage estimator of Rally; register yours under another name")
        for known in (ESTIMATORS, TOKEN_ESTIMATORS):
            known.pop(name, None)
        registry[name] = function
        return function

    return add


def token_advantages(scored: Scored, settings: CreditSettings) -> Tensor:
    """The advantage of each sampled token, episode by episode."""
    if settings.estimator in TOKEN_ESTIMATORS:
        advantages_M = TOKEN_ESTIMATORS[settings.estimator](scored, settings, **settings.kwargs)
        return _checked(advantages_M, int(scored.tokens_N.sum()), "sampled tokens", settings)
    if settings.estimator == "reinforce_plus_plus":
        return whiten(discounted(token_rewards(scored, settings), scored.tokens_N, settings.gamma))
    if settings.estimator == "gigpo":
        return _gigpo(scored, settings)
    if settings.estimator == "remax":
        return _remax(scored, settings)
    if settings.estimator == "gdpo":
        return _gdpo(scored, settings)
    if settings.needs_energies:
        assert scored.energies_M is not None, "the optimal token baseline needs energies"
        returns_M = discounted(token_rewards(scored, settings), scored.tokens_N, 1.0)
        return optimal_token_baseline(returns_M, scored.energies_M, scored.tokens_N, scored.groups_N)
    if settings.turn_rewards == "trajectory":
        advantages_N = _estimate(settings, _episode_rewards(scored), scored.groups_N, scored.tokens_N)
        advantages_M = advantages_N.repeat_interleave(scored.tokens_N)
    else:
        advantages_M = _by_turn(scored, settings)
    return whiten(advantages_M) if settings.estimator == "reinforce_plus_plus_baseline" else advantages_M


def turn_returns(scored: Scored, settings: CreditSettings) -> Tensor:
    """The return of each turn: its reward plus gamma times the return of the next turn. The last turn of an episode
    also gets the reward of the episode."""
    turns = _turns(scored)
    rewards_K = torch.zeros(turns.episode_K.numel(), dtype=torch.float64)
    if settings.turn_rewards != "trajectory":
        rewards_K += turns.rewards_K
    if scored.token_rewards_M is not None:
        turn_M = torch.arange(turns.tokens_K.numel()).repeat_interleave(turns.tokens_K)
        rewards_K.index_add_(0, turn_M, scored.token_rewards_M.double())
    counts_N = torch.bincount(turns.episode_K, minlength=scored.rewards_N.numel())
    has_turns = counts_N > 0
    rewards_K[(torch.cumsum(counts_N, 0) - 1)[has_turns]] += scored.rewards_N.double()[has_turns]
    return discounted(rewards_K, counts_N, settings.gamma)


def _by_turn(scored: Scored, settings: CreditSettings) -> Tensor:
    """`returns` compares all turns of a group, `turn_baseline` each turn with those of the same number."""
    turns, returns_K = _turns(scored), turn_returns(scored, settings)
    groups_K = scored.groups_N[turns.episode_K]
    if settings.turn_rewards == "returns":
        advantages_K = _estimate(settings, returns_K, groups_K, turns.tokens_K)
    else:
        peers_K = _joined(groups_K, turns.number_K)
        advantages_K = _with_peers(_estimate(settings, returns_K, peers_K, turns.tokens_K), peers_K)
    return advantages_K.repeat_interleave(turns.tokens_K)


def _gigpo(scored: Scored, settings: CreditSettings) -> Tensor:
    """GiGPO: the advantage of the episode plus that of each turn among the turns of its group in the same state."""
    turns = _turns(scored)
    whole_N = grpo(_episode_rewards(scored, settings), scored.groups_N, by_std=settings.by_std)
    peers_K = _joined(scored.groups_N[turns.episode_K], turns.states_K)
    step_K = _with_peers(grpo(turn_returns(scored, settings), peers_K, by_std=settings.by_std), peers_K)
    advantages_K = whole_N[turns.episode_K] + settings.step_weight * step_K
    return advantages_K.repeat_interleave(turns.tokens_K)


def _remax(scored: Scored, settings: CreditSettings) -> Tensor:
    """ReMax: the return from the token on, minus the reward of the greedy episode on the same prompt."""
    assert scored.baselines_N is not None, "ReMax needs greedy episodes"
    returns_M = discounted(token_rewards(scored, settings), scored.tokens_N, settings.gamma)
    return (returns_M - scored.baselines_N.repeat_interleave(scored.tokens_N)).float()


def _gdpo(scored: Scored, settings: CreditSettings) -> Tensor:
    """GDPO: the sum of the GRPO advantages of each component, whitened over the tokens of the batch."""
    assert scored.components_NC is not None, "GDPO needs components"
    columns = scored.components_NC.unbind(1)
    total_N = torch.stack([grpo(c_N, scored.groups_N, by_std=settings.by_std) for c_N in columns]).sum(0)
    return whiten(total_N.repeat_interleave(scored.tokens_N))


def _estimate(settings: CreditSettings, rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    advantages_N = ESTIMATORS[settings.estimator](rewards_N, groups_N, tokens_N, settings.by_std, **settings.kwargs)
    if settings.estimator in BUILT_IN:
        return advantages_N
    return _checked(advantages_N, len(rewards_N), "samples", settings)


def _checked(advantages_X: object, count: int, what: str, settings: CreditSettings) -> Tensor:
    """What a registered estimator returned, as float32; EstimatorError unless it is one finite number for each."""
    problem = f"the advantage estimator {settings.estimator}"
    if not isinstance(advantages_X, Tensor) or advantages_X.shape != (count,):
        found = list(advantages_X.shape) if isinstance(advantages_X, Tensor) else type(advantages_X).__name__
        raise EstimatorError(f"{problem} returned {found} for {count} {what}; return one number for each")
    if not advantages_X.isfinite().all():
        raise EstimatorError(f"{problem} returned advantages that are not finite; correct the function")
    return advantages_X.detach().cpu().float()


def check_estimator(settings: CreditSettings) -> None:
    """Raise EstimatorError if a registered estimator fails on four made-up episodes of two groups, of which one has no
    sampled token."""
    if settings.estimator in BUILT_IN:
        return
    turns = Turns(*map(torch.tensor, ([0, 0, 1, 2], [2, 1, 2, 1], [0.0, 0.5, 0.0, 0.0], [0, 1, 0, 2])))
    rewards_N, groups_N, tokens_N = map(torch.tensor, ([1.0, 0.0, 0.5, 0.0], [0, 0, 1, 1], [3, 2, 1, 0]))
    try:
        token_advantages(Scored(rewards_N.double(), groups_N, tokens_N, turns=turns), settings)
    except RallyError:
        raise
    except Exception as error:  # the function is the user's
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EstimatorError(
            f"the advantage estimator {settings.estimator} fails on made-up episodes: {reason}; correct the function"
        ) from error


def _with_peers(advantages_K: Tensor, peers_K: Tensor) -> Tensor:
    """The advantages, set to 0 for turns without peers."""
    return torch.where(
        group_sum(torch.ones_like(advantages_K), peers_K) > 1, advantages_K, torch.zeros_like(advantages_K)
    )


def _joined(groups_K: Tensor, kinds_K: Tensor) -> Tensor:
    """Group numbers of (group, kind) pairs."""
    pairs_2K = torch.stack([groups_K, kinds_K])
    _, numbers_K = torch.unique(pairs_2K, dim=1, return_inverse=True)
    assert isinstance(numbers_K, Tensor)
    return numbers_K


def _episode_rewards(scored: Scored, settings: CreditSettings | None = None) -> Tensor:
    """The total reward of each episode, with the rewards of its turns if the settings use them."""
    total_N = scored.rewards_N.double().clone()
    if scored.token_rewards_M is not None:
        episode_M = torch.arange(total_N.numel()).repeat_interleave(scored.tokens_N)
        total_N.index_add_(0, episode_M, scored.token_rewards_M.double())
    if settings is not None and settings.turn_rewards != "trajectory":
        total_N.index_add_(0, _turns(scored).episode_K, _turns(scored).rewards_K.double())
    return total_N


def token_rewards(scored: Scored, settings: CreditSettings) -> Tensor:
    """Per-token rewards: at the last token of an episode and, if the settings use them, of a turn."""
    rewards_M = torch.zeros(int(scored.tokens_N.sum()), dtype=torch.float64)
    if scored.token_rewards_M is not None:
        rewards_M += scored.token_rewards_M
    pairs = [(scored.tokens_N, scored.rewards_N)]
    if settings.turn_rewards != "trajectory":
        pairs.append((_turns(scored).tokens_K, _turns(scored).rewards_K))
    for lengths, earned in pairs:
        ends = torch.cumsum(lengths, 0) - 1
        rewards_M.index_add_(0, ends[lengths > 0], earned.double()[lengths > 0])
    return rewards_M


def _turns(scored: Scored) -> Turns:
    assert scored.turns is not None, "these settings need turns"
    return scored.turns
