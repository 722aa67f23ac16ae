"""How a run divides the memory of its GPU: the KV that its rollouts can use, and the kind of memory of its weights."""

from types import SimpleNamespace
from typing import Any

import pytest
from small_models import make_model

from rally.config import Config, load_config
from rally.engines.embedded import RolloutDemand
from rally.envs import Environments
from rally.loops import AgentLoopBase, register
from rally.runs.build import engine_settings_of, engines, policy_and_critic
from rally.runs.build.rollout import may_use_cuda_ipc, rollout_demand_of

R = "actor_rollout_ref.rollout"
SIZES = (
    "data.train_files=[pyproject.toml]",  # any file that exists
    "data.train_batch_size=128",
    f"{R}.n=8",
    "data.max_prompt_length=204",
    "data.max_response_length=256",
    "actor_rollout_ref.model.path=nowhere",
)


@register("two_conversations")
class TwoConversations(AgentLoopBase):
    """A loop of a user, whose requests need not continue each other."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> Any: ...


def config_of(*keys: str) -> Config:
    return load_config(overrides=[*SIZES, *keys])


def inputs_of(val: int = 0, loops: tuple[str, ...] = (), train: int | None = 1000) -> Any:
    return SimpleNamespace(
        train_tasks=None if train is None else range(train),
        val_tasks=range(val) if val else None,
        environments=Environments(),
        codec=SimpleNamespace(stop_ids=(1,), decode=None),
        tokenizer=None,
        loops=frozenset(loops),
    )


def demand(*keys: str, **inputs: Any) -> RolloutDemand | None:
    return rollout_demand_of(config_of(*keys), inputs_of(**inputs))


def test_the_episodes_of_a_step_and_how_long_they_can_get() -> None:
    assert demand() == (1024, 460, 1)
    assert demand(f"{R}.max_model_len=4096") == (1024, 460, 1), "no episode gets so long"
    assert demand(f"{R}.max_model_len=300") == (1024, 300, 1)
    assert demand("algorithm.adv_estimator=remax") == (128 * 9, 460, 1), "a greedy episode for each group"
    more = ("algorithm.filter_groups.enable=true", "data.gen_batch_size=200")
    assert demand(*more) == (1600, 460, 1), "dynamic sampling replaces groups that have ended"


def test_every_seat_of_a_match_is_an_episode() -> None:
    inputs = inputs_of(val=2000)
    inputs.environments = SimpleNamespace(labels=["chess", "riddle"], seats={"chess": 2, "riddle": 1}.get)
    assert rollout_demand_of(config_of(f"{R}.max_num_seqs=4096"), inputs) == (2048, 460, 1), "validation has one seat"


def test_the_batches_that_an_asynchronous_run_samples_ahead() -> None:
    mode = "trainer.v1.trainer_mode=colocate_async"
    assert demand(mode) == (2048, 460, 1)
    assert demand(mode, "trainer.v1.colocate_async.num_warmup_batches=0.5") == (1536, 460, 1)
    assert demand(mode, "trainer.v1.colocate_async.fixed_lag=true") == (1024, 460, 1)


def test_validation_has_room_for_what_can_run_twice_over() -> None:
    small = ("data.train_batch_size=4", f"{R}.n=2", f"{R}.max_num_seqs=64")
    assert demand(*small) == (8, 460, 1)
    assert demand(*small, val=20) == (20, 460, 1)
    assert demand(*small, val=5000) == (128, 460, 1)
    assert demand(*small, "data.val_batch_size=10", val=5000) == (10, 460, 1)
    sampled = (f"{R}.val_kwargs.do_sample=true", f"{R}.val_kwargs.temperature=1", f"{R}.val_kwargs.n=4")
    assert demand(*small, *sampled, val=20) == (80, 460, 1)
    assert demand(val=5000) == (1024, 460, 1), "a batch is more"


def test_turns_leave_pages_behind() -> None:
    tools = f"{R}.multi_turn.enable=true"
    assert demand(tools, f"{R}.multi_turn.max_assistant_turns=3") == (1024, 460, 3)
    assert demand(tools) == (1024, 460, 7), "turns of 64 tokens, where there is no limit"
    assert demand(tools, f"{R}.multi_turn.history=rerender", f"{R}.max_model_len=600") == (1024, 600, 9)


@pytest.mark.parametrize("loop", ["two_conversations", "black_box"])
def test_nobody_knows_what_other_loops_can_use(loop: str) -> None:
    assert demand(loops=(loop, "single_turn_agent")) is None
    assert demand(f"{R}.agent.default_agent_loop=two_conversations") is None
    assert demand(loops=(loop,)) is None
    assert demand(f"{R}.agent_loop_class=rally.loops.single_turn.SingleTurnAgentLoop", loops=(loop,)) == (1024, 460, 1)


def test_the_engine_of_a_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "EmbeddedEngine", lambda model, settings, **_: settings)
    monkeypatch.setattr(engines, "Grammars", lambda *_: None)
    policy: Any = SimpleNamespace(model=make_model())
    settings: Any = engines.engine_of(config_of(), inputs_of(), policy)
    assert settings.demand == (1024, 460, 1)


def test_what_does_not_train_takes_the_memory_it_is_given() -> None:
    assert demand(train=None, val=100) is None
    assert engine_settings_of(config_of()).demand is None


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ((), False),
        ((f"{R}.name=vllm",), False),
        ((f"{R}.name=sglang_async",), True),
        ((f"{R}.name=vllm", f"{R}.checkpoint_engine.backend=ipc"), True),
    ],
)
def test_memory_that_servers_may_read_is_of_torchs_default_kind(
    keys: tuple[str, ...], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(policy_and_critic, "use_expandable_segments", asked.append)
    monkeypatch.setattr(policy_and_critic, "model_of", lambda *_, **__: make_model())
    config = config_of(*keys)
    assert may_use_cuda_ipc(config) == shared
    policy_and_critic.policy_of(config, None, 0)
    assert not asked, "what only validates has no activations"
    policy_and_critic.policy_of(config, None, 1)
    assert bool(asked) != shared
