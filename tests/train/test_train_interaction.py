"""An agent with several tries learns from a simulated user: a whole run from rows and a YAML file.

The task is to name one digit. A small model is fine-tuned on the form of an answer and of a second try, with random
digits. The GSM8K user says whether an answer is right, and the reward is that of the last answer.
"""

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from train_cases import Paper, run_config
from transformers import PreTrainedModel

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import Config, load_config
from rally.data import write_rows
from rally.demo.training_stages import small_model
from rally.interactions import InteractionError
from rally.interactions.gsm8k import WRONG
from rally.models import attention
from rally.runs.dry_run import dry_run
from rally.runs.train import train
from rally.sft.training import SftSettings, conversation_row, sft_step
from rally.track import RunFolder
from rally.train.policy import OptimizerSettings, Policy

pytestmark = pytest.mark.slow

QUESTION = {"role": "user", "content": "Which?"}


def teach(model: PreTrainedModel, codec: ChatCodec, steps: int) -> None:
    """Two tries with random digits; the user's message between them is observed, not trained on."""
    rng = random.Random(0)
    settings = SftSettings(batch_size=16, max_length=256)
    policy = Policy(model, OptimizerSettings(lr=3e-3, weight_decay=0.0, schedule="linear", warmup_steps=5), steps)
    for _ in range(steps):
        tries = [(f"#### {rng.randrange(10)}", f"#### {rng.randrange(10)}") for _ in range(settings.batch_size)]
        talks = [
            [
                QUESTION,
                {"role": "assistant", "content": first},
                {"role": "user", "content": WRONG},
                {"role": "assistant", "content": second},
            ]
            for first, second in tries
        ]
        sft_step(policy, [conversation_row(codec, talk, settings) for talk in talks], settings)


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guesser")
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [QUESTION],
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"interaction_kwargs": {"name": "gsm8k", "query": "Which?", "ground_truth": "7"}},
    }
    write_rows([row] * 8, folder / "train.parquet")
    users = "interaction: [{name: gsm8k, config: {max_tries: 2}}]"
    (folder / "users.yaml").write_text(users, encoding="utf-8")
    tokenizer = tiny_tokenizer()
    model = small_model(tokenizer, 0)
    attention.install(model)
    teach(model, ChatCodec(tokenizer, "hermes"), 40)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def config_of(home: Path, out: Path, **rollout: Any) -> Config:
    tree: dict[str, Any] = {
        "data": {
            "train_files": str(home / "train.parquet"),
            "train_batch_size": 4,
            "max_prompt_length": 32,
            "max_response_length": 192,
        },
        "actor_rollout_ref": {
            "model": {"path": str(home / "model"), "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}},
            "rollout": {"n": 8, "multi_turn": {"interaction_config_path": str(home / "users.yaml")}, **rollout},
        },
        "reward": {"num_workers": 1},
        "trainer": {"default_local_dir": str(out), "total_training_steps": 12, "save_freq": -1},
    }
    return load_config(base=tree)


def test_an_agent_that_may_try_again_learns_from_its_user(guesser: Path, tmp_path: Path) -> None:
    train(config_of(guesser, tmp_path), Paper().console)
    steps = [row.metrics for row in RunFolder(tmp_path).read_metrics()]
    first, last = steps[:2], steps[-3:]
    reward = "critic/rewards/mean"
    assert fmean(m[reward] for m in last) > fmean(m[reward] for m in first) + 0.3
    assert fmean(m["interaction/turns/mean"] for m in last) < fmean(m["interaction/turns/mean"] for m in first)
    assert sum(m["interaction/failures"] for m in steps) == 0 and steps[0]["stop/stop"] > 0.8
    episodes = list(RunFolder(tmp_path).read_episodes(1))
    assert {e.reward for e in episodes if e.extra["interaction"]["score"] == 1.0} == {1.0}
    assert any([t.role for t in e.turns] == ["assistant", "user", "assistant", "user"] for e in episodes)


def test_a_dry_run_names_the_users(guesser: Path, tmp_path: Path) -> None:
    paper = Paper()
    dry_run(config_of(guesser, tmp_path), paper.console)
    [line] = [line for line in paper.text.splitlines() if "simulated users" in line]
    assert "gsm8k" in line


def test_rows_that_ask_for_a_user_need_one(guesser: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InteractionError, match=r"row train:0 names the interaction 'gsm8k', but the interactions are: none"
    ):
        train(config_of(guesser, tmp_path, multi_turn={}), Paper().console)


def test_a_user_file_that_is_missing_is_found_before_anything_runs(guesser: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"multi_turn.interaction_config_path=\S+ does not exist; check the path"):
        config_of(guesser, tmp_path, multi_turn={"interaction_config_path": str(tmp_path / "none.yaml")})


def test_rows_without_a_user_run_beside_a_user_file(home: Path, guesser: Path, tmp_path: Path) -> None:
    path = f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={guesser / 'users.yaml'}"
    outcome = train(run_config(home, tmp_path, path, "trainer.total_training_steps=1"), Paper().console)
    assert outcome.steps == 1
    [*_, last] = RunFolder(tmp_path).read_metrics()
    assert not [name for name in last.metrics if name.startswith("interaction/")]
