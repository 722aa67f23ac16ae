"""A classifier scores conversations exactly as transformers does for each alone, and never cuts one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_cases import Paper, run_config
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForSequenceClassification

from rally.chat.tiny_tokenizer import tiny_tokenizer
from rally.config import ConfigError
from rally.rewards import RewardError, Score
from rally.rewards.reward_model import ClassifierScorer, ClassifierSettings, conversation
from rally.runs.train import train
from rally.track import RunFolder
from rally.types import Episode, Generation, Segment, StopReason, Task, Turn


def classifier(labels: int = 1, pad: int | None = None) -> PreTrainedModel:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        num_labels=labels,
        pad_token_id=pad,
    )
    return Qwen2ForSequenceClassification(config).eval()


def episode(*texts: str) -> Episode:
    roles = ("assistant", "user")
    turns = tuple(Turn(role=roles[i % 2], text=text) for i, text in enumerate(texts))
    task = Task(id="0", data_source="any", prompt=({"role": "user", "content": "What is 2+3?"},))
    token = Segment(prompt_ids=(0,)).append_sampled(Generation(ids=(0,), logprobs=(0.0,), finish="stop"))
    return Episode(id=str(texts), task=task, group="g", stop_reason=StopReason.STOP, turns=turns, segments=(token,))


EPISODES = [episode("5"), episode("It is 5, because 2 and 3 make 5."), episode("4", "No.", "5 then"), episode("x" * 40)]


def scores_of(model: PreTrainedModel, episodes: Sequence[Episode] = EPISODES, **settings: int | bool) -> list[Score]:
    async def score() -> list[Score]:
        chosen = ClassifierSettings(**settings)  # type: ignore[arg-type]
        async with ClassifierScorer(lambda: (model, tiny_tokenizer()), chosen) as scorer:
            return await scorer.score_batch(episodes)

    return asyncio.run(score())


def alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, one: Episode) -> float:
    text = tokenizer.apply_chat_template(conversation(one), tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])


@pytest.mark.parametrize("end_is_padding", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batches_score_as_transformers_does_one_by_one(batch_size: int, end_is_padding: bool) -> None:
    tokenizer = tiny_tokenizer()
    model = classifier(pad=tokenizer.eos_token_id if end_is_padding else None)
    found = scores_of(model, batch_size=batch_size, offload=True)
    expected = [alone(model, tokenizer, one) for one in EPISODES]
    assert [score.reward for score in found] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == len(EPISODES), "the conversations are told apart"
    assert model.config.pad_token_id == (tokenizer.eos_token_id if end_is_padding else None)


def test_a_conversation_that_is_too_long_is_an_error_and_the_others_are_scored() -> None:
    found = scores_of(classifier(), max_length=40)
    errors = [score.error for score in found]
    assert errors[0] is None and found[0].reward is not None
    assert errors[3] is not None and "tokens for the reward model, which takes 40" in errors[3]


def test_an_episode_that_failed_is_not_scored() -> None:
    failed = Episode(id="f", task=EPISODES[0].task, group="g", stop_reason=StopReason.ERROR, error="it broke")
    [score] = scores_of(classifier(), [failed])
    assert score.reward is None and "it broke" in str(score.error)


def test_a_classifier_needs_one_label_and_a_template() -> None:
    with pytest.raises(RewardError, match="3 labels"):
        scores_of(classifier(labels=3))
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(RewardError, match="no chat template"):
        asyncio.run(ClassifierScorer(lambda: (classifier(), bare), ClassifierSettings()).start())


@pytest.mark.parametrize("prefix", ["reward_model.model.path", "reward.reward_model.model_path"])
def test_a_run_is_scored_by_the_classifier_of_either_spelling(
    prefix: str, home: Path, tmp_path: Path, paper: Paper
) -> None:
    folder = tmp_path / "classifier"
    classifier().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    section = prefix.rpartition(".m")[0].removesuffix(".model")
    keys = [
        f"{section}.enable=True",
        f"{prefix}={folder}",
        f"{section}.rollout.name=vllm",
        "custom_reward_function.path=null",
        "trainer.total_training_steps=1",
    ]
    if section == "reward_model":
        keys += ["reward_model.micro_batch_size_per_gpu=3", "reward_model.model.fsdp_config.param_offload=True"]
    train(run_config(home, tmp_path / "run", *keys), paper.console)
    run = RunFolder(tmp_path / "run")
    [last] = [row.metrics for row in run.read_metrics() if row.step]
    assert last["reward/missing"] == 0 and last["reward/score/mean"] != 0
    episodes = run.read_episodes(1)
    model, tokenizer = classifier(), tiny_tokenizer()
    assert [one.reward for one in episodes] == pytest.approx(
        [alone(model, tokenizer, one) for one in episodes], abs=1e-4
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("reward_model.enable=true", "custom_reward_function.path=null"), "set reward_model.model.path"),
        (("reward_model.server.url=http://x:1",), "no effect without reward_model.enable=true"),
        (("reward_model.enable=true", "reward_model.server.url=https://x/v1"), "must have the form http://HOST:PORT"),
        (
            (
                "reward_model.enable=true",
                "reward_model.model.path=m",
                "reward_model.rollout.tensor_model_parallel_size=2",
            ),
            "reward_model.rollout.name=vllm or sglang",
        ),
    ],
)
def test_a_reward_model_that_cannot_be_used_is_refused(
    keys: tuple[str, ...], message: str, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(home, tmp_path, *keys)


def test_a_conversation_that_is_not_shown_whole_is_an_error() -> None:
    silent = tiny_tokenizer()
    silent.chat_template = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"

    async def scored(tokenizer: PreTrainedTokenizerBase, one: Episode) -> Score:
        async with ClassifierScorer(lambda: (classifier(), tokenizer), ClassifierSettings()) as scorer:
            return await scorer.score(one)

    left = asyncio.run(scored(silent, episode("5")))
    assert "leaves out a message of the role user" in str(left.error)
    picture = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    seen = replace(episode("5"), task=Task(id="0", data_source="any", prompt=(picture,)))
    assert "has images, and the reward model reads text only" in str(asyncio.run(scored(tiny_tokenizer(), seen)).error)
