"""Who samples from a policy on several GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rally import distributed
from rally.config import Config, ConfigError, load_config
from rally.config.checks.multi_gpu import with_rollout_servers
from rally.track import RunConsole

FOUR = "trainer.n_gpus_per_node=4"
R = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("lines", "in_ranks", "loop_workers"),
    [
        (["trainer.n_gpus_per_node=1"], False, False),
        (["trainer.n_gpus_per_node=1", f"{R}.agent.num_workers=2"], False, False),
        ([FOUR], True, False),
        ([FOUR, f"{R}.agent.num_workers=2"], True, True),
        ([FOUR, f"{R}.name=vllm"], False, False),
        ([FOUR, f"{R}.name=rally", f"{R}.agent.num_workers=2"], False, True),
        (["trainer.n_gpus_per_node=2", "trainer.device=cpu"], True, False),
    ],
)
def test_every_rank_samples_unless_servers_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], in_ranks: bool, loop_workers: bool
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = load_config(overrides=lines)
    assert (config.samples_in_ranks, config.uses_loop_workers) == (in_ranks, loop_workers)


ASYNC = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", "trainer.v1.trainer_mode=colocate_async")
SEPARATE = ("trainer.v1.trainer_mode=separate_async",)


@pytest.mark.parametrize("mode", [ASYNC, SEPARATE])
@pytest.mark.parametrize(
    "key", ["deterministic=true", "attention_backend=gather", "page_size=32", "enforce_eager=true"]
)
def test_keys_of_the_embedded_engine_are_refused_where_servers_replace_it(mode: tuple[str, ...], key: str) -> None:
    lag = f"{mode[-1].replace('trainer_mode=', '')}.fixed_lag=true"
    with pytest.raises(
        ConfigError, match=r"has no effect with .*name=rally, which samples with trainer.v1.trainer_mode="
    ):
        load_config(overrides=[*mode, lag, f"{R}.{key}"])
    replay = [f"{R}.enable_rollout_routing_replay=true", "actor_rollout_ref.actor.router_replay.mode=R3"]
    load_config(overrides=[*mode, *replay])  # servers of Rally's own return the experts


def test_keys_of_servers_are_taken_where_servers_replace_the_embedded_engine() -> None:
    words = ["data_parallel_size=3", "server.join_timeout=30", "checkpoint_engine.backend=delta"]
    config = with_rollout_servers(load_config(overrides=[*ASYNC, *(f"{R}.{word}" for word in words)]))
    assert (config.rollout.name, config.rollout.data_parallel_size) == ("rally", 3)


RAY = ("trainer.nnodes=2", "trainer.device=auto", f"{R}.nnodes=2", f"{R}.n_gpus_per_node=4")
VLLM = f"{R}.name=vllm"


@pytest.mark.parametrize("more", [(), ("trainer.val_only=true", "data.val_files=pyproject.toml")])
def test_all_gpus_that_are_reserved_for_servers_get_servers(more: tuple[str, ...]) -> None:
    def servers(*lines: str) -> int:
        return with_rollout_servers(load_config(overrides=[*RAY, *more, *lines])).rollout.data_parallel_size

    assert servers(VLLM) == 8 and servers(VLLM, f"{R}.tensor_model_parallel_size=2") == 4
    assert servers(VLLM, f"{R}.data_parallel_size=8") == 8


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((*RAY, VLLM, f"{R}.data_parallel_size=2"), "n_gpus_per_node=4 reserve 8 GPUs, and the servers .* use 2"),
        ((*RAY, VLLM, f"{R}.tensor_model_parallel_size=3"), "n_gpus_per_node=4 cannot be divided by"),
        (
            (*RAY, VLLM, f"{R}.mode=server", f"{R}.server.url=http://a:1"),
            "nnodes has no effect on servers that already",
        ),
        (
            ("trainer.launcher=ray", f"{R}.nnodes=2"),
            "nnodes has no effect with actor_rollout_ref.rollout.name=embedded",
        ),
    ],
)
def test_nodes_that_nobody_would_use_are_not_reserved(lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=list(lines))


def test_validation_alone_samples_in_every_rank_whatever_the_mode_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides=[*ASYNC, "trainer.val_only=true", "data.val_files=pyproject.toml"])
    assert with_rollout_servers(config).samples_in_ranks
    seen: list[Config] = []

    @contextmanager
    def ranks(config: Config, console: object) -> Iterator[tuple[None, None]]:
        seen.append(config)
        yield None, None

    monkeypatch.setattr(distributed, "_ranks", ranks)
    monkeypatch.setattr(distributed.evaluation, "evaluate", lambda config, *_: seen.append(config))
    distributed.evaluate(load_config(overrides=list(ASYNC)))
    assert [config.samples_in_ranks for config in seen] == [True, True]
    notes: list[str] = []
    console = RunConsole()
    monkeypatch.setattr(console, "note", notes.append)
    monkeypatch.setattr(distributed.run, "train", lambda config, *_: seen.append(config))
    distributed.train(load_config(overrides=list(ASYNC)), console)
    assert seen[-1].rollout.name == "rally"
    assert notes == [
        "colocate_async samples on servers on 2 GPUs, where a synchronous run has an engine in every rank, so Rally "
        "starts its own (rollout.name=rally rollout.data_parallel_size=1)"
    ]
