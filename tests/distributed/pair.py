"""Updates that one process makes alone and several make together. As a program, all ranks but the first:
python pair.py RENDEZVOUS WORLD_SIZE."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from small_models import make_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_cases import calm_model, episode, segment, uneven_episodes
from transformers import PreTrainedModel
from vision_cases import calm_vision_model, make_codec, make_image, make_patches

from benchmarks.architectures import small_model
from rally.algos.credit_assignment import CreditSettings
from rally.algos.distillation import DistillationSettings
from rally.algos.losses import SurrogateSettings
from rally.algos.off_policy_correction import CorrectionSettings
from rally.distributed.process_group import ProcessGroup, RankLayout, Rendezvous
from rally.distributed.worker import Executor, Worker
from rally.models import attention, decoder_families
from rally.models.kernels import reference
from rally.models.lora import LoraSettings, add_adapters
from rally.models.sequence_parallel import UlyssesAttention
from rally.models.sharding import ALONE, Message, Ranks, ShardPlace, copy_gathered, gathered, model_state
from rally.models.vision import set_patches
from rally.runs.build.engines import full_weights
from rally.train.batch import build_batch, rows_of
from rally.train.checkpoint.snapshot import copied
from rally.train.critic import Critic, CriticSettings
from rally.train.forward import fused_layers
from rally.train.offload import ON_DEVICE, OffloadSettings
from rally.train.policy import OptimizerSettings, Policy
from rally.train.reference import BaseOfPolicy, FrozenModel, Reference, awake
from rally.train.startup_check import Difference, compare_forwards, compared_rows
from rally.train.teacher import Teachers
from rally.train.update import UpdateSettings, reference_logprobs, update_policy
from rally.train.value_model import with_value_head
from rally.types import Episode, Segment

STEPS = 2  # the second one starts from what the first has left in weights, optimizer and schedule
SECONDS = 250.0


@dataclass(frozen=True)
class Case:
    settings: UpdateSettings
    family: str = "qwen2"
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    few: bool = False  # one row alone
    lora: bool = False
    reshard: bool = True
    teachers: int = 1
    offload: OffloadSettings = ON_DEVICE
    moments_8bit: bool = False
    offload_policy: bool = False
    fused: bool = False  # whether ranks compute fused layers, here without kernels
    copied: bool = False  # whether every rank also copies the policy
    like: str = ""  # the case whose results it must have, to the last bit
    episodes: Callable[[int], list[Episode]] = uneven_episodes
    layout: RankLayout = RankLayout()  # noqa: RUF009 it is frozen


def settings(**given: Any) -> UpdateSettings:
    return UpdateSettings(**{"mini_batch_groups": 2, **given})


CASES = {
    "plain": Case(settings(), copied=True),
    "one row": Case(settings(), few=True),
    "kl to a reference": Case(settings(kl_coef=0.1)),
    "entropy": Case(settings(entropy_coeff=0.01)),
    "an odd number of parts": Case(settings(max_tokens=50), family="llama"),
    "few rows at a time, computed twice": Case(settings(max_rows=2, shuffle_seed=1), checkpointing=True),
    "corrected": Case(settings(correction=CorrectionSettings(level="token"), mini_batch_groups=1)),
    "layers kept whole": Case(settings(kl_coef=0.1), reshard=False, copied=True),
    "adapters": Case(settings(kl_coef=0.1), lora=True, copied=True),
    "distillation": Case(settings(distillation=DistillationSettings(mode="forward_kl_topk", topk=4), max_tokens=50)),
    "two teachers": Case(settings(distillation=DistillationSettings(mode="k3")), teachers=2),
    "layers that hold state": Case(settings(max_tokens=50), family="qwen3_5_text", checkpointing=True, copied=True),
    "experts recorded before the update": Case(
        settings(max_tokens=50, router_replay="R2"), family="qwen3_moe", copied=True
    ),
    "half precision": Case(settings(max_tokens=50), dtype=torch.bfloat16, copied=True),
}
OPTIMIZER = OffloadSettings(optimizer=True, bucket_bytes=20_000)
EVERYTHING = replace(OPTIMIZER, params=True, activations=True, min_activation_bytes=256)
CASES |= {
    f"{name}, {how}": replace(CASES[name], like=name, copied=how != "optimizer in main memory", **given)
    for name, how, given in (
        ("plain", "optimizer in main memory", {"offload": OPTIMIZER}),
        ("kl to a reference", "all in main memory", {"offload": EVERYTHING}),
        ("kl to a reference", "offload policy", {"offload_policy": True}),
        ("adapters", "all in main memory", {"offload": EVERYTHING}),
        ("two teachers", "all in main memory", {"offload": EVERYTHING}),
        ("half precision", "all in main memory", {"offload": EVERYTHING}),
        ("half precision", "offload policy", {"offload_policy": True}),
    )
}


CASES |= {
    f"fused layers{what}": Case(settings(**{"kl_coef": 0.1, **more}), fused=True, **given)
    for what, more, given in (
        (" of qwen2", {}, {"checkpointing": True, "copied": True}),
        (" of gemma3", {"max_tokens": 50}, {"family": "gemma3"}),
        (
            " with experts",
            {"kl_coef": 0.0, "max_tokens": 50, "router_replay": "R2"},
            {"family": "qwen3_moe", "checkpointing": True},
        ),
        (" with adapters", {}, {"lora": True, "reshard": False}),
        (", all in main memory", {}, {"checkpointing": True, "offload": EVERYTHING}),
        (", ulysses", {"max_tokens": 25}, {"checkpointing": True, "layout": RankLayout(sequence_size=2)}),
        (" in half precision", {"max_tokens": 50}, {"dtype": torch.bfloat16}),
    )
}


@contextmanager
def fused_layers_if(fused: bool) -> Iterator[None]:
    """Computes fused layers, by the reference of their kernels, and no layer by its own forward."""
    if not fused:
        yield
        return
    ops = fused_layers.Ops(reference.rms_norm, reference.add_and_norm, reference.gated, reference.rotate)
    with (
        patch.object(fused_layers, "has_triton", lambda: True),
        patch.object(fused_layers, "fits_one_call", lambda q_THD: True),
        patch.object(fused_layers, "compiled_ops", lambda: ops),
        patch.object(fused_layers, "packed_hidden", None),
        patch.object(decoder_families, "power_of_two", lambda size: True),
    ):
        yield


class Copies(NamedTuple):
    """Every rank's copy of the policy, in float64, beside the policy itself."""

    policy_X: Tensor
    ranks_X: list[Tensor]


BUCKETS = (1, 5_000, 1 << 20)  # bytes: one tensor each, several, all in one


def copies_of(case: Case, policy: Policy, ranks: Ranks) -> list[Copies]:
    """Whole modules into which each rank copies the sharded policy, as its engine has one; then buckets of tensors."""
    if not case.copied or ranks is ALONE:
        return []
    whole = adapted(model_for(case, 9), case)
    copy_gathered(policy.model, whole, trained_only=False)
    flat = [torch.cat([p.detach().double().flatten() for p in whole.parameters()])]
    for size in BUCKETS:
        tensors = dict(gathered(((n, p.detach()) for n, p in policy.model.named_parameters()), size))
        flat.append(torch.cat([tensors[name].double().flatten() for name, _ in whole.named_parameters()]))
    own = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in policy.model.named_parameters()}
    policy_X = torch.cat([own[name].detach().double().flatten() for name, _ in whole.named_parameters()])
    return [Copies(policy_X, ranks.all_gather(one)) for one in flat]


def grouped_episodes(seed: int) -> list[Episode]:
    """Groups with a common prompt; two episodes of each also begin with the same response."""
    rng = random.Random(seed)
    episodes = []
    for group in "ab":
        first = segment(rng, "sssoosss", prompt=11)
        parts = [
            first,
            _after(first, segment(rng, "ssssss"), 4),
            _after(first, segment(rng, "soss"), 0),
        ]
        episodes += [episode(f"{group}{i}", group, float(i), one) for i, one in enumerate(parts)]
    return episodes


def _after(first: Segment, rest: Segment, shared: int) -> Segment:
    fields = ("response_ids", "response_mask", "response_logprobs")
    joined = {name: getattr(first, name)[:shared] + getattr(rest, name) for name in fields}
    return Segment(prompt_ids=first.prompt_ids, **joined)


def tiny_episodes(seed: int) -> list[Episode]:
    """A row of which one token is computed, and one of several."""
    rng = random.Random(seed)
    return [
        episode("a0", "a", 1.0, segment(rng, "s", prompt=1)),
        episode("a1", "a", 0.0, segment(rng, "ssoos", prompt=4)),
    ]


def ulysses(size: int = 2, **given: Any) -> dict[str, Any]:
    return {"layout": RankLayout(sequence_size=size, **given)}


CASES |= {
    "ulysses": Case(settings(), copied=True, **ulysses()),
    "ulysses: a prefix tree": Case(settings(kl_coef=0.1), episodes=grouped_episodes, checkpointing=True, **ulysses()),
    "ulysses: fewer tokens than ranks": Case(settings(max_rows=1), episodes=tiny_episodes, **ulysses()),
    "ulysses: a loss over sequences": Case(
        settings(surrogate=SurrogateSettings(mode="gspo"), max_tokens=25, entropy_coeff=0.01), **ulysses()
    ),
    "ulysses: corrected": Case(settings(correction=CorrectionSettings(level="sequence"), max_tokens=25), **ulysses()),
    "ulysses: adapters": Case(settings(kl_coef=0.1), lora=True, **ulysses()),
    "ulysses: distillation": Case(
        settings(distillation=DistillationSettings(mode="forward_kl_topk", topk=4), max_tokens=25), **ulysses()
    ),
    "ulysses: sliding windows": Case(settings(max_tokens=25), family="gemma3", copied=True, **ulysses()),
    "ulysses: experts, few tokens": Case(settings(max_rows=1), family="qwen3_moe", episodes=tiny_episodes, **ulysses()),
    "ulysses: experts recorded before the update": Case(
        settings(max_rows=1, router_replay="R2"), family="qwen3_moe", episodes=tiny_episodes, **ulysses()
    ),
    "ulysses: sinks and experts": Case(settings(max_tokens=25), family="gpt_oss", copied=True, **ulysses()),
    "ulysses: half precision": Case(settings(max_tokens=25), dtype=torch.bfloat16, **ulysses()),
}
FOUR = {
    "two groups of two": Case(settings(max_tokens=25, kl_coef=0.1), checkpointing=True, **ulysses()),
    "more ranks than key/value heads": Case(settings(), episodes=grouped_episodes, **ulysses(4)),
    "shards and replicas": Case(settings(max_tokens=50), layout=RankLayout(fsdp_size=2)),
    "replicas only": Case(settings(), layout=RankLayout(fsdp_size=1), lora=True),
    "replicas of half precision": Case(settings(), layout=RankLayout(fsdp_size=2), dtype=torch.bfloat16),
    "ulysses over replicas": Case(settings(kl_coef=0.1), **ulysses(fsdp_size=2)),
}
"""Cases of four ranks."""


def image_episodes(family: str) -> Callable[[int], list[Episode]]:
    """Two groups about one image each, one answer of which is shown another one; episodes of text alone between them,
    so that some micro-batches show no image."""
    codec = make_codec(family)

    def shown(seed: int, text: str = "What is it?") -> Segment:
        parts = [{"type": "image", "image": make_image(seed, 24, 24)}, {"type": "text", "text": text}]
        prompt = codec.prompt([{"role": "user", "content": parts}])
        return Segment(prompt_ids=prompt.ids, images=prompt.images)

    def answered(rng: random.Random, asked: Segment, pattern: str) -> Segment:
        rest = segment(rng, pattern)
        fields = ("response_ids", "response_mask", "response_logprobs")
        return replace(asked, **{name: getattr(asked, name) + getattr(rest, name) for name in fields})

    def made(seed: int) -> list[Episode]:
        rng = random.Random(seed)
        again = [{"type": "image", "image": make_image(9 + seed, 16, 24)}]
        second = answered(rng, shown(seed), "sss").append_observed(*codec.delta([{"role": "tool", "content": again}]))
        return [
            episode("a0", "a", 1.0, answered(rng, shown(seed), "sssos")),
            episode("a1", "a", 0.0, answered(rng, second, "ss")),
            episode("b0", "b", 0.0, answered(rng, shown(5), "s")),
            episode("b1", "b", 2.0, answered(rng, shown(5), "sss" * 4)),
            episode("c0", "c", 0.5, segment(rng, "ssoss" * 4, prompt=12)),
            episode("c1", "c", 1.5, segment(rng, "ss", prompt=30)),
        ]

    return made


def seeing(family: str, **given: Any) -> Case:
    return Case(**{"settings": settings(max_tokens=60), "family": family, "episodes": image_episodes(family), **given})


CASES |= {
    "images": seeing("qwen2_5_vl", settings=settings(max_rows=1, kl_coef=0.1), checkpointing=True),
    "images: features of several layers": seeing("qwen3_vl"),
    "images: ordinary tokens within": seeing("smolvlm"),
    "images: text alone": seeing("qwen2_5_vl", episodes=uneven_episodes),
    "ulysses: images": seeing("qwen3_vl", settings=settings(), **ulysses()),
}


class Result(NamedTuple):
    weights: dict[str, Tensor]
    metrics: list[dict[str, float]]
    reference_M: Tensor
    state: dict[str, Any]
    copies: list[Copies]


def model_for(case: Case, seed: int) -> PreTrainedModel:
    if case.family in ("qwen3_5_text", "qwen3_moe", "gpt_oss"):
        return small_model(case.family)
    if case.family in ("qwen2_5_vl", "qwen3_vl", "smolvlm"):
        return calm_vision_model(case.family, seed)
    model = calm_model(seed) if case.family == "qwen2" else make_model(case.family, seed)
    return model.to(case.dtype)  # type: ignore[arg-type]


def adapted(model: PreTrainedModel, case: Case) -> PreTrainedModel:
    if case.lora:
        add_adapters(model, LoraSettings(rank=2), "nowhere")
    return model


def policy_for(case: Case, ranks: Ranks) -> Policy:
    model = adapted(model_for(case, 0), case)
    attention.install(model)
    ranks.shard(model, offload=case.offload_policy)
    optimizer = OptimizerSettings(lr=1e-4, moments_8bit=case.moments_8bit)
    return Policy(model, optimizer, STEPS, case.checkpointing, offload=case.offload)


def reference_for(case: Case, policy: Policy, ranks: Ranks) -> Reference:
    if case.lora:
        return BaseOfPolicy(policy.model)
    model = model_for(case, 5)
    ranks.shard(model, offload=case.offload_policy)
    return FrozenModel(model, offload=case.offload.params)


def teachers_for(case: Case, ranks: Ranks) -> Teachers | None:
    if case.settings.distillation is None:
        return None
    models = {f"{number}": model_for(case, 6 + number) for number in range(case.teachers)}
    for model in models.values():
        ranks.shard(model)
    frozen = {name: FrozenModel(model, offload=case.offload.params) for name, model in models.items()}
    vocabulary = next(iter(models.values())).config.vocab_size
    return Teachers(frozen, case.settings.distillation, vocabulary, route=lambda episode: str(int(episode.id[1]) % 2))


class First(Worker):
    """Rank 0 of two. It sends messages, as a controller does."""

    @contextmanager
    def broadcast(self, message: Message) -> Iterator[None]:
        self._group.send(message)
        with super().broadcast(message):
            yield


def parts_for(case: Case, ranks: Ranks) -> Executor:
    policy = policy_for(case, ranks)
    reference = reference_for(case, policy, ranks)
    policy.rest()
    return Executor(policy, case.settings, reference, None, teachers_for(case, ranks))


def result_of(case: Case, ranks: Ranks = ALONE) -> Result:
    if not isinstance(ranks, Worker):
        return _result_of(case, ranks)
    with fused_layers_if(case.fused):
        return _result_of(case, First(ranks._group, reshard=case.reshard, layout=case.layout))


def _result_of(case: Case, ranks: Ranks) -> Result:
    parts = parts_for(case, ranks)
    policy, reference, teachers = parts.policy, parts.reference, parts.teachers
    assert reference is not None
    asked = reference if case.settings.kl_coef else None
    metrics = []
    for seed in range(STEPS):
        episodes = case.episodes(seed)
        batch = build_batch(episodes[:2] if case.few else episodes)
        if case.few:
            batch = type(batch)(**{**vars(batch), "rows": batch.rows[:1]})
        batch = teachers.assigned(batch, episodes) if teachers else batch
        with awake(asked), nullcontext() if teachers is None else teachers.resting():
            found = update_policy(policy, batch, case.settings, step=seed, reference=asked, teachers=teachers)
            metrics.append({name: value for name, value in found.items() if not name.startswith("perf/")})
    if policy.residence is not None:
        assert policy.residence.resting and policy.residence.moves == 2 * STEPS + 1
    with awake(reference):
        reference_M = reference_logprobs(policy, reference, rows_of(uneven_episodes()), case.settings)
    weights, state = full_weights(policy.model), copied(policy.state())
    return Result(weights, metrics, reference_M, state, copies_of(case, policy, ranks))


def follow(case: Case, group: ProcessGroup) -> None:
    """A further rank, which has no rows of its own."""
    parts = parts_for(case, Worker(group, reshard=case.reshard, layout=case.layout))
    with fused_layers_if(case.fused):
        for _ in range(STEPS + 2):
            parts.execute(group.receive())
    copied(parts.policy.state())
    copies_of(case, parts.policy, parts.policy.ranks)


class Taught(NamedTuple):
    weights: dict[str, Tensor]
    metrics: list[dict[str, float]]
    values_M: Tensor


def critic_for(dtype: torch.dtype, ranks: Ranks, images: str = "") -> Critic:
    """`images`: of this family, whose critic is shown images."""
    body = with_value_head((calm_vision_model(images) if images else calm_model()).base_model.to(dtype))
    if images:
        set_patches(body, make_patches(images))
    ranks.shard(body)
    learner = Policy(body, OptimizerSettings(lr=1e-3), STEPS)
    return Critic(learner, CriticSettings(mini_batch_groups=1, max_tokens=50, forward_max_tokens=60))


def taught(
    dtype: torch.dtype, ranks: Ranks = ALONE, layout: RankLayout | None = None, images: str = "", fused: bool = False
) -> Taught:
    """A critic that judges and learns."""
    with fused_layers_if(fused):
        return _taught(dtype, ranks, layout, images)


def _taught(dtype: torch.dtype, ranks: Ranks, layout: RankLayout | None, images: str) -> Taught:
    critic = critic_for(dtype, First(ranks._group, layout=layout) if isinstance(ranks, Worker) else ranks, images)
    metrics, episodes = [], image_episodes(images) if images else uneven_episodes
    for seed in range(STEPS):
        judged = critic.judge(episodes(seed), CreditSettings(estimator="gae"), None)
        metrics.append({**judged.metrics, **critic.update(judged.critic, step=seed)})
    return Taught(model_state(critic.learner.model), metrics, critic.values(rows_of(episodes(0))))


def follow_critic(
    dtype: torch.dtype, group: ProcessGroup, layout: RankLayout | None = None, images: str = "", fused: bool = False
) -> None:
    critic = critic_for(dtype, Worker(group, layout=layout), images)
    parts = Executor(critic.learner, settings(), critic=critic)
    with fused_layers_if(fused):
        for _ in range(2 * STEPS):
            parts.execute(group.receive())
        model_state(critic.learner.model)
        parts.execute(group.receive())


DTYPES = (torch.float32, torch.bfloat16)
CRITIC_IMAGES = "qwen3_vl"


FOUR_LAYOUT = RankLayout(fsdp_size=2, sequence_size=2)  # of four ranks


def compared(group: ProcessGroup) -> list[Difference | str]:
    """What the start-up check finds with two ranks that divide a sequence, and where their attention is wrong."""
    policy = policy_for(CASES["ulysses"], Worker(group, layout=RankLayout(sequence_size=2)))
    texts = [[int(token) for token in torch.arange(40) * step % 97] for step in (7, 11)]
    right, rows = UlyssesAttention._all_heads, compared_rows(texts, 64)
    found = compare_forwards(policy.model, rows, 64)
    with patch.object(UlyssesAttention, "_all_heads", lambda self, x: right(self, x.flip(1))):
        return [found, compare_forwards(policy.model, rows, 64)]


def resumed(group: ProcessGroup) -> tuple[dict[str, Any], dict[str, ShardPlace]]:
    """The state of a single process, after shards and replicas have read it: what this rank has, and its places."""
    case = FOUR["replicas of half precision"]
    policy = policy_for(case, Worker(group, layout=FOUR_LAYOUT))
    policy.load_state(result_of(case).state)
    return copied(policy.state()), policy.layout()


def together(rank: int, rendezvous: Path, world_size: int = 2) -> Worker:
    place = Rendezvous(place=str(rendezvous), secret="pair")
    return Worker(ProcessGroup(rank, world_size, place, "cpu", SECONDS))


def _number(world_size: int) -> int:
    """The rank of this process, which forks itself into all ranks but the first."""
    for rank in range(2, world_size):
        if os.fork() == 0:
            return rank
    return 1


if __name__ == "__main__":
    world_size = int(sys.argv[2])
    rank = _number(world_size)
    group = together(rank, Path(sys.argv[1]), world_size)._group
    for case in (CASES if world_size == 2 else FOUR).values():
        follow(case, group)
    for dtype in DTYPES if world_size == 2 else DTYPES[:1]:
        follow_critic(dtype, group, None if world_size == 2 else FOUR_LAYOUT)
    if world_size == 2:
        follow_critic(torch.float32, group, images=CRITIC_IMAGES)
        follow_critic(torch.float32, group, fused=True)
    (compared if world_size == 2 else resumed)(group)
    group.leave()
    for _ in range(2, world_size if rank == 1 else 2):
        assert os.wait()[1] == 0
