"""A rank other than 0: it builds what rank 0 plans and does what rank 0 orders, until there is nothing more to do.

python -m rally.distributed.worker NUMBER COUNT MEETING DEVICE SECONDS; started by
`rally.distributed.controller` alone. Whatever goes wrong here ends the process, and rank 0 tells why from the log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.config import SftConfig
from rally.distributed.controller import here
from rally.distributed.process_group import ProcessGroup
from rally.models.parallel import Message, model_state
from rally.runs import build
from rally.runs.build.engines import logits_of
from rally.runs.build.models import RunPlan
from rally.runs.build.policies import critic_of, policy_of
from rally.runs.sft import sft_policy_of, sft_settings_of
from rally.sft.training import SftSettings, sft_loss, sft_step
from rally.train.checkpoint.snapshot import copied, copied_weights
from rally.train.checkpoint.store import Checkpoint, open_checkpoint
from rally.train.critic import Critic
from rally.train.messages import (
    ComputeLogits,
    ComputeLoss,
    ComputeReference,
    ComputeValues,
    GatherCritic,
    GatherState,
    GatherWeights,
    SftStep,
    Shutdown,
    UpdateCritic,
    UpdatePolicy,
)
from rally.train.policy import Policy
from rally.train.reference import Reference
from rally.train.update import UpdateSettings, reference_logprobs, update_policy

Found = TypeVar("Found")


class Worker:
    """`Ranks` as one of those that obey sees them: nothing is announced."""

    def __init__(self, group: ProcessGroup, *, reshard: bool = True) -> None:
        self._group, self._reshard = group, reshard

    @property
    def number(self) -> int:
        return self._group.number

    @property
    def count(self) -> int:
        return self._group.count

    def begin(self, plan: Message) -> None:
        """It has begun: this plan was heard."""

    def spread(self, model: PreTrainedModel) -> None:
        self._group.spread(model, carried=self, reshard=self._reshard)

    def watching(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @contextmanager
    def doing(self, order: Message) -> Iterator[None]:
        yield
        self._group.rest()

    def within(self, model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
        return self._group.within(model, work, *given)

    def gathered(self, numbers_X: Tensor) -> list[Tensor]:
        return self._group.gathered(numbers_X)


@dataclass(frozen=True)
class Executor:
    """What orders are done with."""

    policy: Policy
    settings: UpdateSettings | SftSettings
    reference: Reference | None = None
    critic: Critic | None = None

    def obey(self, order: Message) -> None:
        with self.policy.ranks.doing(order):
            match order:
                case ComputeValues() | UpdateCritic() | GatherCritic():
                    assert self.critic is not None
                    _mind_critic(self.critic, order)
                case _:
                    self._mind_policy(order)
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()  # servers may share this GPU

    def _mind_policy(self, order: Message) -> None:
        policy = self.policy
        match order, self.settings:
            case UpdatePolicy(batch, step, seed), UpdateSettings() as update:
                torch.manual_seed(seed)
                update_policy(policy, batch, update, step=step, reference=self.reference if update.kl_coef else None)
            case ComputeReference(rows), UpdateSettings() as update:
                assert self.reference is not None
                reference_logprobs(policy, self.reference, rows, update)
            case SftStep(rows, seed), SftSettings() as supervision:
                torch.manual_seed(seed)
                sft_step(policy, rows, supervision)
            case ComputeLoss(rows), SftSettings() as supervision:
                sft_loss(policy, rows, supervision)
            case ComputeLogits(ids), _:
                logits_of(policy.model, ids)
            case GatherWeights(), _:
                model_state(policy.model)
            case GatherState(merged), _:
                copied_weights(policy.model, merged=merged)
                copied(policy.state())
            case _:
                raise AssertionError(f"{type(order).__name__} is not for this run")


def _mind_critic(critic: Critic, order: ComputeValues | UpdateCritic | GatherCritic) -> None:
    match order:
        case ComputeValues(rows):
            critic.values(rows)
        case UpdateCritic(batch, step, seed):
            torch.manual_seed(seed)
            critic.update(batch, step=step)
        case GatherCritic():
            critic.part()


def executor_of(plan: RunPlan, group: ProcessGroup) -> Executor:
    """The same parts as rank 0 has."""
    config = plan.config
    checkpoint: Checkpoint | None = open_checkpoint(plan.checkpoint) if plan.checkpoint else None
    if isinstance(config, SftConfig):
        ranks = Worker(group, reshard=config.model.fsdp_config.reshard_after_forward)
        policy = sft_policy_of(config, checkpoint, plan.steps, ranks)
        return Executor(policy, sft_settings_of(config))
    ranks = Worker(group, reshard=config.actor.fsdp_config.reshard_after_forward)
    policy = policy_of(config, checkpoint, plan.steps, ranks)
    reference = build.reference_of(config, policy.model)
    critic = critic_of(config, checkpoint, plan.steps, ranks)
    return Executor(policy, build.update_settings_of(config), reference, critic)


def main(number: int, count: int, meeting: Path, device: str, seconds: float) -> None:
    (meeting.parent / here(number)).touch()
    group = ProcessGroup(number, count, meeting, device, seconds)
    plan = group.hear()
    assert isinstance(plan, RunPlan), "a plan comes first"
    worker = executor_of(plan, group)
    while not isinstance(order := group.hear(), Shutdown):
        assert not isinstance(order, RunPlan), "there is one plan"
        worker.obey(order)
    group.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
