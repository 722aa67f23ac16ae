"""A rank other than 0: builds the same parts as rank 0 and executes the messages that rank 0 broadcasts.

`rally.distributed.controller` starts it: python -m rally.distributed.worker RANK WORLD_SIZE RENDEZVOUS DEVICE SECONDS.
Any error ends the process; rank 0 quotes its log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.config import SftConfig
from rally.distributed.controller import ready_key
from rally.distributed.process_group import SECRET_VARIABLE, ProcessGroup, RankLayout, Rendezvous, layout_of
from rally.models.residence import on_device
from rally.models.sequence_parallel import SequenceGroup
from rally.models.sharding import HostedEngine, M, Message, model_state
from rally.platforms import empty_cache, shared_backend
from rally.runs import build
from rally.runs.build.engines import logits_of
from rally.runs.build.models import RunPlan, import_external_libs
from rally.runs.build.policy_and_critic import critic_of, policy_of
from rally.runs.build.rank_engines import RankEngine, StartedEngines, start_engine
from rally.runs.sft import sft_policy_of, sft_settings_of
from rally.sft.training import SftSettings, sft_loss, sft_step
from rally.train.checkpoint.snapshot import Part, copied_weights
from rally.train.checkpoint.state_shards import shard_part, write_shards
from rally.train.checkpoint.store import STATE, Checkpoint, open_checkpoint
from rally.train.critic import FOLDER, OPTIMIZER, Critic
from rally.train.policy import Policy
from rally.train.rank_messages import (
    CompareForwards,
    ComputeLogits,
    ComputeLoss,
    ComputePlain,
    ComputeReference,
    ComputeValues,
    GatherCritic,
    GatherState,
    GatherWeights,
    PublishWeights,
    SftStep,
    Shutdown,
    StartEngine,
    UpdateCritic,
    UpdatePolicy,
)
from rally.train.reference import Reference, awake
from rally.train.startup_check import compare_forwards, detached_plain
from rally.train.teacher import Teachers
from rally.train.update import UpdateSettings, reference_logprobs, update_policy

T = TypeVar("T")


class Worker:
    """`Ranks` as a worker sees them: it sends no messages."""

    def __init__(self, group: ProcessGroup, *, reshard: bool = True, layout: RankLayout | None = None) -> None:
        self._group, self._reshard = group, reshard
        group.arrange(layout or RankLayout())

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def address(self) -> str:
        return self._group.address

    @property
    def token(self) -> str:
        return self._group.token

    def host(self, engine: HostedEngine) -> None:
        self._group.hosted = engine

    @property
    def sequence_group(self) -> SequenceGroup | None:
        return self._group.sequence_group

    def start(self, plan: Message) -> None:
        """The worker is running: it has received this plan."""

    def shard(self, model: PreTrainedModel, *, offload: bool = False) -> None:
        self._group.shard(model, ranks=self, reshard=self._reshard, offload=offload)

    def watch(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @contextmanager
    def broadcast(self, message: Message) -> Iterator[None]:
        yield
        self._group.reshard()

    def scatter(self, messages: Sequence[M]) -> M:
        return self._group.scatter(messages)

    def summon(self, model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
        return self._group.summon(model, work, *args)

    def all_gather(self, numbers_X: Tensor) -> list[Tensor]:
        return self._group.all_gather(numbers_X)

    def report(self, ticket: str, text: str) -> None:
        self._group.report(ticket, text)

    def reports(self, ticket: str) -> list[str]:
        return self._group.reports(ticket)


CRITIC_MESSAGES = (ComputeValues, UpdateCritic, GatherCritic)


@dataclass
class Executor:
    """The parts of a run on this rank, and the computation for each message."""

    policy: Policy
    settings: UpdateSettings | SftSettings
    reference: Reference | None = None
    critic: Critic | None = None
    teachers: Teachers | None = None
    start_engine: Callable[[Sequence[int]], StartedEngines] | None = None
    engine: RankEngine | None = None
    shares_gpu: bool = False  # servers or other ranks may need the memory that torch keeps after a message
    copied_critic: list[Part] = field(default_factory=list)  # the critic's shards, until a message says where to write

    def execute(self, message: Message) -> None:
        critic = self.critic if isinstance(message, CRITIC_MESSAGES) else None
        learner = self.policy if critic is None else critic.learner
        with self.policy.ranks.broadcast(message), on_device(learner.model), self._frozen(message):
            match message:
                case ComputeValues() | UpdateCritic() | GatherCritic():
                    assert self.critic is not None
                    self._execute_critic(self.critic, message)
                case _:
                    self._execute_policy(message)
        if self.shares_gpu:
            empty_cache(self.policy.device)

    @contextmanager
    def _frozen(self, message: Message) -> Iterator[None]:
        """A context in which the frozen models that a message needs are on their device."""
        needed = self.reference if isinstance(message, (UpdatePolicy, ComputeReference)) else None
        with awake(needed), nullcontext() if self.teachers is None else self.teachers.resting():
            yield

    def _execute_policy(self, message: Message) -> None:
        policy = self.policy
        match message, self.settings:
            case UpdatePolicy(batch, step, seed), UpdateSettings() as update:
                torch.manual_seed(seed)
                reference = self.reference if update.kl_coef else None
                update_policy(policy, batch, update, step=step, reference=reference, teachers=self.teachers)
            case ComputeReference(), UpdateSettings() as update:
                assert self.reference is not None
                reference_logprobs(policy, self.reference, [], update)
            case SftStep(tokens, seed), SftSettings() as supervision:
                torch.manual_seed(seed)
                sft_step(policy, [], supervision, tokens=tokens)
            case ComputeLoss(), SftSettings() as supervision:
                sft_loss(policy, [], supervision)
            case CompareForwards(rows, max_length), _:
                compare_forwards(policy.model, rows, max_length, deterministic=policy.deterministic)
            case ComputePlain(rows, temperature), _:
                detached_plain(policy.model, rows, temperature)
            case ComputeLogits(ids), _:
                logits_of(policy.model, ids)
            case StartEngine(end_ids), _:
                assert self.start_engine is not None
                self.engine, _ = self.start_engine(end_ids)
            case PublishWeights(), _:
                assert self.engine is not None
                self.engine.copy_weights(policy.model)
            case GatherWeights(), _:
                model_state(policy.model)
            case GatherState() as save, _:
                copied_weights(policy.model, merged=save.merged)
                parts = [shard_part(STATE, policy, in_place=not save.background), *self.copied_critic]
                self.copied_critic.clear()
                write_shards(save, parts, policy.ranks)
            case _:
                raise AssertionError(f"this run does not handle {type(message).__name__}")

    def _execute_critic(self, critic: Critic, message: ComputeValues | UpdateCritic | GatherCritic) -> None:
        match message:
            case ComputeValues():
                critic.values([])
            case UpdateCritic(batch, step, seed):
                torch.manual_seed(seed)
                critic.update(batch, step=step)
            case GatherCritic():
                model_state(critic.learner.model)
                self.copied_critic[:] = [shard_part(f"{FOLDER}/{OPTIMIZER}", critic.learner)]


def executor_of(plan: RunPlan, group: ProcessGroup) -> Executor:
    """Build the same parts as rank 0."""
    config = plan.config
    import_external_libs(config)
    checkpoint: Checkpoint | None = None
    if plan.checkpoint:
        checkpoint = open_checkpoint(plan.checkpoint, contents=False)  # rank 0 has compared the checksums
    if isinstance(config, SftConfig):
        reshard = config.model.fsdp_config.reshard_after_forward
        ranks = Worker(group, reshard=reshard, layout=layout_of(config))
        policy = sft_policy_of(config, checkpoint, plan.steps, ranks)
        return Executor(policy, sft_settings_of(config))
    ranks = Worker(group, reshard=config.actor.fsdp_config.reshard_after_forward, layout=layout_of(config))
    policy = policy_of(config, checkpoint, plan.steps, ranks)
    start = partial(start_engine, config, policy.model, checkpoint.actor if checkpoint else None)
    update = build.update_settings_of(config)
    shares_gpu = config.rollout.name != "embedded" or shared_backend() is not None
    if not plan.steps:  # it only validates
        return Executor(policy, update, start_engine=start, shares_gpu=shares_gpu)
    reference = build.reference_of(config, policy.model)
    critic = critic_of(config, checkpoint, plan.steps, ranks)
    teachers = build.teachers_of(config, policy.model)
    for learner in [policy, *([] if critic is None else [critic.learner])]:
        learner.rest()
    return Executor(policy, update, reference, critic, teachers, start, shares_gpu=shares_gpu)


def main(rank: int, world_size: int, rendezvous: Rendezvous, device: str, seconds: float) -> None:
    store = rendezvous.store(world_size)
    store.set(ready_key(rank), "1")
    group = ProcessGroup(rank, world_size, rendezvous, device, seconds, store)
    plan = group.receive()
    assert isinstance(plan, RunPlan), "the first message is the plan"
    executor = executor_of(plan, group)
    while not isinstance(message := group.receive(), Shutdown):
        assert not isinstance(message, RunPlan), "there is one plan"
        with group.during(message):
            executor.execute(message)
    group.close_engine()
    group.leave()


if __name__ == "__main__":
    _, this, count, place, address, local_rank, kind, limit = sys.argv
    main(
        int(this),
        int(count),
        Rendezvous(place=place, secret=os.environ.pop(SECRET_VARIABLE), address=address, local_rank=int(local_rank)),
        kind,
        float(limit),
    )
