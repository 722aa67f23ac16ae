"""Asynchronous training: staleness is bounded, batches do not depend on how long episodes take, and a run with a fixed
lag resumes bit-identically."""

import asyncio
import math
import shutil
from pathlib import Path

import pytest
import torch
from async_cases import LOOP_KEY, metrics, write_loop
from hypothesis import given
from hypothesis import strategies as st
from small_models import make_model
from train_cases import TASK, Paper, run_config, same, weights
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rally.cli.main import app
from rally.config import ConfigError
from rally.data import batch_indices
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.engines.embedded.engine import MirroredEngine
from rally.loops import Job
from rally.replay.update_replay import UpdateReplayError
from rally.runs.build import engines
from rally.runs.build import trainer as build
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.async_trainer import WORST, AsyncSettings, AsyncTrainer, GroupAdmission
from rally.types import SamplingParams

MODE = "trainer.v1.trainer_mode=colocate_async"
R = "actor_rollout_ref.rollout"
LAG = (MODE, "trainer.v1.colocate_async.fixed_lag=true", "actor_rollout_ref.rollout.deterministic=true")
QUIET = ("data.val_files=null", "trainer.val_before_train=false", "trainer.startup_check=false")


@pytest.fixture
def loop_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path_factory.mktemp("loops")
    monkeypatch.syspath_prepend(write_loop(folder))
    return LOOP_KEY


def actor(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return weights(AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"global_step_{step}" / "actor"))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 32), st.integers(0, 5), st.data())
def test_no_group_starts_too_early(size: int, eighths: int, trained: int, data: st.DataObject) -> None:
    """Whatever starts after `trained` updates is trained at most `ahead` versions later, and no more than `ahead`
    batches beside the next one are under way."""
    ahead = eighths / 8
    step, place = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 20))
    job = Job(task=TASK, episode_id="", group="", seed=0, step=step, place=place)
    admission = GroupAdmission.__new__(GroupAdmission)
    admission.batch_size, admission.ahead = size, ahead
    starts = admission.updates_before(job) <= trained
    number = (step - 1) * size + min(place, size - 1)
    assert starts == (number < (trained + 1 + ahead) * size)
    assert not starts or step - 1 - trained <= math.ceil(ahead)


@pytest.mark.parametrize("ahead", [1, 2, 0.5])
def test_episodes_of_any_length_are_trained_in_order_and_in_time(
    home: Path, tmp_path: Path, loop_key: str, ahead: float
) -> None:
    keys = (MODE, f"trainer.v1.colocate_async.num_warmup_batches={ahead}", "trainer.total_training_steps=5")
    train(run_config(home, tmp_path, *keys, loop_key, *QUIET, "trainer.save_freq=-1"), Paper().console)
    folder, steps = RunFolder(tmp_path), metrics(tmp_path)
    worst = [row["training/off_policy/trajectory_staleness_worst/max"] for row in steps]
    assert max(worst) == math.ceil(ahead), "the slowest episodes reach the bound, and none exceeds it"
    assert any(row["training/off_policy/trajectory_spans/max"] > 1 for row in steps), "episodes go on across updates"
    assert steps[0]["actor/rollout_mismatch_kl"] < 1e-6, "tokens of the trained version are still compared"
    for step, row in enumerate(folder.read_consumed(), 1):
        assert row.step == step and row.version == step - 1
        assert row.groups == tuple(f"t{step:06d}-{place:05d}" for place in range(3)), "slow groups are not put off"
        prompts = [e.task.id for e in folder.read_episodes(step)[::4]]
        drawn = batch_indices(12, 3, seed=0, step=step, shuffle=True)
        assert [int(name.rpartition(":")[2]) for name in prompts] == drawn
    assert [row["engine/weight_version"] for row in steps] == [1, 2, 3, 4, 5]


def test_an_update_can_be_repeated_from_the_record(home: Path, tmp_path: Path, loop_key: str) -> None:
    train(run_config(home, tmp_path, MODE, loop_key, *QUIET), Paper().console)
    result = CliRunner().invoke(app, ["replay", str(tmp_path), "--update", "2"])
    assert result.exit_code == 0 and "12 episodes" in result.output and "all bits are the same" in result.output
    result = CliRunner().invoke(
        app, ["replay", str(tmp_path), "--update", "2", "actor_rollout_ref.actor.optim.lr=1e-4"]
    )
    assert result.exit_code == 1 and "differ" in result.output
    several = ["trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    result = CliRunner().invoke(app, ["replay", str(tmp_path), "--update", "2", *several])
    assert isinstance(result.exception, UpdateReplayError) and "was made by 2 ranks" in str(result.exception)
    assert "give either" in CliRunner().invoke(app, ["replay", str(tmp_path)]).output


def test_without_partial_rollout_no_episode_crosses_an_update(home: Path, tmp_path: Path) -> None:
    keys = (MODE, "async_training.partial_rollout=false", "async_training.staleness_threshold=1")
    train(run_config(home, tmp_path, *keys, *QUIET, "trainer.save_freq=-1"), Paper().console)
    assert all(row["training/off_policy/trajectory_spans/max"] == 1 for row in metrics(tmp_path))
    assert all(row["training/off_policy/trajectory_staleness_worst/max"] <= 1 for row in metrics(tmp_path))


@pytest.fixture(scope="module")
def lagged(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run with a fixed lag. Only read."""
    folder = tmp_path_factory.mktemp("runs") / "lagged"
    train(run_config(home, folder, *LAG, *QUIET), Paper().console)
    return folder


def test_a_fixed_lag_gives_the_same_run_with_and_without_overlap(
    home: Path, tmp_path: Path, lagged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling from a copy during the update, and sampling from the policy itself before it."""
    for module in (engines, build):
        monkeypatch.setattr(module, "samples_during_update", lambda *_: False)
    train(run_config(home, tmp_path, *LAG, *QUIET), Paper().console)
    for step in (1, 2, 3):
        assert same(actor(lagged, step), actor(tmp_path, step))
        assert RunFolder(lagged).read_advantages(step) == RunFolder(tmp_path).read_advantages(step)
    assert [row["training/off_policy/trajectory_staleness/max"] for row in metrics(lagged)] == [0, 1, 1]
    assert not same(actor(lagged, 1), actor(lagged, 3)), "something must have been learned"
    assert (lagged / "checkpoints/global_step_2/sampled_ahead/episodes.jsonl").exists()
    assert not (lagged / "checkpoints/global_step_3/sampled_ahead").exists()


@pytest.mark.drill(
    "reliability",
    "A run with a fixed lag ends after a checkpoint",
    "Resumed, it ends bit-identical to one without a stop",
)
def test_a_run_with_a_fixed_lag_resumes_bit_identically(lagged: Path, tmp_path: Path, home: Path) -> None:
    resumed = Path(shutil.copytree(lagged, tmp_path / "resumed"))
    for step in (2, 3):
        shutil.rmtree(resumed / "checkpoints" / f"global_step_{step}")
    paper = Paper()
    train(run_config(home, resumed, *LAG, *QUIET), paper.console)
    assert "global_step_1, step 1" in paper.text
    for step in (2, 3):
        assert same(actor(lagged, step), actor(resumed, step))
        assert RunFolder(lagged).read_advantages(step) == RunFolder(resumed).read_advantages(step)


async def test_a_mirrored_engine_samples_during_an_update_and_follows_it_afterwards() -> None:
    policy, other = make_model(seed=0), make_model(seed=1)
    engine = MirroredEngine(policy, EngineSettings(max_model_len=64))
    plain = [EmbeddedEngine(make_model(seed=seed), EngineSettings(max_model_len=64)) for seed in (0, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = [(await one.generate([1, 2, 3], params)).ids for one in plain]
    with engine.updating():
        for mine, new in zip(policy.parameters(), other.parameters(), strict=True):
            mine.data.copy_(new)
        during = await engine.generate([1, 2, 3], params)
    await engine.publish()
    after = await engine.generate([1, 2, 3], params)
    for one in (engine, *plain):
        await one.close()
    assert [during.ids, after.ids] == expected and expected[0] != expected[1]
    assert [during.spans[0].version, after.spans[0].version] == [0, 1]


async def test_requests_that_are_recomputed_need_no_memory_during_an_update() -> None:
    """The KV memory is overwritten during the update, as if another owner had used it."""

    class Lent:
        lent = True

        def __init__(self, flat: torch.Tensor) -> None:
            self.flat, self.uses = flat, 0

        def release(self) -> None:
            self.flat.fill_(255)

        def restore(self) -> None:
            self.flat.zero_()
            self.uses += 1

    settings = EngineSettings(max_model_len=64, in_flight="recompute")
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=5)
    engines = [EmbeddedEngine(make_model(seed=0), settings) for _ in range(2)]
    memory = Lent(engines[0].core.store.memory.flat)
    engines[0].core.store.memory = memory  # type: ignore[assignment]
    started = asyncio.Event()
    request = asyncio.create_task(engines[0].generate([1, 2, 3], params, on_tokens=lambda _: started.set()))
    await started.wait()
    with engines[0].updating():  # the weights stay the same, so the tokens must too
        pass
    sampled, undisturbed = await request, await engines[1].generate([1, 2, 3], params)
    for one in engines:
        await one.close()
    assert memory.uses == 1 and sampled.ids == undisturbed.ids
    assert [span.version for span in sampled.spans] == [0, 1]
    torch.testing.assert_close(torch.tensor(sampled.logprobs), torch.tensor(undisturbed.logprobs))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("trainer.v1.colocate_async.fixed_lag=true",), "has no effect with trainer.v1.trainer_mode=sync"),
        ((MODE, f"{R}.name=vllm", f"{R}.checkpoint_engine.backend=ipc"), "read weights that change while it samples"),
        (("trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=2"), "needs a Ray cluster; set trainer.launcher=ray"),
        ((MODE, "actor_rollout_ref.rollout.deterministic=true"), "fixed_lag=true"),
        ((*LAG, "async_training.staleness_threshold=2"), "samples one batch ahead"),
        ((MODE, "actor_rollout_ref.rollout.in_flight=abort"), "use keep or recompute"),
        ((MODE, "async_training.trigger_parameter_sync_step=4"), "so set that to 12"),
    ],
)
def test_what_an_asynchronous_run_cannot_do_is_an_error(
    home: Path, tmp_path: Path, keys: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(home, tmp_path, *keys)


@pytest.mark.parametrize(("threshold", "ahead"), [(8, 1), (1, 0), ("null", 1)])
def test_verls_threshold_counts_versions(home: Path, tmp_path: Path, threshold: object, ahead: float) -> None:
    config = run_config(home, tmp_path, MODE, f"trainer.v1.sampler.max_off_policy_threshold={threshold}")
    assert config.batches_ahead == ahead
    schedule = build.AsyncSettings(ahead=config.batches_ahead)
    told = build._announced(config, schedule)
    assert told.startswith(f"colocate_async: {ahead:g} batches are sampled ahead")
    assert ("max_off_policy_threshold=1" in told) == (threshold == 1)


@pytest.mark.parametrize(("schedule", "bound"), [(AsyncSettings(ahead=1.5), 2), (AsyncSettings(fixed_lag=True), 1)])
def test_a_token_beyond_the_bound_is_reported(schedule: AsyncSettings, bound: int) -> None:
    trainer, paper = AsyncTrainer.__new__(AsyncTrainer), Paper()
    trainer.schedule, trainer.console = schedule, paper.console
    for worst in (-1.0, float(bound)):
        trainer._check_staleness(3, {WORST: worst})
    assert paper.text == ""
    trainer._check_staleness(4, {WORST: bound + 1.0})
    assert f"step 4 trains on a token that is {bound + 1} weight versions old" in " ".join(paper.text.split())
