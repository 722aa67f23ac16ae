"""The teachers of on-policy distillation: frozen models that are compared with the policy at its own sampled tokens.

A teacher reads the token ids of the policy, so both must have the same vocabulary (`check_shared_vocabulary`). Each row
has one teacher, by the key of its episode. The teacher's distribution is that at temperature 1, as in verl.

Shapes: M sampled tokens, U different ones among them, K tokens of the teacher's top, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rally.algos.distillation import (
    FULL,
    TOPK,
    DistillationSettings,
    full_divergence,
    sampled_divergence,
    topk_forward_kl,
)
from rally.models.lm_head import chunk_rows, head_logits
from rally.models.sharding import ranks_of
from rally.models.vision import patches_of
from rally.train.batch import TrainBatch
from rally.train.forward.fused_layers import hidden_states
from rally.train.forward.logprobs import LogitsFunction, token_logprobs
from rally.train.packing import PackedRows, Row
from rally.train.reference import FrozenModel
from rally.types import Episode, RallyError


class TeacherError(RallyError):
    """A teacher cannot be compared with the policy."""


def check_shared_vocabulary(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, rows: int, key: str
) -> None:
    """Raise TeacherError unless every token of the student has the same id in the teacher, whose embedding has `rows`
    rows. `key` names the teacher in messages."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    advice = "distillation compares log-probabilities token by token; choose a teacher with the policy's tokenizer"
    for token, number in ours.items():
        if theirs.get(token) != number:
            other = f"{theirs[token]}" if token in theirs else "none"
            raise TeacherError(
                f"{key}: the token {token!r} has the id {number} in the policy and {other} here; {advice}"
            )
    if (last := max(ours.values())) >= rows:
        raise TeacherError(
            f"{key}: its embedding has {rows} rows and the policy's tokenizer has the id {last}; {advice}"
        )


class TeacherView(NamedTuple):
    """The divergence from the policy at the sampled tokens of a micro-batch. `of_logits` computes it, and further
    columns, from the policy's logits; without it, `divergence` computes it from log-probabilities."""

    divergence: Callable[[Tensor], Tensor] | None = None
    of_logits: LogitsFunction | None = None
    columns: tuple[str, ...] = ()


@dataclass
class Teachers:
    """The teachers by key. A single one teaches all episodes. With `offload`, at most one is on the device."""

    models: Mapping[str, FrozenModel]
    settings: DistillationSettings
    vocabulary: int  # of the policy's logits
    route: Callable[[Episode], str | None] = lambda episode: episode.task.data_source
    route_key: str = "data_source"

    def __post_init__(self) -> None:
        self._awake: int | None = None
        self._names = list(self.models)

    def assigned(self, batch: TrainBatch, episodes: Sequence[Episode]) -> TrainBatch:
        """The batch with the teacher of each row. TeacherError if an episode has none."""
        if len(self.models) == 1:
            return batch
        numbers = [self._number(episode) for episode in episodes]
        return replace(batch, rows=[replace(row, teacher=numbers[row.episode]) for row in batch.rows])

    def _number(self, episode: Episode) -> int:
        name = self.route(episode)
        if name is None or name not in self.models:
            known = ", ".join(self._names)
            raise TeacherError(
                f"no teacher has the key {name!r}, the {self.route_key} of episode {episode.id} (keys: {known}); set "
                "distillation.teacher_models.*.key to cover every row"
            )
        return self._names.index(name)

    def by_teacher(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The rows of each teacher that has any: a micro-batch has one teacher."""
        return [found for i in range(len(self.models)) if (found := [row for row in rows if row.teacher == i])]

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A context after which every teacher is where it rests."""
        try:
            yield
        finally:
            self._use(None)

    def _use(self, number: int | None) -> FrozenModel | None:
        if self._awake is not None and self._awake != number:
            self.models[self._names[self._awake]].sleep()
        self._awake = number
        if number is None:
            return None
        frozen = self.models[self._names[number]]
        frozen.wake()
        return frozen

    @torch.no_grad()
    def __call__(self, packed: PackedRows, number: int) -> TeacherView:
        """The view of teacher `number` on a micro-batch."""
        frozen = self._use(number)
        assert frozen is not None
        model, settings = frozen.model, self.settings
        if packed.images is not None and patches_of(model) is None:
            raise TeacherError(
                f"the teacher {self._names[number]} takes no images, and rows of its key have some; choose a vision "
                "model for them"
            )
        if settings.mode == TOPK:
            return self._topk_view(model, packed)
        if settings.mode in FULL:
            return _full_view(model, packed, settings)
        teacher_logp_M = token_logprobs(model, packed).logp_M
        return TeacherView(lambda logp_M: sampled_divergence(logp_M, teacher_logp_M, settings.mode))

    def _topk_view(self, model: PreTrainedModel, packed: PackedRows) -> TeacherView:
        work = partial(_topk, count=self.settings.topk, vocabulary=self.vocabulary)
        ids_UK, logp_UK = ranks_of(model).summon(model, work, packed)

        def of_logits(logits_XV: Tensor, at: slice) -> Tensor:
            return torch.stack(topk_forward_kl(logits_XV, ids_UK[at], logp_UK[at], self.settings.min_logp), 1)

        return TeacherView(of_logits=of_logits, columns=("student_mass", "teacher_mass", "overlap_ratio"))


def _topk(model: PreTrainedModel, packed: PackedRows, *, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens below `vocabulary` and their log-probabilities, at each position."""
    parts = []
    for logits in _logits(model, hidden_states(model, packed).index_select(0, packed.predict_U)):
        best, ids = logits[:, :vocabulary].topk(min(count, vocabulary, logits.shape[1]))
        parts.append((ids, best - torch.logsumexp(logits, -1, keepdim=True)))
    ids_UK, logp_UK = (torch.cat(x) for x in zip(*parts, strict=True))
    return ids_UK, logp_UK


def _logits(model: PreTrainedModel, hidden_UC: Tensor) -> Iterator[Tensor]:
    for hidden in hidden_UC.split(chunk_rows(model.config.get_text_config().vocab_size, hidden_UC.device)):
        yield head_logits(model, hidden).float()


def _full_view(model: PreTrainedModel, packed: PackedRows, settings: DistillationSettings) -> TeacherView:
    hidden_UC = hidden_states(model, packed).index_select(0, packed.predict_U)

    def of_logits(logits_XV: Tensor, at: slice) -> Tensor:
        with torch.no_grad():
            teacher_XV = head_logits(model, hidden_UC[at]).float()
        return full_divergence(logits_XV, teacher_XV, settings.mode, settings.beta)[:, None]

    return TeacherView(of_logits=of_logits)
