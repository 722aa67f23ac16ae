"""Offloading to main memory moves what it says it moves, and changes no bit of a result."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from small_models import make_model
from torch import Tensor, nn
from train_cases import calm_model, same, uneven_episodes, weights

from rally.config import load_config
from rally.models import attention
from rally.models.lora import LoraSettings, add_adapters
from rally.models.residence import Residence, on_device
from rally.runs.build.update_settings import policy_offload_of
from rally.train.batch import build_batch
from rally.train.offload import ActivationOffload, OffloadSettings
from rally.train.packing import pack
from rally.train.policy import OptimizerSettings, Policy
from rally.train.reference import FrozenModel, awake
from rally.train.update import UpdateSettings, update_policy

UPDATE = UpdateSettings(mini_batch_groups=2, kl_coef=0.1)
NOTHING = OffloadSettings()
BUCKET = 30_000
EVERYTHING = OffloadSettings(
    optimizer=True, params=True, activations=True, bucket_bytes=BUCKET, min_activation_bytes=256
)
CASES = {
    "optimizer": replace(NOTHING, optimizer=True, bucket_bytes=BUCKET),
    "params": replace(NOTHING, params=True),
    "activations": replace(NOTHING, activations=True, min_activation_bytes=256),
    "everything": EVERYTHING,
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Run(NamedTuple):
    policy: Policy
    reference: FrozenModel
    metrics: list[dict[str, float]]


def policy_for(offload: OffloadSettings, dtype: Any, device: str = "cpu", **case: Any) -> Policy:
    model = make_model().to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if case.get("lora"):
        add_adapters(model, LoraSettings(rank=2), "nowhere")
    attention.install(model)
    return Policy(model, OptimizerSettings(lr=1e-3), 4, case.get("checkpointing", False), offload=offload)


def trained(offload: OffloadSettings, dtype: Any, device: str = "cpu", **case: Any) -> Run:
    policy = policy_for(offload, dtype, device, **case)
    reference = FrozenModel(make_model().to(device), offload=offload.params)
    policy.rest()
    metrics = []
    for seed in range(3):
        with awake(reference):
            found = update_policy(policy, build_batch(uneven_episodes(seed)), UPDATE, reference=reference)
            metrics.append({name: value for name, value in found.items() if not name.startswith("perf/")})
    return Run(policy, reference, metrics)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [{}, {"lora": True}, {"checkpointing": True}], ids=["whole", "lora", "checkpointed"])
def test_three_updates_are_equal_to_the_last_bit(name: str, dtype: Any, case: dict[str, bool]) -> None:
    plain, offloaded = trained(NOTHING, dtype, **case), trained(CASES[name], dtype, **case)
    assert plain.metrics == offloaded.metrics
    assert same(weights(plain.policy.model), weights(offloaded.policy.model))
    one, other = plain.policy.state(), offloaded.policy.state()
    assert same(one["masters"], other["masters"])
    for mine, theirs in zip(one["optimizer"]["state"].values(), other["optimizer"]["state"].values(), strict=True):
        assert same(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_visit_the_device_bucket_by_bucket(dtype: Any) -> None:
    policy = trained(CASES["optimizer"], dtype).policy
    states = [value for state in policy.optimizer.state.values() for value in state.values()]
    per_number = 8 if dtype == torch.float32 else 12
    total = sum(master.numel() for master in policy.masters.values()) * per_number
    largest = max(master.numel() for master in policy.masters.values()) * per_number
    assert policy.host_states is not None and sum(value.nbytes for value in states) > 0
    assert 0 < policy.host_states.largest_visit <= max(BUCKET, largest) + 64 < total / 3


def memory(module: nn.Module) -> dict[int, Tensor]:
    """The weights by address. They stay alive, so that no address is used again."""
    return {parameter.data_ptr(): parameter.data for parameter in module.parameters()}


def test_resting_weights_are_elsewhere_and_return_for_each_use() -> None:
    policy = policy_for(CASES["params"], torch.float32)
    in_use = memory(policy.model)
    before = weights(policy.model)
    policy.rest()
    assert policy.residence is not None and policy.residence.resting
    at_rest = memory(policy.model)
    assert not at_rest.keys() & in_use.keys() and same(weights(policy.model), before)
    with on_device(policy.model), on_device(policy.model):
        assert not policy.residence.resting and not memory(policy.model).keys() & at_rest.keys()
        policy.rest()
        assert not policy.residence.resting, "they are in use"
    assert policy.residence.resting and policy.residence.moves == 3
    assert len(memory(policy.model)) == len(in_use), "tied weights stay one"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_large_activations_leave_and_return_and_no_weight_does(checkpointing: bool) -> None:
    run = trained(CASES["activations"], torch.float32, checkpointing=checkpointing)
    moved = run.policy.activations
    assert moved is not None and moved.offloaded > 0
    if checkpointing:
        whole = trained(CASES["activations"], torch.float32).policy.activations
        assert whole is not None and moved.offloaded < whole.offloaded / 2, "only the inputs of layers are kept"


def test_weights_and_small_tensors_stay_on_the_device() -> None:
    offload, linear = ActivationOffload(min_bytes=400), nn.Linear(10, 10)
    frozen = nn.Linear(10, 10).requires_grad_(False)
    large, small = torch.ones(10, 10, requires_grad=True), torch.ones(9, 10, requires_grad=True)

    def gradients(value: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(frozen(linear(value)).square().sum(), [value, *linear.parameters()]))

    with offload.hooks():
        found = gradients(large)
        assert (offload.offloaded, offload.returned) == (800, 800), "its input, and the result that is squared"
        gradients(small)
        assert offload.offloaded == 800
    assert all(map(torch.equal, found, gradients(large)))


def test_what_returns_has_the_strides_it_had_and_repeated_elements_move_once() -> None:
    """torch's kernels require the strides of a mask, and sum in an order that depends on those of a product."""
    seen: list[Tensor] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.save_for_backward(value)
            return value.square()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            seen.extend(ctx.saved_tensors)
            return 2 * ctx.saved_tensors[0] * gradients[0]

    whole = torch.randn(6, 16, requires_grad=True)
    padded, transposed, repeated = whole[:, :9], whole.t(), whole[:1, None].expand(1, 5, 16)
    offload = ActivationOffload(min_bytes=1)
    with offload.hooks():
        total = torch.stack([Square.apply(view).sum() for view in (padded, transposed, repeated)]).sum()
        offload.offloaded = 0
        Square.apply(repeated)
        assert offload.offloaded == 16 * 4
        total.backward()
    expected = [repeated, transposed, padded]
    assert [(x.shape, x.stride()) for x in seen] == [(x.shape, x.stride()) for x in expected]
    assert all(map(torch.equal, seen, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_is_the_same_with_and_without_offloading(dtype: Any) -> None:
    plain, offloaded = trained(NOTHING, dtype).policy, trained(EVERYTHING, dtype).policy
    for source, offload in ((plain, EVERYTHING), (offloaded, NOTHING)):
        resumed = policy_for(offload, dtype)
        resumed.model.load_state_dict(plain.model.state_dict())
        resumed.load_state(source.state())
        fresh = trained(NOTHING, dtype).policy
        for policy in (resumed, fresh):
            update_policy(policy, build_batch(uneven_episodes(5)), UpdateSettings(mini_batch_groups=2))
        assert same(weights(resumed.model), weights(fresh.model))


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_between_updates_the_device_holds_nothing_of_the_policy(dtype: Any) -> None:
    policy, reference, _ = trained(EVERYTHING, dtype, "cuda")
    kept = [value for state in policy.optimizer.state.values() for value in state.values()]
    assert kept and all(value.device.type == "cpu" and value.is_pinned() for value in kept)
    assert reference.model.device.type == policy.model.device.type == "cpu" and policy.device.type == "cuda"
    assert dtype == torch.float32 or all(master.device.type == "cpu" for master in policy.masters.values())
    again = policy_for(EVERYTHING, dtype, "cuda")
    with on_device(policy.model):
        again.model.load_state_dict(policy.model.state_dict())
    again.load_state(policy.state())
    assert all(value.device.type == "cpu" for state in again.optimizer.state.values() for value in state.values())
    plain, beside, _ = trained(NOTHING, dtype, "cuda")
    for one, frozen in ((again, reference), (plain, beside)):
        with awake(frozen):
            update_policy(one, build_batch(uneven_episodes(5)), UPDATE, reference=frozen)
    assert same(weights(again.model), weights(plain.model))


@GPU
@pytest.mark.gpu
def test_a_reference_that_rests_cannot_be_asked_by_accident() -> None:
    reference = trained(EVERYTHING, torch.float32, "cuda").reference
    packed = pack(build_batch(uneven_episodes()).rows, torch.device("cuda"))
    with pytest.raises(RuntimeError):
        reference(packed, 1.0)


def test_weights_rest_when_the_last_of_overlapping_users_leaves() -> None:
    """Users in several threads need not leave in the order in which they came."""
    residence = Residence(calm_model())
    residence.rest()
    first, second = residence.use(), residence.use()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not residence.resting, "it is in use"
    second.__exit__(None, None, None)
    assert residence.resting


def test_a_user_whose_weights_found_no_room_is_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    residence = Residence(calm_model())
    residence.rest()

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(residence, "_move", no_room)
        with residence.use():
            pass
    with residence.use():
        assert not residence.resting
    assert residence.resting


def test_weights_that_are_in_use_rest_afterwards() -> None:
    residence = Residence(calm_model())
    with residence.use():
        residence.rest()
        assert not residence.resting
    assert residence.resting
    with residence.use():
        residence.wake()
    assert not residence.resting, "it was told to stay"


@pytest.mark.parametrize(
    ("words", "rests"),
    [
        ([], False),
        (["actor_rollout_ref.rollout.name=rally"], True),
        (["trainer.n_gpus_per_node=2"], True),
        (["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.offload_policy=true"], False),
    ],
)
def test_the_policy_rests_unless_an_engine_samples_from_its_own_weights(words: list[str], rests: bool) -> None:
    given = ["trainer.device=cpu", "actor_rollout_ref.actor.fsdp_config.param_offload=true", *words]
    assert policy_offload_of(load_config(overrides=given)).params is rests
