"""The teachers of on-policy distillation: frozen models that are compared with the policy at its own sampled tokens.

A teacher reads the token ids of the policy, so both must have the same vocabulary (`check_shared_vocabulary`). Each row
has one teacher, by the key of its episode. The teacher's distribution is that at temperature 1, as in verl.

A teacher is a model in process, or a server (`ServedTeacher`), which is asked for all rows of a step before its update.

Shapes: M sampled tokens, U different ones among them, K tokens of the teacher's top, C hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.algos.distillation import (
    FULL,
    TOPK,
    DistillationSettings,
    full_divergence,
    sampled_divergence,
    topk_forward_kl,
)
from rally.engines.base import EngineError, PromptLogprobs
from rally.engines.remote.prompt_logprobs import PromptLogprobsClient, PromptQuery, ServedVocabulary
from rally.models.lm_head import chunk_rows, head_logits
from rally.models.sequence_parallel import pair_share
from rally.models.sharding import ranks_of
from rally.models.vision import patches_of
from rally.platforms import from_host
from rally.train.batch import TrainBatch
from rally.train.forward.fused_layers import hidden_states
from rally.train.forward.logprobs import LogitsFunction, token_logprobs
from rally.train.packing import PackedRows, Row, TeacherTokens
from rally.train.reference import FrozenModel
from rally.types import Episode, RallyError

T = TypeVar("T")


class TeacherError(RallyError):
    """A teacher cannot be compared with the policy."""


def check_shared_vocabulary(ours: Mapping[str, int], theirs: Mapping[str, int], rows: int, key: str) -> None:
    """Raise TeacherError unless every token of the student (`ours`) has the same id in the teacher, whose embedding has
    `rows` rows. `key` names the teacher in messages."""
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


GRAMMAR = (
    "a teacher cannot judge tokens that were sampled under a grammar; leave response_format, tool_choice and "
    "parallel_tool_calls out of the agent's requests, or train without distillation"
)


class ServedTeacher:
    """A teacher behind a server. It answers with the log-probabilities of the sampled tokens or of its likeliest ones,
    so losses over the whole vocabulary are not possible."""

    def __init__(self, client: PromptLogprobsClient) -> None:
        self.client = client

    def wake(self) -> None:
        """Nothing to do: its weights are elsewhere."""

    sleep = wake

    def check(self, max_length: int, settings: DistillationSettings) -> ServedVocabulary | None:
        """Raise TeacherError unless the server can be used; returns its own vocabulary if it tells it."""
        return self._run(self._checked, max_length, settings.topk if settings.mode == TOPK else 0)

    def answered(self, rows: Sequence[Row], topk: int | None, vocabulary: int) -> list[Row]:
        """The rows with the teacher's answers at their sampled tokens. `topk` None asks for these tokens only."""
        if any(row.images for row in rows):
            raise TeacherError(
                f"the teacher at {self.client.name} is sent token ids only, and rows of its key have images; load it "
                "in process (leave server.url out)"
            )
        asked = [row for row in rows if len(row.sampled)]
        queries = [
            PromptQuery(row.ids[: row.sampled[-1] + 1].tolist(), int(row.sampled[0]), topk or 0) for row in asked
        ]
        answers = iter(self._run(self.client.score, queries))
        nothing = PromptLogprobs([], [], [])
        return [
            self._with_answer(row, next(answers) if len(row.sampled) else nothing, topk, vocabulary) for row in rows
        ]

    async def _checked(self, max_length: int, top: int) -> ServedVocabulary | None:
        await self.client.check(max_length, top)
        return await self.client.vocabulary()

    def _with_answer(self, row: Row, answer: PromptLogprobs, topk: int | None, vocabulary: int) -> Row:
        at = (row.sampled - row.sampled[:1]).tolist()
        if topk is None:
            ids = row.ids[row.sampled][:, None].tolist()
            logp = [[answer.logprobs[i]] for i in at]
        else:
            ids, logp = [answer.top_ids[i] for i in at], [answer.top_logprobs[i] for i in at]
        ids_MK = np.array(ids, np.int64).reshape(len(at), topk or 1)
        logp_MK = np.array(logp, np.float32).reshape(len(at), topk or 1)
        if (largest := int(ids_MK.max(initial=0))) >= vocabulary:
            raise TeacherError(
                f"the teacher at {self.client.name} has the token id {largest} among its {topk} likeliest, and the "
                f"policy has {vocabulary} ids; use a loss_mode of the sampled token, or load the teacher in process"
            )
        return replace(row, teacher_tokens=TeacherTokens(ids_MK, logp_MK))

    def _run(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a coroutine in a thread of its own, since the caller may be inside an event loop."""
        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(lambda: asyncio.run(work(*args))).result()
            except EngineError as problem:
                raise TeacherError(f"the served teacher cannot be used: {problem}") from problem


class TeacherView(NamedTuple):
    """The divergence from the policy at the sampled tokens of a micro-batch. `of_logits` computes it, and further
    columns, from the policy's logits; without it, `divergence` computes it from log-probabilities."""

    divergence: Callable[[Tensor], Tensor] | None = None
    of_logits: LogitsFunction | None = None
    columns: tuple[str, ...] = ()


@dataclass
class Teachers:
    """The teachers by key. A single one teaches all episodes. With `offload`, at most one is on the device."""

    models: Mapping[str, FrozenModel | ServedTeacher]
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

    def answered(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the answers of the served teachers, which it asks now."""
        if any(row.allowed for row in batch.rows):
            raise TeacherError(GRAMMAR)
        rows = list(batch.rows)
        for number, teacher in enumerate(self.models.values()):
            if isinstance(teacher, ServedTeacher):
                assert self.settings.mode not in FULL, "a served teacher gives no whole distribution"
                chosen = [i for i, row in enumerate(rows) if row.teacher == number]
                topk = min(self.settings.topk, self.vocabulary) if self.settings.mode == TOPK else None
                answers = teacher.answered([rows[i] for i in chosen], topk, self.vocabulary)
                for i, row in zip(chosen, answers, strict=True):
                    rows[i] = row
        return replace(batch, rows=rows)

    def by_teacher(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The rows of each teacher that has any: a micro-batch has one teacher."""
        return [found for i in range(len(self.models)) if (found := [row for row in rows if row.teacher == i])]

    @property
    def largest_resting(self) -> int:
        """The bytes of the largest teacher that is in main memory and comes to the device when it is asked."""
        return max((one.resting_bytes for one in self.models.values() if isinstance(one, FrozenModel)), default=0)

    @property
    def chunks(self) -> int:
        """How often the divergence holds a chunk of the policy's logits in float32."""
        return self.settings.chunks

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A context after which every teacher is where it rests."""
        try:
            yield
        finally:
            self._use(None)

    def _use(self, number: int | None) -> FrozenModel | ServedTeacher | None:
        if self._awake is not None and self._awake != number:
            self.models[self._names[self._awake]].sleep()
        self._awake = number
        if number is None:
            return None
        frozen = self.models[self._names[number]]
        frozen.wake()
        return frozen

    @torch.no_grad()
    def __call__(self, packed: PackedRows, rows: Sequence[Row]) -> TeacherView:
        """The view of the teacher of `rows` on a micro-batch, which packs them."""
        number, settings = rows[0].teacher, self.settings
        teacher = self._use(number)
        assert teacher is not None
        if packed.masks is not None:
            raise TeacherError(GRAMMAR)
        if isinstance(teacher, ServedTeacher):
            return self._served_view(packed, rows)
        model = teacher.model
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

    def _served_view(self, packed: PackedRows, rows: Sequence[Row]) -> TeacherView:
        """The view from the answers that the rows hold."""
        answers = [row.teacher_tokens for row in rows if row.teacher_tokens is not None]
        assert len(answers) == len(rows), "the teacher has not been asked"
        device = packed.pair_M.device
        logp_MK = from_host(torch.from_numpy(np.concatenate([answer.logp_MK for answer in answers])), device)
        if self.settings.mode != TOPK:
            return TeacherView(lambda logp_M: sampled_divergence(logp_M, logp_MK[:, 0], self.settings.mode))
        ids_MK = from_host(torch.from_numpy(np.concatenate([answer.ids_MK for answer in answers])), device)
        count = len(packed.pair_M)
        numbers_M = torch.arange(count, device=device)
        first_U = torch.full_like(packed.predict_U, count).scatter_reduce(0, packed.pair_M, numbers_M, "amin")
        return self._topk_loss(ids_MK[first_U], logp_MK[first_U])

    def _topk_view(self, model: PreTrainedModel, packed: PackedRows) -> TeacherView:
        work = partial(_topk, count=self.settings.topk, vocabulary=self.vocabulary)
        return self._topk_loss(*ranks_of(model).summon(model, work, packed))

    def _topk_loss(self, ids_UK: Tensor, logp_UK: Tensor) -> TeacherView:
        def of_logits(logits_XV: Tensor, at: slice) -> Tensor:
            return torch.stack(topk_forward_kl(logits_XV, ids_UK[at], logp_UK[at], self.settings.min_logp), 1)

        return TeacherView(of_logits=of_logits, columns=("student_mass", "teacher_mass", "overlap_ratio"))


def _topk(model: PreTrainedModel, packed: PackedRows, *, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens below `vocabulary` and their log-probabilities, at each position."""
    parts = []
    share = pair_share(ranks_of(model).sequence_group, packed.predict_U, len(packed.ids_T))
    for logits in _logits(model, hidden_states(model, packed).index_select(0, share.positions_U)):
        best, ids = logits[:, :vocabulary].topk(min(count, vocabulary, logits.shape[1]))
        parts.append((ids, best - torch.logsumexp(logits, -1, keepdim=True)))
    ids_UK, logp_UK = (share.gather(torch.cat(x)) for x in zip(*parts, strict=True))
    return ids_UK, logp_UK


def _logits(model: PreTrainedModel, hidden_UC: Tensor) -> Iterator[Tensor]:
    for hidden in hidden_UC.split(chunk_rows(model.config.get_text_config().vocab_size, hidden_UC.device)):
        yield head_logits(model, hidden).float()


def _full_view(model: PreTrainedModel, packed: PackedRows, settings: DistillationSettings) -> TeacherView:
    assert ranks_of(model).sequence_group is None, "losses over the whole vocabulary are for one GPU"
    hidden_UC = hidden_states(model, packed).index_select(0, packed.predict_U)

    def of_logits(logits_XV: Tensor, at: slice) -> Tensor:
        with torch.no_grad():
            teacher_XV = head_logits(model, hidden_UC[at]).float()
        return full_divergence(logits_XV, teacher_XV, settings.mode, settings.beta)[:, None]

    return TeacherView(of_logits=of_logits)
