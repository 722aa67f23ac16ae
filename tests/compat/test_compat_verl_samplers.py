"""Samplers written for verl run unchanged, and a resumed run repeats their order or says why it cannot."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_cases import Paper, episode, run_config, segment

from rally.compat.verl.samplers import VerlSampler, batch_of
from rally.data import SamplerSettings, load_tasks, write_rows
from rally.data.row_files import DataError
from rally.runs.build.data import sampler_of
from rally.runs.train import train
from rally.track import RunFolder

FILE = """
import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import RandomSampler
from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler


class Shuffled(AbstractCurriculumSampler):
    # As in verl's test: update does nothing, and the random numbers are torch's global ones.
    def __init__(self, data_source, data_config: DictConfig):
        assert data_config.train_batch_size
        self.sampler = RandomSampler(data_source=data_source)

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)

    def update(self, batch: DataProto) -> None:
        return


class Hardest(AbstractCurriculumSampler):
    # The rows with the lowest scores first; its state is what it has learned and where it is.
    def __init__(self, data_source, data_config):
        self.scores, self.at = [0.0] * len(data_source), 0
        self.answers = [row["reward_model"]["ground_truth"] for row in data_source]

    def __len__(self):
        return len(self.scores)

    def __iter__(self):
        while self.at < len(self.scores):
            self.at += 1
            yield int(np.argsort(self.scores, kind="stable")[self.at % len(self.scores)])
        self.at = 0

    def update(self, batch):
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        for extra, score in zip(batch.non_tensor_batch["extra_info"], scores):
            self.scores[extra["index"]] += 1 + score

    def state_dict(self):
        return {"scores": self.scores, "at": self.at}

    def load_state_dict(self, state):
        self.scores, self.at = list(state["scores"]), state["at"]


class Forgets(Hardest):
    state_dict = load_state_dict = property()


class Halting(Hardest):
    def load_state_dict(self, state):
        self.scores = list(state["scores"])


class Tensors(Hardest):
    def state_dict(self):
        return {"scores": torch.tensor(self.scores), "at": self.at}


class Odd(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.data_source = data_source

    def __iter__(self):
        import time
        return iter([time.perf_counter_ns() % len(self.data_source) for _ in self.data_source])

    def __len__(self):
        return len(self.data_source)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samplers")
    (folder / "samplers.py").write_text(FILE)
    write_rows(
        (
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{i}+1?"}],
                "reward_model": {"ground_truth": str(i + 1)},
                "extra_info": {"index": i},
            }
            for i in range(10)
        ),
        folder / "train.parquet",
    )
    return folder


def sampler(folder: Path, name: str, seed: int = 3) -> VerlSampler:
    from rally.data import load_sampler_class

    cls = load_sampler_class(str(folder / "samplers.py"), name, (object,))
    settings = SamplerSettings(batch_size=3, total_steps=20, seed=seed)
    tasks = load_tasks([str(folder / "train.parquet")])
    keys = type("Keys", (), {"train_batch_size": 3})()
    return VerlSampler(lambda rows: cls(data_source=rows, data_config=keys), tasks, settings)


def played(one: VerlSampler, steps: Sequence[int]) -> list[list[int]]:
    """Draw and learn step by step, with a score that depends on the row."""
    drawn = []
    for step in steps:
        rows = list(one.batch(step))
        assert list(one.batch(step)) == rows
        rng = random.Random(step)
        one.update(step, [_scored(one, row, row % 4, rng) for row in rows])
        drawn.append(rows)
    return drawn


def _scored(one: VerlSampler, row: int, reward: float, rng: random.Random) -> Any:
    return episode(f"e{row}", f"g{row}", reward, segment(rng, "sso"), task=one.tasks[row])


@pytest.mark.parametrize("name", ["Shuffled", "Hardest"])
def test_a_resumed_run_repeats_the_order(folder: Path, name: str) -> None:
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    whole = played(sampler(folder, name), range(1, 9))
    after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    first = sampler(folder, name)
    played(first, range(1, 5))
    first.batch(5)  # drawn ahead, as asynchronous training does
    state = json.loads(json.dumps(first.state()))
    torch.rand(5)  # a resumed process has other random numbers
    resumed = sampler(folder, name)
    resumed.load_state(state)
    ahead = list(first.batch(5)) if name == "Hardest" else whole[4]
    assert list(resumed.batch(5)) == ahead
    if name == "Shuffled":
        assert played(resumed, range(5, 9)) == whole[4:]
        assert whole != played(sampler(folder, name, seed=4), range(1, 9))
        assert all(len({row for rows in whole[i : i + 3] for row in rows}) == 9 for i in (0, 3))  # the tenth is dropped


def test_a_restored_curriculum_goes_on_with_what_it_learned(folder: Path) -> None:
    whole, first, resumed = (sampler(folder, "Hardest") for _ in range(3))
    rows = played(whole, range(1, 9))
    played(first, range(1, 5))
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert played(resumed, range(5, 9)) == rows[4:] != played(sampler(folder, "Hardest"), range(1, 5))


def test_what_cannot_be_repeated_is_said(folder: Path) -> None:
    learned = sampler(folder, "Forgets")
    with pytest.warns(UserWarning, match=r"Forgets.update changes the sampler, .* cannot be resumed"):
        played(learned, [1])
    with pytest.raises(DataError, match="Forgets learned from its updates"):
        sampler(folder, "Forgets").load_state(learned.state())
    with pytest.raises(DataError, match=r"after Halting.load_state_dict.* the next rows are others"):
        sampler(folder, "Halting")
    with pytest.raises(DataError, match=r"Tensors.state_dict.. is no JSON value"):
        sampler(folder, "Tensors")
    odd = sampler(folder, "Odd")
    played(odd, [1, 2, 3])
    with pytest.raises(DataError, match="Odd drew other rows than before"):
        sampler(folder, "Odd").load_state(odd.state())
    with pytest.raises(DataError, match="state of the sampler Odd and not Shuffled"):
        sampler(folder, "Shuffled").load_state(odd.state())
    with pytest.raises(DataError, match="filter_groups"):
        odd.further(1)


def test_an_update_gets_the_episodes_as_columns() -> None:
    rng = random.Random(0)
    told = batch_of([episode("a", "g", 1.5, segment(rng, "sso", prompt=2)), episode("b", "g", 0.5, segment(rng, "s"))])
    assert told.batch["token_level_scores"].tolist() == [[0.0, 0.0, 1.5], [0.5, 0.0, 0.0]]
    assert told.batch["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert told.batch["attention_mask"].sum(-1).tolist() == [5, 6] and len(told) == 2
    assert told.non_tensor_batch["uid"].tolist() == ["g", "g"]
    with pytest.raises(DataError, match="has no 'advantages'; it has attention_mask, input_ids"):
        told.batch["advantages"]


def test_a_run_draws_its_rows_from_a_sampler_of_verl(home: Path, folder: Path, tmp_path: Path, paper: Paper) -> None:
    keys = [f"data.sampler.class_path={folder / 'samplers.py'}", "data.sampler.class_name=Hardest"]
    drawn = []
    for out, stops in ((tmp_path / "whole", (2,)), (tmp_path / "resumed", (1, 2))):
        for steps in stops:
            train(run_config(home, out, *keys, f"trainer.total_training_steps={steps}"), paper.console)
        drawn.append([{e.task.id for e in RunFolder(out).read_episodes(step)} for step in (1, 2)])
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


@pytest.fixture
def shorter(folder: Path) -> Iterator[Path]:
    path = folder / "shorter.py"
    path.write_text(FILE.replace("return len(self.sampler)", "return 3"))
    yield path


def test_an_epoch_of_another_length_needs_a_number_of_steps(home: Path, shorter: Path, tmp_path: Path) -> None:
    keys = [f"data.sampler.class_path={shorter}", "data.sampler.class_name=Shuffled"]
    config = run_config(home, tmp_path, *keys, "trainer.total_training_steps=null")
    with pytest.raises(DataError, match=r"an epoch of Shuffled has 3 rows .* set trainer.total_training_steps"):
        sampler_of(config, load_tasks([str(home / "train.parquet")]), 4)
