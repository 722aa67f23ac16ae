"""Compares, before the first step, the forwards that a run will use with the module's own plain forward.

The reference is the model as transformers runs it: one row at a time, in eval mode, with its class's plain attention,
or in half precision with torch's, because the plain one rounds its scores. Compared with it are

- the training forward: several rows packed into one sequence, with a shared prefix and a branch inside it, in train
  mode;
- the rollout: two turns of three episodes at once, two of which share a prompt, as the engine recorded them.

A rollout in FP8 is compared without it first, then layer by layer: the product of each on random inputs, with that of
its weight. What it records in FP8 may differ by more. An error of rounding moves some inputs to the next number of 8
bits, and so grows within some layers to the error of FP8 itself; no two forwards in FP8 agree any better.

A difference that rounding does not explain is an error that states the numbers. Nothing has been trained by then.

Shapes: M compared tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.engines import EmbeddedEngine
from rally.engines.base import Engine
from rally.models.fp8 import LayerError
from rally.models.residence import device_of, on_device
from rally.models.sharding import ranks_of
from rally.platforms import deterministic_algorithms, fork_rng
from rally.train.forward.fused_layers import TrainingForward, choose_training_forward, hidden_states
from rally.train.forward.logprobs import token_logprobs
from rally.train.loss_inputs import recorded_logprobs
from rally.train.micro_batches import UNBOUND
from rally.train.packing import PackedRows, Row, micro_batches, pack
from rally.train.policy import Policy
from rally.train.rank_messages import CompareForwards, ComputePlain
from rally.train.reference import FrozenModel
from rally.types import RallyError, SamplingParams, Segment

SHORTEST, LONGEST = 64, 192  # tokens of a compared text
NEW_TOKENS = 12  # of a sampled turn
SMALL_PARAMETER = 2**16  # elements of a parameter whose gradient is compared
CERTAIN, FLATTER = -0.05, 8.0  # a log-probability that says little, and the factor of a temperature that says more
SHORT_WINDOW = 16
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "attention_window_size",
    "floor_scale",
    "index_topk",
    "indexer_budget",
)
KEY = "trainer.startup_check"
DETERMINISTIC = "set rollout.deterministic=false, or choose another model"
MASKED = "groups of rows are therefore computed by its own attention function with a mask, which is exact and slower"
ALONE = "its rows are therefore computed one at a time, which is exact and slower"
OTHER_FORWARDS: tuple[tuple[str | None, TrainingForward, str], ...] = (
    ("sdpa", "masked", MASKED),
    ("eager", "masked", MASKED),
    (None, "unpacked", ALONE),
    ("eager", "unpacked", ALONE),
)
"""Attention implementation, training forward, and what the user reads; in the order in which they are tried."""
NO_TEXT = "the data has no text of two tokens or more, so the training forward was not compared with the model's own"


class StartupCheckError(RallyError):
    """A forward of this run computes something else than the model."""


class Tolerance(NamedTuple):
    """The largest and the mean difference that rounding explains, as shares of the spread of the logits, which is their
    standard deviation over the vocabulary; and the relative difference of a gradient."""

    largest: float
    mean: float
    gradient: float


def tolerance_of(model: PreTrainedModel) -> Tolerance:
    """In bfloat16 Qwen2.5-Coder-1.5B measured 0.06 and 0.010 on an H200 with torch's attention as the reference, and
    1.7 and 0.085 with plain attention, which is the only one that some classes have."""
    if model.dtype in (torch.float32, torch.float64):
        return Tolerance(1e-3, 1e-4, 1e-2)
    return Tolerance(0.3, 0.03, 0.3) if getattr(model, "_supports_sdpa", False) else Tolerance(2.5, 0.13, 0.5)


FP8_LAYER = 0.06
"""The largest relative error of a layer on random inputs. 4-bit significands explain 0.037: each factor is off by
0.026 on average. A wrong scale, or a copy of other weights, is off by about 1."""
FP8_TOLERANCE = Tolerance(2.0, 0.25, 0.0)
"""For a rollout in FP8, whose gradient nobody computes: docs/engine.md has the measurements."""


@dataclass(frozen=True)
class Difference:
    """By how much the log-probabilities of one forward differ from those of the plain one."""

    forward: str
    tokens: int
    largest: float
    mean: float
    spread: float
    certain: bool  # most of these tokens have a probability near 1, so that their log-probabilities say little
    k3: float = 0.0  # the mean of exp(d) - 1 - d, an estimate of the KL between the two
    more: str = ""  # what else was measured

    def within(self, tolerance: Tolerance) -> bool:
        return self.largest <= tolerance.largest * self.spread and self.mean <= tolerance.mean * self.spread

    def __str__(self) -> str:
        text = f"{self.forward} differs by at most {self.largest:.1e} (mean {self.mean:.1e}) over {self.tokens} tokens"
        return text + self.more


def compared_rows(texts: Sequence[Sequence[int]], max_length: int) -> list[Row]:
    """Rows over real text for the training forward: two texts, and two rows that leave the first one halfway and later.
    Every token but the first is compared. Short texts are lengthened, so that they leave a short window; no row has
    more than `max_length` tokens."""
    usable = [_lengthened(text, min(SHORTEST, max_length)) for text in texts if len(text) > 1]
    if not usable:
        return []
    first, second = usable[0], usable[1] if len(usable) > 1 else usable[0][::-1]
    half, late, tail = len(first) // 2, 3 * len(first) // 4, -(-len(second) // 2)
    histories = (first, first[:half] + second[-tail:], first[:late] + second[-tail:], second)
    rows = [_row(ids[:max_length], number) for number, ids in enumerate(histories) if len(ids[:max_length]) > 1]
    return next(iter(micro_batches(rows, UNBOUND)))


def _lengthened(text: Sequence[int], least: int) -> list[int]:
    """The text, and if it is short also backwards and again: a mere repetition would be predicted with certainty."""
    ids = list(text[:LONGEST])
    both = [*ids, *ids[::-1]]
    return ids if len(ids) >= least else (both * -(-least // len(both)))[:least]


def _row(ids: Sequence[int], number: int) -> Row:
    sampled = np.arange(1, len(ids), dtype=np.int32)
    return Row(
        ids=np.array(ids, np.int32), sampled=sampled, logprobs=np.zeros(len(sampled), np.float32), episode=number
    )


class PlainLogprobs(NamedTuple):
    """The log-probabilities of the sampled tokens of all rows, and the spread of the logits there."""

    logp_M: Tensor
    spread: float


def plain_logprobs(model: PreTrainedModel, rows: Sequence[Row], temperature: float = 1.0) -> PlainLogprobs:
    """From the module's own forward, one row at a time."""
    parts, spreads = [], []
    with _own_attention(model):
        for row in rows:
            output = model(input_ids=torch.from_numpy(row.ids).long()[None].to(device_of(model)), use_cache=False)
            at = torch.from_numpy(row.sampled).long().to(device_of(model))
            logits_MV = output.logits[0].index_select(0, at - 1).float() / temperature
            targets_M = torch.from_numpy(row.ids).long().to(device_of(model))[at]
            parts.append(torch.log_softmax(logits_MV, -1).gather(1, targets_M[:, None])[:, 0])
            spreads.append(float(logits_MV.detach().std(-1).mean()))
    return PlainLogprobs(torch.cat(parts), max(spreads))


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the module computes attention as its class defines it. In half precision that rounds scores
    to 8 bits, which moved log-probabilities of Qwen2.5-1.5B by 0.2 on average; torch's function does not."""
    before = model.config._attn_implementation
    rounds = model.dtype in (torch.bfloat16, torch.float16) and getattr(model, "_supports_sdpa", False)
    model.set_attn_implementation("sdpa" if rounds else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Readout(NamedTuple):
    """What is compared: a number per token from the training forward, and from the module's own forward."""

    packed: Callable[[PreTrainedModel, PackedRows], Tensor]
    plain: Callable[[PreTrainedModel, Sequence[Row]], PlainLogprobs]


def check_training(
    policy: Policy,
    rows: Sequence[Row],
    max_length: int,
    warn: Callable[[str], None],
    readout: Readout | None = None,
) -> Difference:
    """Compare the training forward, and its gradient, with the plain one. If only packing is at fault, rows are
    computed in another way from now on, with a warning: with a mask for the module's own attention function, else one
    row at a time. Raises StartupCheckError if that does not help either.

    Windows that rows of up to `max_length` tokens leave are compared a second time, shortened to fit the rows here.
    """
    packed = _compared(policy, rows, max_length, readout)
    if isinstance(packed, Difference):
        return packed
    model = policy.model
    advice = f"this model cannot be trained here; choose another one ({KEY}=false starts the run anyway)"
    if policy.deterministic and "deterministic" in packed:  # torch names the operation
        advice = DETERMINISTIC
    if policy.ranks.world_size > 1:
        raise StartupCheckError(f"{packed}; {advice}")
    before = model.config._attn_implementation
    with _short_windows(model, max_length) as windows:
        pass
    for attention, forward, consequence in OTHER_FORWARDS:
        if forward == "masked" and windows:  # its own attention function may count them in packed tokens
            continue
        choose_training_forward(model, forward)
        try:
            model.set_attn_implementation(attention or before)
        except ValueError:  # the class does not support it
            continue
        found = _compared(policy, rows, max_length, readout)
        if isinstance(found, Difference):
            warn(f"{packed}; {consequence}")
            return found
    raise StartupCheckError(f"{packed}; computing one row at a time does not help ({found}); {advice}")


def check_critic(critic: Policy, rows: Sequence[Row], max_length: int, warn: Callable[[str], None]) -> Difference:
    """`check_training` for a value model, whose head is still 0: its hidden states are compared, projected on a fixed
    vector. Sharded critics are not compared."""
    size = critic.model.config.get_text_config().hidden_size
    probe_C = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(critic.device)

    def packed(model: PreTrainedModel, packed: PackedRows) -> Tensor:
        return (hidden_states(model, packed)[packed.predict_U].float() @ probe_C)[packed.pair_M]

    def plain(model: PreTrainedModel, rows: Sequence[Row]) -> PlainLogprobs:
        parts = []
        with _own_attention(model):
            for row in rows:
                output = model(input_ids=torch.from_numpy(row.ids).long()[None].to(device_of(model)), use_cache=False)
                at = torch.from_numpy(row.sampled).long().to(device_of(model))
                parts.append(output.last_hidden_state[0].index_select(0, at - 1).float() @ probe_C)
        values_M = torch.cat(parts)
        return PlainLogprobs(values_M, float(values_M.detach().std()))

    return check_training(critic, rows, max_length, warn, Readout(packed, plain))


def check_frozen(
    frozen: FrozenModel, rows: Sequence[Row], max_length: int, name: str, *, deterministic: bool = False
) -> None:
    """Compare the packed forward of a model that is not trained with its own. One that cannot be packed computes one
    row at a time. Raises StartupCheckError, which calls it `name`, if neither agrees. `deterministic`: the updates in
    which it is asked are."""
    with frozen.awake():
        forwards: tuple[TrainingForward, ...] = ("packed", "unpacked")
        for forward in forwards:
            choose_training_forward(frozen.model, forward)
            found = compare_forwards(frozen.model, rows, max_length, deterministic=deterministic)
            if isinstance(found, Difference):
                return
    other = f"choose another model ({KEY}=false starts the run anyway)"
    raise StartupCheckError(
        f"{name}: {found}; {DETERMINISTIC if deterministic and 'deterministic' in str(found) else other}"
    )


def _compared(policy: Policy, rows: Sequence[Row], max_length: int, readout: Readout | None) -> Difference | str:
    with policy.ranks.broadcast(CompareForwards(rows, max_length)), on_device(policy.model):
        return compare_forwards(policy.model, rows, max_length, readout, deterministic=policy.deterministic)


def compare_forwards(
    model: PreTrainedModel,
    rows: Sequence[Row],
    max_length: int,
    readout: Readout | None = None,
    *,
    deterministic: bool = False,
) -> Difference | str:
    """The larger difference of the training forward if rounding explains it, else a sentence. All ranks call it.
    `deterministic`: updates run under deterministic algorithms, which some operations do not have."""
    readout = readout or Readout(lambda model, packed: token_logprobs(model, packed).logp_M, plain_logprobs)
    found = _tried(model, rows, readout, deterministic)
    if isinstance(found, Difference):
        with _short_windows(model, max_length) as shortened:
            again = _tried(model, rows, readout, deterministic) if shortened else found
        if not isinstance(again, Difference):
            return f"{again} (with {', '.join(shortened)} shortened to {SHORT_WINDOW} to fit the compared rows)"
        found = max(found, again, key=lambda one: one.largest)
    return found


@contextmanager
def _short_windows(model: PreTrainedModel, max_length: int) -> Iterator[list[str]]:
    """A context in which windows shorter than `max_length` are so short that the compared rows leave them. Yields their
    names; none if there is nothing to shorten."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for owner in [*model.modules(), *configs.values()]:
        values = vars(owner)
        for name in WINDOWS:
            value = values.get(name)
            if isinstance(value, int) and SHORT_WINDOW < value < max_length:
                changed.append((values, name, value))
    for values, name, _ in changed:
        values[name] = SHORT_WINDOW
    try:
        yield sorted({name for _, name, _ in changed})
    finally:
        for values, name, value in changed:
            values[name] = value


def _tried(model: PreTrainedModel, rows: Sequence[Row], readout: Readout, deterministic: bool) -> Difference | str:
    """The difference of the training forward if rounding explains it, else a sentence about it."""
    name = type(model).__name__
    forward = "its own forward"
    try:
        plain, plain_gradients = _plain(model, rows, readout)
        forward = "the training forward"
        model.train()
        watched = _watched(model)
        exact = deterministic_algorithms(device_of(model)) if deterministic else nullcontext()
        with torch.set_grad_enabled(bool(watched)), fork_rng(device_of(model)), exact:
            read_M = readout.packed(model, pack(rows, device_of(model)))
            gradients = _gradients(read_M, watched)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # noqa: BLE001 any failure means that this forward does not support the model
        return f"{forward} fails for {name} ({_first_line(problem)})"
    finally:
        model.eval()
    found = _difference("the training forward", read_M.detach(), plain)
    tolerance = tolerance_of(model)
    if not found.within(tolerance):
        return f"{name} is not computed correctly: {found}, and rounding explains {tolerance.mean * found.spread:.1e}"
    off = _relative(gradients, plain_gradients)
    if off > tolerance.gradient:
        return (
            f"the gradient of {name} is not computed correctly: it differs from that of the model's own forward by a "
            f"share of {off:.1e}, and rounding explains {tolerance.gradient:.1e}"
        )
    return found


def _plain(model: PreTrainedModel, rows: Sequence[Row], readout: Readout) -> tuple[PlainLogprobs, Tensor]:
    watched = _watched(model)
    with torch.set_grad_enabled(bool(watched)):
        plain = readout.plain(model, rows)
        gradients = _gradients(plain.logp_M, watched)
    return PlainLogprobs(plain.logp_M.detach(), plain.spread), gradients


def _watched(model: PreTrainedModel) -> list[nn.Parameter]:
    """The small trained parameters, norms and biases for example, which are enough to compare gradients. None if the
    model is sharded, whose gradients exist only after a whole backward pass."""
    if ranks_of(model).world_size > 1:
        return []
    return [p for p in model.parameters() if p.requires_grad and p.numel() <= SMALL_PARAMETER]


def _gradients(logp_M: Tensor, watched: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of the sum, in one vector; 0 for parameters that it does not depend on."""
    if not watched:
        return torch.zeros(1)
    found = torch.autograd.grad(logp_M.sum(), watched, allow_unused=True)
    zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(watched, found, strict=True))
    return torch.cat([g.flatten().float().cpu() for g in zeros])


def _difference(forward: str, logp_M: Tensor, plain: PlainLogprobs) -> Difference:
    d_M = plain.logp_M.double().cpu() - logp_M.double().cpu()
    off_M = d_M.abs().nan_to_num(nan=math.inf)
    certain = int((plain.logp_M > CERTAIN).sum()) > len(off_M) // 2
    k3 = float((d_M.expm1() - d_M).mean())
    return Difference(forward, len(off_M), float(off_M.max()), float(off_M.mean()), plain.spread, certain, k3)


def _relative(gradient: Tensor, plain: Tensor) -> float:
    size, off = float(plain.norm()), float((gradient - plain).norm())
    return off / size if size else float(off > 0)


async def check_rollout(
    engine: Engine,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    advice: str = f"use another rollout.name ({KEY}=false starts the run anyway)",
) -> Difference:
    """Compare what the engine records with the plain forward, over two turns of three episodes at once. Two of them
    share a prompt. Raises StartupCheckError if rounding does not explain the difference."""
    tokens = min(NEW_TOKENS, max(1, engine.max_model_len // 6))  # of a sampled turn, and of the answer to it
    usable = [list(prompt[: min(LONGEST, max(1, engine.max_model_len - 3 * tokens))]) for prompt in prompts if prompt]
    if not usable:
        raise StartupCheckError(f"there is no text to compare; set {KEY}=false")
    temperature = sampling.temperature or 1.0
    params = replace(sampling, temperature=temperature, max_tokens=tokens, stop_ids=(), stop=(), ignore_eos=True)
    quantized = engine.core.fp8 if isinstance(engine, EmbeddedEngine) else None
    if not isinstance(engine, EmbeddedEngine) or quantized is None:
        found = await _largest_difference(engine, model, usable, params)
        return _accepted(found, _rollout_tolerance(engine, model), model, advice, "rounding")
    with engine.unquantized():
        found = await _largest_difference(engine, model, usable, params)
    _accepted(found, _rollout_tolerance(engine, model), model, advice, "rounding")
    advice = f"leave {engine.core.settings.option_names.quantization} out"
    layers = _compared_layers(engine.core.fp8_error(), advice)
    found = await _largest_difference(engine, model, usable, params)
    found = replace(found, forward="the rollout in FP8", more=f", k3 {found.k3:.1e}; {layers}")
    return _accepted(found, FP8_TOLERANCE, model, advice, "FP8")


async def _largest_difference(
    engine: Engine, model: PreTrainedModel, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Difference:
    found = await _rollout_difference(engine, model, prompts, params)
    if found.certain and isinstance(engine, EmbeddedEngine):  # a peaked distribution hides mistakes
        flat = replace(params, temperature=FLATTER * params.temperature)
        found = max(found, await _rollout_difference(engine, model, prompts, flat), key=lambda one: one.largest)
    return found


def _rollout_tolerance(engine: Engine, model: PreTrainedModel) -> Tolerance:
    tolerance = tolerance_of(model)
    if isinstance(engine, EmbeddedEngine):
        return tolerance
    # other kernels, possibly on another device
    return Tolerance(max(tolerance.largest, 1e-2), max(tolerance.mean, 2e-3), tolerance.gradient)


def _accepted(found: Difference, tolerance: Tolerance, model: PreTrainedModel, advice: str, cause: str) -> Difference:
    """The difference, or StartupCheckError if it is more than `cause` explains."""
    if not found.within(tolerance):
        raise StartupCheckError(
            f"the engine does not sample from {type(model).__name__} as the model computes it: {found}, and {cause} "
            f"explains {tolerance.mean * found.spread:.1e}; {advice}"
        )
    return found


def _compared_layers(worst: LayerError, advice: str) -> str:
    """StartupCheckError if FP8 does not explain the error of the worst layer."""
    if worst.relative > FP8_LAYER:
        raise StartupCheckError(
            f"{worst.name} is not computed correctly in FP8: for random inputs its outputs are off by "
            f"{worst.relative:.1%}, and FP8 explains {FP8_LAYER:.0%}; {advice}"
        )
    return f"its layers alone differ by at most {worst.relative:.1%}"


async def _rollout_difference(
    engine: Engine, model: PreTrainedModel, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Difference:
    async def episode(number: int, prompt: Sequence[int], answer: Sequence[int]) -> Segment:
        history = Segment(prompt_ids=tuple(prompt))
        for turn in range(2):
            drawn = replace(params, seed=2 * number + turn)
            generation = await engine.generate(history.ids, drawn, session=f"startup-{number}")
            history = history.append_sampled(generation)
            history = history if turn else history.append_observed(answer[: params.max_tokens])
        return history

    forward, name = "the engine", type(model).__name__
    try:
        episodes = (episode(i, p, prompts[-1]) for i, p in enumerate((prompts[0], prompts[0], prompts[-1])))
        outcomes = await asyncio.gather(*episodes, return_exceptions=True)  # none goes on when another one has failed
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        rows = [Row.of(one, number) for number, one in enumerate(outcomes) if isinstance(one, Segment)]
        recorded_M = recorded_logprobs(rows)
        forward = "its own forward"
        with ranks_of(model).broadcast(ComputePlain(rows, params.temperature)), on_device(model):
            plain = detached_plain(model, rows, params.temperature)
    except (RallyError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise StartupCheckError(
            f"{forward} fails for {name} ({_first_line(problem)}); use another rollout.name or another model"
        ) from problem
    return _difference("the rollout", recorded_M, plain)


@torch.no_grad()
def detached_plain(model: PreTrainedModel, rows: Sequence[Row], temperature: float) -> PlainLogprobs:
    return plain_logprobs(model, rows, temperature)


def _first_line(problem: Exception) -> str:
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text.splitlines()[0]}" if text else type(problem).__name__
