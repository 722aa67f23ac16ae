"""The engine without threads: add requests, then call `step` until they finish. Only one thread at a time may do so.

A token is never computed from KV of other weights than `in_flight` allows, and every request ends exactly once, with
`stop`, `length` or `abort`.

Speculative decoding samples the same tokens as without it. The token of every place is sampled from its own
distribution with the random number of that place. A draft is right if it is the token that was sampled there; behind
the first wrong one nothing counts.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from rally.engines.base import ContextExceeded, EngineError
from rally.engines.embedded.cuda_runner import CudaRunner
from rally.engines.embedded.kv_cache import HEADROOM, KVStore, PagePool
from rally.engines.embedded.memory_plan import plan_memory
from rally.engines.embedded.radix_cache import RadixCache
from rally.engines.embedded.request_slots import Ints, Request, Slots
from rally.engines.embedded.sampler import SampledBatch
from rally.engines.embedded.scheduler import Scheduler, StepPlan
from rally.engines.embedded.settings import EngineSettings
from rally.engines.embedded.state_cache import StateStore
from rally.engines.embedded.torch_runner import ModelRunner, PendingStep, StepRunner
from rally.models import attention
from rally.models.decoder_families import FAMILIES, unsupported_attention
from rally.models.fp8 import Fp8Linears, LayerError, check_config, check_device, covered_layers
from rally.models.fused_layers import fusable
from rally.models.kernels.dispatch import has_triton
from rally.models.kv_layers import cached_parts
from rally.models.rope import decide_rope
from rally.models.routing import routers_of
from rally.models.token_masks import GrammarError, Grammars, GrammarState
from rally.models.vision import ImageIds, ImageInputError, axes_of, check_images
from rally.platforms import has_kernels, on_accelerator
from rally.types import FinishReason, ImageSpan, Routes, SamplingParams

PATIENCE = 2  # steps for which a few new requests wait for others


def _check_length(model: PreTrainedModel, settings: EngineSettings) -> None:
    wanted = settings.max_model_len
    supported = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if supported and wanted > supported:
        raise EngineError(
            f"histories of up to {wanted} tokens are configured, but the model supports at most {supported}; lower "
            f"{settings.option_names.lengths}"
        )


class EngineCore:
    """Scheduler, KV cache and runner over the trainer's module."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings | None = None,
        *,
        num_pages: int | None = None,
        eos_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        self.grammars = grammars
        _check_length(model, self.settings)
        paged = self._paged(model)
        self._check_quantization(model)
        _check_supported(model, unsupported_attention(model, self.settings.max_model_len))
        attention.install(model)
        decide_rope(model, self.settings.max_model_len)
        try:
            parts = cached_parts(model, axes=axes_of(model))
        except Exception as problem:  # a forward that cannot be packed fails in its own ways
            _check_supported(model, f"a forward that fails on packed tokens ({type(problem).__name__}: {problem})")
            raise
        _check_supported(model, None if parts.layers or parts.states else "its own attention function")
        names = self.settings.option_names
        if paged and parts.chunk is not None and parts.chunk < self.settings.max_model_len:
            raise EngineError(
                f"{type(model).__name__} attends within chunks of {parts.chunk} tokens, which the paged kernels do not "
                f"support; {names.torch_attention} runs it in plain torch, or lower {names.lengths}"
            )
        if parts.states and self.settings.quantization is not None:
            raise EngineError(
                f"{names.quantization}=fp8 does not support {type(model).__name__}, which has layers that hold state; "
                "leave it out"
            )
        if parts.states and self.settings.speculation is not None:
            raise EngineError(
                f"{type(model).__name__} has layers that hold state, which cannot be taken back to an earlier token; "
                f"leave {names.speculation} out"
            )
        self.memory_plan = None if num_pages else plan_memory(model, self.settings, parts)
        pages = num_pages if self.memory_plan is None else self.memory_plan.pages
        assert pages is not None
        self.fp8 = Fp8Linears(model, names.quantization) if self.settings.quantization else None
        store = KVStore(
            parts.layers,
            num_pages=pages,
            page_size=self.settings.page_size,
            dtype=model.dtype,
            device=model.device,
            lend=self.settings.lend_memory and has_kernels(model.device),
            routes=self._routes(model),
        )
        self.states: StateStore | None = None
        slots = self.settings.max_num_seqs
        if parts.states:
            slots = slots if self.memory_plan is None else self.memory_plan.slots
            snapshots = 2 * slots if self.memory_plan is None else self.memory_plan.snapshots
            lend = store.memory.lent
            self.states = StateStore(parts.states, slots=slots, snapshots=snapshots, device=model.device, lend=lend)
        stride = 1 if paged else -(-self.settings.max_model_len // self.settings.page_size)
        self.pool = PagePool(pages, stride)
        self.index = RadixCache(self.pool, self.settings.page_size, self.states)
        self.slots = Slots(slots, self.settings.max_model_len, self.settings.page_size)
        self.scheduler = Scheduler(
            self.pool,
            self.index,
            self.slots,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            share_pages=paged,
            patience=PATIENCE if paged else 0,
            eos_ids=frozenset(eos_ids),
            speculation=self.settings.speculation,
            memory_option=self.settings.option_names.memory,
        )
        self.model, self.store = model, store
        self.runner: StepRunner = (
            self._cuda_runner(model, store, parts.group)
            if paged
            else ModelRunner(model, store, self.slots, stride, self.states, self.fp8)
        )
        self._launched: _Launched | None = None
        self.decode = decode
        self.steps = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._image_ids = ImageIds()
        self._seeds = itertools.count(self.settings.seed)

    def _routes(self, model: PreTrainedModel) -> tuple[int, int]:
        """Routers and experts of a token, if they are recorded."""
        if not self.settings.return_routes:
            return 0, 0
        routers = routers_of(model)
        if len({router.chosen for router in routers}) != 1:
            raise EngineError(
                f"{type(model).__name__} has no routers whose choices can be replayed; leave "
                f"{self.settings.option_names.routes} out"
            )
        return len(routers), routers[0].chosen

    def _paged(self, model: PreTrainedModel) -> bool:
        settings, on_gpu = self.settings, has_kernels(model.device)
        half = model.dtype in (torch.bfloat16, torch.float16)
        if settings.backend == "paged" and on_gpu and not (half and has_triton()):
            raise EngineError(
                "the paged kernels need Triton and half precision; set model.dtype=bfloat16, or "
                "rollout.attention_backend=gather"
            )
        paged = settings.backend == "paged" or (settings.backend == "auto" and on_gpu and half and has_triton())
        if settings.deterministic and on_accelerator(model.device) and not paged:
            raise EngineError(
                "deterministic rollout on a GPU needs the paged kernels: CUDA, Triton, and model.dtype=bfloat16; or "
                "set rollout.deterministic=false"
            )
        return paged

    def _cuda_runner(self, model: PreTrainedModel, store: KVStore, group: int) -> StepRunner:
        settings = self.settings
        if settings.deterministic and (settings.eager or not fusable(model, invariant=True)):
            raise EngineError(
                f"deterministic rollout needs fused layers, which exist only for {', '.join(FAMILIES)} without "
                "adapters and without enforce_eager; set rollout.deterministic=false or change these"
            )
        return CudaRunner(
            model,
            store,
            self.slots,
            states=self.states,
            group=group,
            max_tokens=settings.max_num_batched_tokens,
            max_samples=settings.max_sampled_rows,
            eager=settings.eager,
            deterministic=settings.deterministic,
            fp8=self.fp8,
        )

    def fp8_error(self) -> LayerError:
        """The linear layer whose output FP8 changes most, as steps compute it. No step may run meanwhile."""
        assert self.fp8 is not None
        fused = self.runner.fused if isinstance(self.runner, CudaRunner) else None
        return self.fp8.largest_error(None if fused is None else fused.products())

    def _check_quantization(self, model: PreTrainedModel) -> None:
        """Raise before memory is planned."""
        if self.settings.quantization is None:
            return
        key = self.settings.option_names.quantization
        if self.settings.deterministic:
            raise EngineError(
                f"{key}=fp8 and rollout.deterministic=true exclude each other: training does not compute in FP8, so "
                "rollout and training cannot be equal bit by bit; leave one of them out"
            )
        check_config(model.config, key)
        check_device(model.device, model.dtype, key)
        covered_layers(model, key)

    @property
    def version(self) -> int:
        return self.scheduler.version

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        arrived: float | None = None,
        images: Sequence[ImageSpan] = (),
        state: GrammarState | None = None,
    ) -> Request:
        """Queue a request; EngineError if it can never be served. `arrived` is the time of its arrival, by default
        now, and `state` that of its grammar, by default a new one."""
        if not prompt_ids:
            raise EngineError("an empty prompt cannot be continued; give at least one token")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocabulary:
            raise EngineError(f"the prompt contains a token id outside the model's vocabulary of {self._vocabulary}")
        # Clients such as litellm know an exceeded context by the words "this model's maximum context length is".
        longest, option = self.settings.max_model_len, self.settings.option_names.max_model_len
        limit = f"this model's maximum context length is {longest} tokens ({option})"
        if len(prompt_ids) + 1 > self.settings.max_model_len:
            raise ContextExceeded(
                f"a prompt of {len(prompt_ids)} tokens leaves no room: {limit}; shorten it or raise the limit"
            )
        if params.stop_ids and max(params.stop_ids) >= self._vocabulary:
            raise EngineError(f"stop_ids contains a token id outside the model's vocabulary of {self._vocabulary}")
        if params.stop and self.decode is None:
            raise EngineError("stop strings need a tokenizer; give the engine one or use stop_ids")
        space = self.settings.max_model_len - len(prompt_ids)
        if params.max_tokens > space:
            raise ContextExceeded(
                f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} are too many: {limit}; "
                f"ask for at most {space} new tokens"
            )
        seed = params.seed if params.seed is not None else next(self._seeds)
        arrived = time.perf_counter() if arrived is None else arrived
        if images:
            try:
                check_images(self.model, images, len(prompt_ids))
            except ImageInputError as problem:
                raise EngineError(str(problem)) from problem
            prompt_ids = self._image_ids.substitute(prompt_ids, images)
        request = Request.new(prompt_ids, params, seed % 2**64, arrived, images)  # the sampler hashes 64 bits
        if params.grammar:
            if self.grammars is None:
                raise EngineError("a grammar needs a tokenizer; give the engine its grammars")
            request.state = state or self.grammars.state(params.grammar)
        self.scheduler.add(request)
        return request

    def prepare(self) -> None:
        """Do now what would otherwise delay the first steps."""
        if isinstance(self.runner, CudaRunner):
            self.runner.capture()

    @property
    def busy(self) -> bool:
        return self._launched is not None or self.scheduler.busy

    def step(self) -> list[Request]:
        """Launch one forward and read one back: the same, or the previous one if the runner works ahead. Returns the
        requests that finished. Drafts continue known tokens, so that one with drafts is read back before the next is
        planned."""
        assert not self.model.training, "the engine samples in eval mode; training must have ended"
        speculative = self._launched is not None and self._launched.drafts is not None
        finished = self.drain() if speculative or self.scheduler.speculates else []
        plan = self.scheduler.plan()
        last, self._launched = self._launched, None
        if plan:
            self._launched = self._launch(plan)
        else:
            assert last or not self.scheduler.busy, "work is left but none could be planned"
        if self._launched and not self.runner.ahead:
            last, self._launched = self._launched, None
        return [*finished, *(self._read_back(last) if last else ())]

    def recover(self) -> list[Request]:
        """Forget a step that failed. Returns the requests that took part in it, which are no longer queued; `attempt`
        tells whether one of them is at fault."""
        self._launched = None
        return self.scheduler.recover()

    def attempt(self, request: Request) -> None:
        """Run a recovered request alone until it has a new token. Raises what its steps raise. If it goes on, it is
        queued behind those that were attempted before."""
        scheduler = self.scheduler
        others, scheduler.waiting = scheduler.waiting, deque([request])
        try:
            sampled = request.sampled
            while request.finish is None and request.sampled == sampled:
                self.step()
                self.drain()
                if request.slot >= 0 and self.slots.known[request.slot] > sampled + request.prompt_len:
                    scheduler.preempt(request)
        finally:
            scheduler.waiting = others
        if request.finish is None:
            scheduler.waiting.append(request)

    def drain(self) -> list[Request]:
        """Read back the step in flight, if any; returns the requests that it finished."""
        last, self._launched = self._launched, None
        return self._read_back(last) if last else []

    def _launch(self, plan: StepPlan) -> _Launched:
        samplers = plan.samplers
        drafts = _drafts(plan, self.slots) if any(chunk.drafts for chunk in plan.chunks) else None
        launched = _Launched(samplers, self.slots.serial[samplers], self.runner.launch(plan), drafts)
        self.steps += 1
        for chunk in plan.chunks:
            if chunk.drafts:  # what was sampled is remembered when the request ends
                self.drafted_tokens += chunk.drafts
                continue
            done = chunk.start + chunk.tokens
            self.scheduler.remember(self._request(chunk.slot), done - done % self.settings.page_size)
        for slot, row in plan.snapshots:
            self.scheduler.hold_state(self._request(slot), int(self.slots.computed[slot]), row)
        return launched

    def _read_back(self, launched: _Launched) -> list[Request]:
        """Give each request its token, and then further ones as long as its drafts were right."""
        sampled = launched.pending.result()
        current = self.slots.serial[launched.samplers] == launched.serials  # the others left their slots meanwhile
        if launched.drafts is None:
            return self._push(launched.samplers, sampled, np.flatnonzero(current)).finished
        first = np.ones(len(current), np.bool_)
        first[1:] = launched.drafts[:-1] < 0
        rows, finished = np.flatnonzero(current & first), list[Request]()
        while len(rows):
            pushed = self._push(launched.samplers, sampled, rows)
            finished += pushed.finished
            rows = rows[pushed.goes_on & (sampled.ids[rows] == launched.drafts[rows])] + 1
            confirmed = launched.samplers[rows]  # their next token was computed, too
            self.slots.computed[confirmed] += 1
            self.slots.planned[confirmed] += 1
            self.accepted_tokens += len(rows)
        return finished

    def _push(self, samplers: Ints, sampled: SampledBatch, rows: Ints) -> _Pushed:
        """Append the tokens of some rows, at most one of each slot, and end the requests that finish with them."""
        slots, chosen, ids = self.slots, samplers[rows], sampled.ids[rows]
        first = chosen[slots.known[chosen] == slots.prompt[chosen]]
        slots.push(chosen, ids, sampled.logprobs[rows], sampled.sampling_logprobs[rows])
        for slot in first.tolist():
            self._request(slot).first_token = time.perf_counter()
        stopped = slots.stopped(chosen, ids)
        ended = stopped | (slots.known[chosen] == slots.limit[chosen]) | slots.strings[chosen]
        for row in np.flatnonzero(slots.constrained[chosen]).tolist():
            over = self._consume(self._request(int(chosen[row])), int(ids[row]))
            stopped[row] |= over
            ended[row] |= over
        finished, goes_on = [], np.ones(len(rows), np.bool_)
        for row in np.flatnonzero(ended).tolist():
            request = self._request(int(chosen[row]))
            request.finish = self._finish_reason(request, bool(stopped[row]))
            if request.finish is not None:
                goes_on[row] = False
                finished.append(request)
                self._end(request)
        return _Pushed(finished, goes_on)

    def _consume(self, request: Request, token: int) -> bool:
        """Pass a sampled token to the request's grammar; whether the grammar ends there, or failed. The next mask is
        computed here, where its failure concerns this request only."""
        state = request.state
        assert state is not None
        try:
            state.consume(token)
            if not state.ended:
                state.mask()
        except GrammarError as problem:
            request.error = problem
            return True
        return state.ended

    def _end(self, request: Request) -> None:
        """Remove a request that finished; the experts of its tokens are read while it holds its pages."""
        if self.store.routes is not None and request.slot >= 0:
            size = self.settings.page_size
            positions = np.arange(self.slots.known[request.slot] - 1)
            pages = self.slots.table_SP[request.slot, positions // size].astype(np.int64)
            places = torch.from_numpy(pages * size + positions % size).to(self.store.device)
            routes = self.store.routes.index_select(0, places).cpu().numpy()
            request.routes = Routes(routes.astype("<i2").tobytes(), *routes.shape[1:])
        self.scheduler.finish(request)

    def _request(self, slot: int) -> Request:
        request = self.slots.requests[slot]
        assert request is not None, "an empty slot"
        return request

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests now with finish `abort`; they keep what they sampled."""
        for request in requests:
            if request.finish is None:
                request.finish = "abort"
                if request.slot >= 0 and self.slots.known[request.slot] > request.prompt_len:
                    self._end(request)
                else:
                    self.scheduler.finish(request)

    @property
    def lent_bytes(self) -> int:
        """What `memory_lent` releases and takes again, with what must stay free beside it."""
        if not self.store.memory.lent:
            return 0
        lent = [self.store.memory, *(() if self.states is None else (self.states.memory,))]
        return HEADROOM + sum(int(memory.flat.nbytes) for memory in lent)

    @contextmanager
    def memory_lent(self) -> Iterator[None]:
        """Release the KV memory inside the block, if `lend_memory` is set and no request needs what it holds. With
        `in_flight=recompute` none does: requests are computed again after the update anyway."""
        if self.store.memory.lent and self.settings.in_flight == "recompute":
            self._preempt_all()
        lend = self.store.memory.lent and not self.scheduler.running
        lent = [self.store.memory, *(() if self.states is None else (self.states.memory,))]
        if lend:
            self.index.forget()
            for memory in lent:
                memory.release()
        try:
            yield
        finally:
            if lend:
                for memory in lent:
                    memory.restore()

    def reset(self) -> None:
        """Drop cached KV and restore the initial order of slots and pages, so that results are bit-identical to those
        of a new engine."""
        assert not self.busy, "requests are still running"
        self.index.forget()
        self.slots.reset()
        self.pool.reset()
        if self.states is not None:
            self.states.clear()

    def commit_weights(self, version: int | None = None) -> list[Request]:
        """Start a new version after the weights changed: `version`, or the next number. Returns the requests that the
        policy `abort` ended."""
        assert self._launched is None, "steps in flight must be drained before weights change"
        scheduler = self.scheduler
        self._close_spans()
        in_flight = [*scheduler.running, *(r for r in scheduler.waiting if r.sampled)]  # the latter were preempted
        if self.settings.in_flight == "abort":
            self.abort(in_flight)
        scheduler.version = scheduler.version + 1 if version is None else version
        if self.fp8 is not None:
            self.fp8.refresh()
        self.runner.weights_changed()
        self.index.forget()  # all of it: an explicit version number may have been used before
        if not scheduler.busy:
            self._image_ids.forget()
        if self.settings.in_flight == "keep":
            for request in scheduler.running:
                request.pure_version = None
        if self.settings.in_flight == "recompute":
            self._preempt_all()
        return in_flight if self.settings.in_flight == "abort" else []

    def _close_spans(self) -> None:
        """End the spans of running requests with the tokens of this version."""
        for request in self.scheduler.running:
            request.close_span(self.scheduler.version, int(self.slots.known[request.slot]) - request.prompt_len)

    def _preempt_all(self) -> None:
        self._close_spans()
        for request in list(reversed(self.scheduler.running)):
            self.scheduler.preempt(request)

    def _finish_reason(self, request: Request, stopped: bool) -> FinishReason | None:
        if request.error is not None:
            return "abort"
        if stopped:
            return "stop"
        try:
            if request.params.stop and self._stop_string(request):
                return "stop"
        except Exception as problem:  # noqa: BLE001 - a tokenizer that fails must not end other requests
            request.error = problem
            return "abort"
        return "length" if self.slots.known[request.slot] == self.slots.limit[request.slot] else None

    def _stop_string(self, request: Request) -> bool:
        """Whether the last token completed a stop string. Only the tail is decoded, since a token is at least one
        byte."""
        assert self.decode is not None
        tail = 4 * max(len(s) for s in request.params.stop) + 8
        ids = self.slots.history(request)
        text = self.decode(ids[max(request.prompt_len, len(ids) - tail) :])
        return any(s in text for s in request.params.stop)


class _Launched(NamedTuple):
    """A step in flight: the slot of each of its sampled tokens, the serials of their requests, and the draft that the
    next token of the same slot continues; -1 behind the last, None if the step has no drafts."""

    samplers: Ints
    serials: Ints
    pending: PendingStep
    drafts: Ints | None = None


class _Pushed(NamedTuple):
    """The requests that ended with their new token, and which rows go on."""

    finished: list[Request]
    goes_on: npt.NDArray[np.bool_]


def _drafts(plan: StepPlan, slots: Slots) -> Ints:
    """For each sampled token the draft at its place, if another token of the step is sampled behind that; else -1."""
    drafts = np.full(len(plan.samplers), -1, np.int64)
    row = len(plan.decodes)
    for chunk in plan.chunks:
        drafts[row : row + chunk.drafts] = slots.ids[chunk.slot, chunk.start + 1 :][: chunk.drafts]
        row += chunk.samples
    return drafts


OTHER_MODEL = "use another model, or a server engine"


def _check_supported(model: PreTrainedModel, feature: str | None) -> None:
    """Raise EngineError if the engine lacks a feature of the model's attention."""
    if feature is not None:
        raise EngineError(
            f"{type(model).__name__} uses {feature}, which the embedded engine does not support; {OTHER_MODEL}"
        )
