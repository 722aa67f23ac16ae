"""Every rank of a run samples with an engine of its own: whole runs on two processes, and one such engine."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from forked import forked_children
from small_models import make_model
from train_cases import Paper, run_config
from transformers import AutoModelForCausalLM

from rally.chat import tiny_tokenizer
from rally.distributed import evaluate, train
from rally.distributed.controller import Controller, LostRank
from rally.engines import EmbeddedEngine, EngineSettings
from rally.engines.remote import ClientSettings, GatheredWeights, Rally, RankReplica, ServerReplica, WeightFiles
from rally.engines.remote.server_api import InFlight
from rally.models.sharding import Message
from rally.runs.build.rank_engines import RankEngine
from rally.track import RunFolder
from rally.train.rank_messages import ComputeLogits, PublishWeights
from rally.types import Generation, SamplingParams

ROOT = Path(__file__).parents[2]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = (f"{R}.gpu_memory_utilization=0.02", "trainer.val_before_train=false", "trainer.device=cpu")
TWO = (*SMALL, "trainer.n_gpus_per_node=2", f"{R}.deterministic=true")
TRAINS = ("data.val_files=null", "trainer.total_training_steps=2", f"{A}.ppo_mini_batch_size=2")


@pytest.fixture(scope="module", autouse=True)
def found_by_children() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


class TwoRanks(NamedTuple):
    """An undisturbed run of two steps on two ranks."""

    folder: Path
    requests: Counter[str]
    processes: list[str]  # command lines of the processes that the run started


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(word) for task in tasks for word in task.read_text().split()]
    return [*found, *(grandchild for child in found for grandchild in children(child))]


@pytest.fixture(scope="module")
def counted() -> Iterator[Counter[str]]:
    """Requests by the engine that answered them."""
    seen: Counter[str] = Counter()
    real = ServerReplica.generate

    async def generate(self: ServerReplica, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        answer = await real(self, prompt_ids, params)
        seen[self.name] += 1
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerReplica, "generate", generate)
        yield seen


@pytest.fixture(scope="module")
def two_ranks(home: Path, tmp_path_factory: pytest.TempPathFactory, counted: Counter[str]) -> TwoRanks:
    folder, commands = tmp_path_factory.mktemp("two") / "run", []
    real = Controller.__exit__

    def leave(self: Controller, *problem: Any) -> None:
        for pid in children(os.getpid()):
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " "))
        real(self, *problem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "__exit__", leave)
        train(run_config(home, folder, *TWO, *TRAINS), Paper().console)
    return TwoRanks(folder, Counter(counted), commands)


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    return {row.step: dict(row.metrics) for row in RunFolder(folder).read_metrics()}


def test_every_rank_samples_and_no_server_is_started(two_ranks: TwoRanks) -> None:
    assert set(two_ranks.requests) == {"rank-0", "rank-1"}
    assert min(two_ranks.requests.values()) > 10, "more than the checks at the start"
    assert any("rally.distributed.worker" in one for one in two_ranks.processes)
    assert not any("serve" in one for one in two_ranks.processes)
    assert not list(two_ranks.folder.glob("servers/*.log")) and not (two_ranks.folder / "weights").exists()
    rows = metrics_of(two_ranks.folder)
    assert set(rows) == {1, 2}
    for row in rows.values():
        assert row["engine/servers"] == 2 and row["engine/canary_difference"] < 1e-5
        assert row["actor/rollout_mismatch_kl"] < 1e-7 and row["actor/grad_norm"] > 0


def test_the_first_update_is_that_of_one_process(two_ranks: TwoRanks, home: Path, tmp_path: Path) -> None:
    """The weights that differ by more than 1e-6 are few, and differ by less than a hundredth of the learning rate:
    sampled log-probabilities agree to the last bits only, and Adam's first step divides by gradients near 0."""
    train(run_config(home, tmp_path, *SMALL, *TRAINS, "trainer.total_training_steps=1"), Paper().console)
    both, one = (weights(folder, 1) for folder in (two_ranks.folder, tmp_path))
    apart = torch.cat([(both[name] - one[name]).abs().flatten() for name in one])
    largest, share = float(apart.max()), float((apart > 1e-6).double().mean())
    assert largest < 1e-5 and share < 1e-3, f"the update of two ranks differs by {largest}, {share:.2%} by over 1e-6"
    mine, expected = metrics_of(two_ranks.folder)[1], metrics_of(tmp_path)[1]
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert mine[name] == pytest.approx(expected[name], rel=1e-6), name


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / f"checkpoints/global_step_{step}/actor").state_dict()


@pytest.fixture
def killed_in_rollout(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Kills rank 1 at the tenth request after the first update; the time of the kill."""
    times: list[float] = []
    asked: Counter[int] = Counter()
    real, real_enter = ServerReplica.generate, Controller.__enter__
    controllers: list[Controller] = []

    def enter(self: Controller) -> Controller:
        controllers.append(self)
        return real_enter(self)

    async def generate(self: ServerReplica, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        asked[self.version or 0] += 1
        if asked[1] == 10 and not times:
            times.append(time.monotonic())
            os.kill(children(controllers[0].workers[0].pid)[0], signal.SIGKILL)  # type: ignore[attr-defined]
        return await real(self, prompt_ids, params)

    monkeypatch.setattr(Controller, "__enter__", enter)
    monkeypatch.setattr(ServerReplica, "generate", generate)
    return times


@pytest.mark.drill(
    "reliability", "A rank is killed while its engine samples", "The run ends in words and resumes bit by bit"
)
def test_a_rank_killed_in_a_rollout_ends_the_run_which_resumes_to_the_same_bits(
    two_ranks: TwoRanks, home: Path, tmp_path: Path, killed_in_rollout: list[float]
) -> None:
    config = run_config(home, tmp_path, *TWO, *TRAINS)
    with pytest.raises(LostRank) as caught:
        train(config, Paper().console)
    assert time.monotonic() - killed_in_rollout[0] < 120
    assert str(caught.value).startswith("rank 1 of 2") and "start the same command again" in str(caught.value)
    assert set(metrics_of(tmp_path)) == {1}
    with forked_children():
        train(config, Paper().console)
    assert_same_bits(tmp_path, two_ranks.folder, 2)


def assert_same_bits(resumed: Path, undisturbed: Path, step: int) -> None:
    mine, expected = (weights(folder, step) for folder in (resumed, undisturbed))
    assert all(torch.equal(mine[name], weight) for name, weight in expected.items())
    states = [
        torch.load(folder / f"checkpoints/global_step_{step}/trainer.pt", weights_only=True)["optimizer"]["state"]
        for folder in (resumed, undisturbed)
    ]
    for number, moments in states[1].items():
        assert all(torch.equal(states[0][number][name], moment) for name, moment in moments.items())
    episodes = [
        {e.id: [(s.ids, s.response_logprobs) for s in e.segments] for e in RunFolder(folder).read_episodes(step)}
        for folder in (resumed, undisturbed)
    ]
    assert episodes[0] == episodes[1] and episodes[0]


@pytest.mark.usefixtures("forked")
def test_validation_and_adapters_on_two_ranks(home: Path, tmp_path: Path, counted: Counter[str]) -> None:
    """`trainer.val_only` and `rally eval` score what one process scores. Adapters are not merged."""
    lora = ("actor_rollout_ref.model.lora_rank=4", *SMALL)
    ranks = ("trainer.n_gpus_per_node=2", f"{R}.agent.num_workers=1")
    alone = train(run_config(home, tmp_path / "one", *lora, *TRAINS[1:], "data.val_files=null"), Paper().console)
    adapters = (*SMALL, f"actor_rollout_ref.model.lora_adapter_path={alone.folder}/checkpoints/global_step_2/actor")
    counted.clear()
    both = evaluate(run_config(home, tmp_path / "both", *adapters, *ranks), Paper().console)
    assert set(counted) == {"rank-0", "rank-1"}
    only = (*adapters, *ranks, "trainer.val_only=true")
    again = train(run_config(home, tmp_path / "only", *only), Paper().console)
    expected = evaluate(run_config(home, tmp_path / "expected", *adapters), Paper().console)
    reward = next(name for name in expected.metrics if name.endswith("reward/mean@1"))
    assert both.metrics[reward] == again.metrics[reward] == expected.metrics[reward]
    assert both.folder.name == again.folder.name == "eval"


class Hosted(NamedTuple):
    rank: RankEngine
    url: str


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    engine = EmbeddedEngine(make_model(), EngineSettings(max_model_len=128), num_pages=64)
    rank = RankEngine(engine, tiny_tokenizer(), "127.0.0.1", "secret")
    try:
        yield Hosted(rank, f"http://127.0.0.1:{rank.port}")
    finally:
        rank.close()


REQUEST = {"prompt_ids": [1, 2, 3], "sampling": {"max_tokens": 4, "seed": 1}}


def test_an_engine_of_a_rank_answers_only_with_the_token_and_takes_no_weights(hosted: Hosted) -> None:
    def answer(path: str, token: str | None, **headers: str) -> int:
        authorized = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.post(hosted.url + path, json=REQUEST, headers={**authorized, **headers}, timeout=60).status_code

    assert answer("/generate", "secret") == 200
    assert answer("/generate", None) == answer("/generate", "other") == 401
    assert answer("/load_weights", "secret") == 404
    assert answer("/generate", "secret", Host="elsewhere.example") == 403


@pytest.mark.parametrize("message", [ComputeLogits([1]), PublishWeights(7)])
def test_an_engine_of_a_rank_makes_no_step_while_a_message_runs(hosted: Hosted, message: Message) -> None:
    answers: list[Any] = []

    def ask() -> None:
        headers = {"Authorization": "Bearer secret"}
        answers.append(httpx.post(f"{hosted.url}/generate", json=REQUEST, headers=headers, timeout=60).json())

    client = threading.Thread(target=ask)
    with hosted.rank.during(message):
        before = hosted.rank.engine.core.steps
        client.start()
        time.sleep(0.3)
        assert hosted.rank.engine.core.steps == before and not answers
    client.join()
    assert answers[0]["spans"][0][0] == (7 if isinstance(message, PublishWeights) else 0)


async def test_ranks_get_weights_together_and_servers_that_joined_get_files(tmp_path: Path) -> None:
    published: list[int] = []
    written: list[Path] = []
    loaded: list[str] = []

    class Joined(ServerReplica):
        async def load(self, source: Any, version: int, in_flight: InFlight) -> None:
            loaded.append(Path(source).name)

    def write(folder: Path) -> None:
        folder.mkdir()
        written.append(folder)

    weights = GatheredWeights(published.append, WeightFiles(write, tmp_path))
    ranks = [RankReplica(rank, "http://127.0.0.1:1", ClientSettings(), "t") for rank in range(2)]
    for version in (4, 5):
        await weights.stage(version)
        for rank in ranks:
            await weights.send(rank, "keep")
        assert {(rank.version, rank.serving) for rank in ranks} == {(version, True)} and not written
    for _ in range(2):
        await weights.send(Joined("http://127.0.0.1:1", Rally()), "keep")
    assert published == [4, 5] and loaded == ["5", "5"] and len(written) == 1, "files are written once, when needed"
    weights.close()
    assert not list(tmp_path.iterdir())


async def test_an_isolated_engine_computes_the_same_bits_in_any_company() -> None:
    """In contrast to an ordinary engine, whose batches and cached prefixes change the last bits."""
    settings = EngineSettings(max_model_len=512, deterministic=True, isolated=True)
    engine = EmbeddedEngine(make_model(), settings, num_pages=400)
    prompts = [[7, 8, 9, *range(1, 4 + 5 * n)] for n in range(8)]
    params = SamplingParams(max_tokens=12, seed=3)
    async with asyncio.timeout(60):
        alone = [await engine.generate(prompt, params) for prompt in prompts]
        cancelled = asyncio.create_task(engine.generate(prompts[0], SamplingParams(max_tokens=400, seed=1)))
        crowd = asyncio.gather(*(engine.generate(prompt, params) for prompt in reversed(prompts)))
        waiting = asyncio.create_task(engine.generate(prompts[0], params))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        waiting.cancel()
        together = (await crowd)[::-1]
        await engine.close()
    assert [one.logprobs for one in together] == [one.logprobs for one in alone]
    assert all(one.cached_tokens == 0 for one in (*alone, *together))
