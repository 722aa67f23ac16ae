"""The engine without threads: add requests, call `step` until they finish; one thread at a time may do so.

Guarantees: no token is computed from KV of other weights than the request's policy allows, and every request added
ends exactly once, with `stop`, `length` or `abort`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from rally.engines.base import EngineError
from rally.engines.embedded import attention
from rally.engines.embedded.pages import KVStore, PagePool
from rally.engines.embedded.prefixes import PrefixIndex
from rally.engines.embedded.request import Request
from rally.engines.embedded.runner import ModelRunner
from rally.engines.embedded.scheduler import Scheduler
from rally.types import FinishReason, SamplingParams

InFlight = Literal["abort", "keep", "recompute"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes and policies of an embedded engine."""

    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    page_size: int = 16
    memory_share: float = 0.5  # of the memory free at start, for KV
    in_flight: InFlight = "keep"
    seed: int = 0


def plan_pages(model: PreTrainedModel, settings: EngineSettings) -> int:
    """How many KV pages: twice what full concurrency can use (the rest is prefix cache), within the memory share."""
    tokens = 2 * settings.max_num_seqs * settings.max_model_len
    budget = int(_free_bytes(model.device) * settings.memory_share) // kv_bytes_per_token(model)
    pages = min(tokens, budget) // settings.page_size
    if pages * settings.page_size < settings.max_model_len:
        raise EngineError(
            f"one history of rollout.max_model_len={settings.max_model_len} tokens does not fit into the "
            f"{budget} tokens of KV that rollout.gpu_memory_utilization={settings.memory_share} allows; raise it, or "
            "lower the lengths"
        )
    return pages


def _check_length(model: PreTrainedModel, wanted: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most and wanted > most:
        raise EngineError(
            f"histories of up to {wanted} tokens were asked for, but the model was made for {most}; lower "
            "data.max_prompt_length, data.max_response_length or rollout.max_model_len"
        )


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    layers, heads, size = _kv_shape(model)
    return 2 * layers * heads * size * torch.empty((), dtype=model.dtype).element_size()


def _kv_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, size


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="ascii") as info:
        fields = dict(line.split(":", 1) for line in info)
    return int(fields["MemAvailable"].split()[0]) * 1024


class EngineCore:
    """Scheduler, cache and runner around the trainer's module."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings | None = None,
        *,
        num_pages: int | None = None,
        eos_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        _check_length(model, self.settings.max_model_len)
        attention.install(model)
        layers, heads, size = _kv_shape(model)
        pages = num_pages or plan_pages(model, self.settings)
        store = KVStore(
            num_layers=layers,
            num_pages=pages,
            page_size=self.settings.page_size,
            kv_heads=heads,
            head_dim=size,
            dtype=model.dtype,
            device=model.device,
        )
        self.pool = PagePool(pages)
        self.index = PrefixIndex(self.pool, self.settings.page_size)
        self.scheduler = Scheduler(
            self.pool,
            self.index,
            store,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
        )
        self.model = model
        self.runner = ModelRunner(model, store)
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.steps = 0
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._seeds = itertools.count(self.settings.seed)

    @property
    def version(self) -> int:
        return self.scheduler.version

    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request; it fails here, in words, if it can never be served."""
        if not prompt_ids:
            raise EngineError("an empty prompt cannot be continued; give at least one token")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocabulary:
            raise EngineError(f"a prompt holds a token outside the model's vocabulary of {self._vocabulary}")
        if len(prompt_ids) + 1 > self.settings.max_model_len:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in rollout.max_model_len="
                f"{self.settings.max_model_len}; shorten it or raise the limit"
            )
        if params.stop and self.decode is None:
            raise EngineError("stop strings need a tokenizer; give the engine one or use stop_ids")
        room = self.settings.max_model_len - len(prompt_ids)
        if params.max_tokens > room:
            raise EngineError(
                f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} exceed rollout.max_model_len="
                f"{self.settings.max_model_len}; ask for at most {room} new tokens"
            )
        seed = params.seed if params.seed is not None else next(self._seeds)
        request = Request.new(prompt_ids, params, seed % 2**64)  # the sampler hashes 64 bits
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Run one forward; returns the requests it finished."""
        assert not self.model.training, "the engine samples in eval mode; training must have ended"
        plan = self.scheduler.plan()
        if not plan:
            assert not self.scheduler.busy, "work is left but none could be planned"
            return []
        sampled = self.runner.run(plan)
        self.steps += 1
        for request, start, tokens in plan:
            request.computed = start + tokens
            if start // self.settings.page_size != request.computed // self.settings.page_size:
                self.scheduler.remember(request)
        samplers = [work.request for work in plan if work.samples]
        finished = []
        for request, token, logprob, filtered in zip(samplers, *sampled, strict=True):
            request.push(token, logprob, filtered, self.version)
            request.finish = self._finish_reason(request, token)
            if request.finish is not None:
                finished.append(request)
                self.scheduler.finish(request)
        return finished

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests now with finish `abort`; what they sampled stays in them."""
        for request in requests:
            if request.finish is None:
                request.finish = "abort"
                self.scheduler.finish(request)

    def commit_weights(self) -> list[Request]:
        """The module's weights have changed: begin a new version. Returns the requests that policy `abort` ended."""
        scheduler = self.scheduler
        scheduler.version += 1
        self.index.forget(keep_version=scheduler.version)
        if self.settings.in_flight == "keep":
            for request in scheduler.running:
                request.pure_version = None
            return []
        if self.settings.in_flight == "recompute":
            for request in list(reversed(scheduler.running)):
                scheduler.preempt(request)
            return []
        in_flight = [*scheduler.running, *(r for r in scheduler.waiting if r.sampled)]  # the latter were preempted
        self.abort(in_flight)
        self.index.forget(keep_version=scheduler.version)
        return in_flight

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        params = request.params
        if token in params.stop_ids or (token in self.eos_ids and not params.ignore_eos):
            return "stop"
        if params.stop and self._stop_string(request):
            return "stop"
        return "length" if request.sampled >= params.max_tokens else None

    def _stop_string(self, request: Request) -> bool:
        """Whether a stop string appeared with the last token; a token is at least a byte, so a tail is enough."""
        assert self.decode is not None
        tail = 4 * max(len(s) for s in request.params.stop) + 8
        text = self.decode(request.ids[max(request.prompt_len, len(request.ids) - tail) :])
        return any(s in text for s in request.params.stop)
