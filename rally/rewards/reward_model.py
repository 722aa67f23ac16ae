"""Scores whole conversations with a sequence classifier in process.

A conversation is rendered with the classifier's own chat template. Its reward is the classifier's single logit, exactly
as transformers computes it for the conversation alone: padding never changes which token is read. Nothing is cut or
left out: a conversation that is too long, has images, or that the template does not show whole is an error of its
episode.

Shapes: B conversations, L tokens of the longest.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rally.images.loading import has_images
from rally.rewards.score import RewardError, Score, describe
from rally.rewards.score_inputs import message_text
from rally.types import Episode

Load = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """Conversations per forward, the longest one in tokens, and whether the model rests in main memory."""

    batch_size: int = 8
    max_length: int | None = None  # None: the limit of the model
    offload: bool = False


class ClassifierScorer:
    """Scores episodes with a classifier, which `load` loads when the scorer starts."""

    def __init__(self, load: Load, settings: ClassifierSettings) -> None:
        self._load, self._settings = load, settings
        self._model: PreTrainedModel | None = None
        self._lock = threading.Lock()  # one forward at a time

    async def start(self) -> None:
        """Load the model. Raises RewardError if it is not a classifier with one label."""
        model, self._tokenizer = await asyncio.to_thread(self._load)
        self._model = model
        labels = model.config.num_labels
        if labels != 1:
            raise RewardError(
                f"the reward model has {labels} labels, and a reward is one number; set reward_model.model.path to a "
                "sequence classifier with one label"
            )
        if self._tokenizer.chat_template is None:
            raise RewardError(
                "the tokenizer of the reward model has no chat template to render conversations with; choose a reward "
                "model that has one, or write a reward function"
            )
        self._device = model.device
        limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._longest = min((n for n in (limit, self._settings.max_length) if n), default=None)
        self._rest()

    async def close(self) -> None:
        self._model = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def score(self, episode: Episode) -> Score:
        [score] = await self.score_batch([episode])
        return score

    async def score_batch(self, episodes: Sequence[Episode]) -> list[Score]:
        """The scores of all episodes; an error for those that cannot be rendered or are too long."""
        return await asyncio.to_thread(self._locked, episodes)

    def _locked(self, episodes: Sequence[Episode]) -> list[Score]:
        with self._lock:
            return self._score(episodes)

    def _score(self, episodes: Sequence[Episode]) -> list[Score]:
        inputs = [self._encoded(episode) for episode in episodes]
        whole = sorted((i for i, ids in enumerate(inputs) if isinstance(ids, list)), key=lambda i: len(inputs[i]))
        rewards: dict[int, Score] = {}
        size = self._settings.batch_size
        try:
            for first in range(0, len(whole), size):
                chosen = whole[first : first + size]
                began = time.perf_counter()
                found = self._logits([list(inputs[i]) for i in chosen])  # type: ignore[arg-type]
                seconds = (time.perf_counter() - began) / len(chosen)
                rewards |= {
                    i: Score.of({"score": value, "reward_model/tokens": len(inputs[i])}, seconds)
                    for i, value in zip(chosen, found, strict=True)
                }
        finally:
            self._rest()
        return [rewards[i] if i in rewards else Score(error=str(ids)) for i, ids in enumerate(inputs)]

    def _encoded(self, episode: Episode) -> list[int] | str:
        """The token ids of the conversation, or why it cannot be scored."""
        if episode.error is not None:
            return f"the episode failed before it could be scored: {episode.error}"
        if has_images(episode.task.prompt) or any(segment.images for segment in episode.segments):
            return (
                "the conversation has images, and the reward model reads text only; write a reward function that asks "
                "a vision model"
            )
        messages = conversation(episode)
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as problem:  # noqa: BLE001 - a template is code of the model's author and may raise anything
            return f"the chat template of the reward model cannot render the conversation ({describe(problem)})"
        if (role := left_out(messages, text)) is not None:
            return (
                f"the chat template of the reward model leaves out a message of the role {role}, so the score would be "
                "that of another conversation; choose a reward model whose template has that role"
            )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._longest is not None and len(ids) > self._longest:
            return (
                f"the conversation has {len(ids)} tokens for the reward model, which takes {self._longest}; raise "
                "reward_model.max_length if the model allows it, or shorten data.max_response_length"
            )
        return ids

    @torch.inference_mode()
    def _logits(self, rows: list[list[int]]) -> list[float]:
        model = self._model
        assert model is not None, "the scorer is not open"
        model.to(self._device)  # type: ignore[arg-type]
        width, pad = max(map(len, rows)), self._pad_id(rows)
        ids_BL = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self._device)
        mask_BL = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        before, model.config.pad_token_id = model.config.pad_token_id, pad
        try:
            logits: Any = model(input_ids=ids_BL, attention_mask=mask_BL).logits
        finally:
            model.config.pad_token_id = before
        return [float(value) for value in logits[:, 0].float().cpu()]

    def _pad_id(self, rows: list[list[int]]) -> int:
        """The padding token, by which transformers finds the last token of a row. A model that defines none reads the
        last token whatever it is, so the padding must be a token that ends no row."""
        assert self._model is not None
        known: int | None = self._model.config.pad_token_id
        if known is not None:
            return known
        ends = {row[-1] for row in rows}
        return next(i for i in range(len(ends) + 1) if i not in ends)

    def _rest(self) -> None:
        if self._settings.offload and self._model is not None:
            self._model.to("cpu")  # type: ignore[arg-type]


def left_out(messages: Sequence[Mapping[str, str]], rendered: str) -> str | None:
    """The role of a message whose longest word is not in the rendered text; None if all are there. What the policy
    wrote is not looked for: some templates leave its thoughts out."""
    for message in messages:
        words = re.findall(r"[A-Za-z0-9]{3,}", message["content"])
        if message["role"] != "assistant" and words and max(words, key=len) not in rendered:
            return message["role"]
    return None


def conversation(episode: Episode) -> list[dict[str, str]]:
    """The prompt and all turns as plain messages."""
    prompt = [{"role": str(message["role"]), "content": message_text(message)} for message in episode.task.prompt]
    return [*prompt, *({"role": turn.role, "content": turn.text} for turn in episode.turns)]
