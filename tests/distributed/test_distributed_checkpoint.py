"""Several ranks write their own shards, any number of ranks reads them, and a checkpoint is complete or absent."""

import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pair import Case, First, critic_for, policy_for, settings
from safetensors.torch import load_file
from torch import Tensor
from train_cases import run_config, uneven_episodes

from rally.algos.credit_assignment import CreditSettings
from rally.chat import tiny_tokenizer
from rally.config import Config
from rally.distributed import worker as worker_module
from rally.distributed.controller import Controller, ControllerSettings, LostRank
from rally.distributed.process_group import ProcessGroup, Rendezvous
from rally.distributed.worker import Executor, Worker
from rally.models.sharding import ALONE, Ranks
from rally.runs.build.models import RunPlan
from rally.runs.build.policy_and_critic import policy_of
from rally.train.batch import build_batch
from rally.train.checkpoint import state_shards
from rally.train.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore, damage, open_checkpoint
from rally.train.offload import OffloadSettings
from rally.train.policy import Policy
from rally.train.update import update_policy
from rally.util.atomic_files import sync

SECONDS = 200.0
FORK = multiprocessing.get_context("fork")
CLEAN = multiprocessing.get_context("forkserver")
"""DTensor remembers the coordinate of a process in its mesh, so a process that was a rank before cannot be forked."""
CLEAN.set_forkserver_preload(["rally.distributed.worker", "transformers.models.qwen2.modeling_qwen2", "peft"])
HALF = torch.bfloat16
CASES = {
    "whole": Case(settings(), dtype=HALF),
    "offloaded": Case(settings(), offload=OffloadSettings(optimizer=True, bucket_bytes=20_000)),
    "adapters": Case(settings(), lora=True, dtype=HALF),
    "8 bits": Case(settings(), dtype=HALF, moments_8bit=True),
}


def parts_for(case: Case, ranks: Ranks) -> Executor:
    critic = critic_for(case.dtype, ranks)
    return Executor(policy_for(case, ranks), case.settings, None, critic)


def learn(parts: Executor) -> None:
    assert parts.critic is not None
    judged = parts.critic.judge(uneven_episodes(1), CreditSettings(estimator="gae"), None)
    parts.critic.update(judged.critic)
    update_policy(parts.policy, build_batch(uneven_episodes(1)), settings())


def save(parts: Executor, folder: Path, step: int, *, background: bool) -> None:
    assert parts.critic is not None
    store = CheckpointStore(folder, background=background, warn=pytest.fail)
    store.save(step, parts.policy, tiny_tokenizer(), more=[parts.critic.part()])
    store.wait()


def load(parts: Executor, checkpoint: Path) -> None:
    assert parts.critic is not None
    parts.policy.load_state(open_checkpoint(checkpoint).state())
    parts.critic.read(checkpoint)


def group_of(rank: int, count: int, place: Path) -> ProcessGroup:
    return ProcessGroup(rank, count, Rendezvous(place=str(place), secret="forked"), "cpu", SECONDS)


def copy_again(rank: int, count: int, place: Path, folder: Path, step: int) -> None:
    """A rank of several: loads the checkpoints of a step and saves them as those of the next one."""
    group = group_of(rank, count, place)
    for number, (name, case) in enumerate(CASES.items()):
        parts = parts_for(case, First(group) if rank == 0 else Worker(group))
        load(parts, folder / name / f"global_step_{step}")
        if rank == 0:
            save(parts, folder / name, step + 1, background=bool(number % 2))
        else:
            for _ in range(2):
                parts.execute(group.receive())
    dist.barrier()
    dist.destroy_process_group()


def together(work: Any, count: int, *args: Any) -> None:
    processes = [CLEAN.Process(target=work, args=(rank, count, *args)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * count


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def state_of(learner: Policy) -> dict[str, Any]:
    return {name: value for name, value in learner.state().items() if name != "schedule"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Executor]]:
    """Checkpoints of one process, then of four, of two and again of one; and what the first process had."""
    folder = tmp_path_factory.mktemp("checkpoints")
    first = {name: parts_for(case, ALONE) for name, case in CASES.items()}
    for name, parts in first.items():
        learn(parts)
        save(parts, folder / name, 1, background=False)
    together(copy_again, 4, folder / "four", folder, 1)
    together(copy_again, 2, folder / "two", folder, 2)
    for name, case in CASES.items():
        parts = parts_for(case, ALONE)
        load(parts, folder / name / "global_step_3")
        save(parts, folder / name, 4, background=False)
    return folder, first


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [2, 3, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(
    written: tuple[Path, dict[str, Executor]], name: str, step: int
) -> None:
    folder, first = written
    expected, parts = first[name], parts_for(CASES[name], ALONE)
    checkpoint = folder / name / f"global_step_{step}"
    assert damage(checkpoint) is None
    load(parts, checkpoint)
    assert expected.critic is not None and parts.critic is not None
    for mine, theirs in ((parts.policy, expected.policy), (parts.critic.learner, expected.critic.learner)):
        assert equal(state_of(mine), state_of(theirs))


def test_each_rank_writes_its_own_shards_once(written: tuple[Path, dict[str, Executor]]) -> None:
    folder, first = written
    two = folder / "whole" / "global_step_3"
    shards = [load_file(two / "trainer_shards" / f"rank_{rank}_of_2.safetensors") for rank in range(2)]
    sizes = [sum(value.nbytes for value in shard.values()) for shard in shards]
    policy = first["whole"].policy
    assert sum(sizes) == 12 * sum(p.numel() for p in policy.model.parameters())
    assert max(sizes) < 1.2 * min(sizes)
    assert (two / "trainer.pt").stat().st_size < sum(sizes) / 4
    assert len(list((two / "critic" / "optimizer_shards").iterdir())) == 2
    assert not (folder / "whole" / "global_step_4" / "trainer_shards").exists()


def test_a_missing_or_incomplete_shard_is_named(written: tuple[Path, dict[str, Executor]], tmp_path: Path) -> None:
    folder, _ = written
    checkpoint = tmp_path / "global_step_3"
    shutil.copytree(folder / "whole" / "global_step_3", checkpoint)
    shard = checkpoint / "trainer_shards" / "rank_1_of_2.safetensors"
    with pytest.raises(CheckpointError, match=r"rank_1_of_2.safetensors is missing"):
        shard.rename(tmp_path / "elsewhere")
        open_checkpoint(checkpoint)
    found = Checkpoint(checkpoint, 3)
    with pytest.raises(CheckpointError, match="lacks the file of rank 1 of 2"):
        found.state()
    (tmp_path / "elsewhere").rename(shard)
    os.replace(checkpoint / "trainer_shards" / "rank_0_of_2.safetensors", shard)
    (checkpoint / "trainer_shards" / "rank_0_of_2.safetensors").write_bytes(shard.read_bytes())
    policy = policy_for(CASES["whole"], ALONE)
    with found.restoring("trainer.pt"), pytest.raises(ValueError, match="are in no shard"):
        policy.load_state(found.state())


LARGE = 20_000  # bytes, less than the shards of a rank, more than the store through which ranks report


def troubled(rank: int, count: int, place: Path, folder: Path) -> None:
    """Rank 1 can at first write no large file. Later rank 0 sees what it has written late, and then never."""
    group = group_of(rank, count, place)
    parts = parts_for(CASES["whole"], First(group) if rank == 0 else Worker(group))
    if rank == 0:
        store = CheckpointStore(folder, background=True, warn=pytest.fail)
        store.save(1, parts.policy, tiny_tokenizer())
        with pytest.raises(CheckpointError, match=r"step 1 cannot be written to .*rank 1: .*[Ff]ile too large"):
            store.wait()
        assert not (folder / "global_step_1").exists()
        for step in (2, 3):
            store.save(step, parts.policy, tiny_tokenizer())
            store.wait()
            assert damage(folder / f"global_step_{step}") is None
            assert open_checkpoint(folder / f"global_step_{step}").state()
        state_shards.SEEN_SECONDS = 0.5
        store.save(4, parts.policy, tiny_tokenizer())
        with pytest.raises(CheckpointError, match=r"trainer_shards/rank_1_of_2.safetensors, which another rank has"):
            store.wait()
        assert not (folder / "global_step_4").exists()
    else:
        state_shards.sync = hide  # type: ignore[attr-defined]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, resource.RLIM_INFINITY))
        parts.execute(group.receive())
        message = group.receive()  # the first one has been reported by then
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        parts.execute(message)
        for _ in range(2):
            parts.execute(group.receive())
    dist.barrier()
    dist.destroy_process_group()


def hide(path: Path) -> None:
    """A network file system may list a new file of another machine late: in step 3, and never in step 4."""
    sync(path)
    if seconds := next((n for step, n in (("_3", 1.0), ("_4", 1e6)) if f"global_step{step}" in str(path)), None):
        away = path.rename(path.with_name("elsewhere"))
        timer = threading.Timer(seconds, lambda: away.rename(path))
        timer.daemon = True
        timer.start()


@pytest.mark.drill(
    "reliability", "The disk of another rank is full", "The run stops with a sentence that names the rank"
)
@pytest.mark.drill(
    "reliability", "A network file system shows the shards of other ranks late", "The checkpoint waits for all of them"
)
def test_a_checkpoint_has_the_shards_of_all_ranks_or_one_is_named(tmp_path: Path) -> None:
    together(troubled, 2, tmp_path / "rendezvous", tmp_path / "checkpoints")


class ForkedWorker:
    """The process of a worker, as a node would start it."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        process.start()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def log_tail(self) -> str:
        return "it has no log"

    async def stop(self) -> None:
        self.process.join(10)
        self.process.kill()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is forked. It never finishes the second checkpoint."""

    def launch(self: Controller, rank: int) -> ForkedWorker:
        args = (rank, self.world_size, self._rendezvous(rank), "cpu", SECONDS)
        return ForkedWorker(FORK.Process(target=worker_module.main, args=args))

    def stuck(path: Path) -> None:
        sync(path)
        if path.name == "rank_1_of_2.safetensors" and "global_step_2" in str(path):
            time.sleep(SECONDS)

    monkeypatch.setattr(Controller, "_launch", launch)
    monkeypatch.setattr(state_shards, "sync", stuck)  # for the forked rank


@contextmanager
def controller_of(tmp_path: Path) -> Iterator[Controller]:
    with Controller(ControllerSettings(world_size=2, device="cpu", logs=tmp_path)) as controller:
        yield controller


@pytest.mark.drill(
    "reliability", "`kill -9` of a rank that writes a checkpoint", "The checkpoint before it is complete and used"
)
@pytest.mark.usefixtures("forked")
def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint(home: Path, tmp_path: Path) -> None:
    config: Config = run_config(home, tmp_path / "run", "trainer.n_gpus_per_node=2", "trainer.device=cpu")
    warnings: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", background=True, warn=warnings.append)
    with suppress(LostRank), controller_of(tmp_path) as controller:
        controller.start(RunPlan(config, None, 2))
        policy = policy_of(config, None, 2, controller)
        store.save(1, policy, tiny_tokenizer())
        store.save(2, policy, tiny_tokenizer())
        [process] = controller.workers
        assert process.alive
        process.process.kill()  # type: ignore[attr-defined]
        with pytest.raises(LostRank, match="rank 1 of 2"):
            store.wait()
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert "whose writing was interrupted" in warnings[0]
