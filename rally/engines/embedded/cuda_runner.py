"""The fast runner: paged attention kernels, CUDA graphs, one copy to the device and one back, one step ahead.

Its results equal those of ModelRunner. The body of a step (embedding to last hidden state) is captured once per bucket
of tokens, the LM head and sampling once per bucket of rows. Weights are updated in place, so the graphs serve every
version. Large prefills run without a graph, because they keep the GPU busy for longer than Python needs to launch them.
On a CPU the same code runs with the reference kernels, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rally.engines.base import EngineError
from rally.engines.embedded.attention_torch import PagedContext
from rally.engines.embedded.kv_cache import KVStore
from rally.engines.embedded.request_slots import Slots
from rally.engines.embedded.sampler import Draw, NonFiniteLogits, SampledBatch, sample
from rally.engines.embedded.scheduler import StepPlan
from rally.engines.embedded.state_cache import DecodeStates, StateStore, StepStates
from rally.engines.embedded.step_inputs import Padding, Sizes, StepInputs, fill
from rally.engines.embedded.torch_runner import FinishedStep, ImageInputs, recorded_routes, step_rows, step_states
from rally.models import experts
from rally.models.attention import Scores, packed_hidden
from rally.models.fp8 import Fp8Linears, forward_in_fp8
from rally.models.fused_layers import FusedDecoder, fusable
from rally.models.kernels.attention_tiles import SPLIT, extend_tokens, group_parts
from rally.models.kernels.dispatch import Kernels, kernels_for
from rally.models.lm_head import head_logits
from rally.models.lora import switches
from rally.models.vision import SeenImages, patches_of

GRAPH_TOKENS = 2048  # steps of more tokens run without a graph
GRAPH_CHUNKS = 64  # chunks in a graph that has chunks
FEW_PROGRAMS = 132  # attention programs; the number of multiprocessors of a large GPU
SPLIT_BOUND = 2048  # the smallest length bound of split histories; each bound needs a graph, and most runs need one
HOST_BUFFERS = 3  # one being filled, one in flight, one being read


class KernelAttention(PagedContext):
    """The attention context of one step: writes keys and values to their places, then one kernel reads the pages.

    The kernel handles decoding tokens and chunks alike, and its result for a token depends only on the token's history.
    A few decoding requests would leave most of a GPU idle, so their histories are split; `split_up_to` bounds their
    length, and 0 means no split.
    """

    def __init__(self, store: KVStore, inputs: StepInputs, kernels: Kernels, split_up_to: int) -> None:
        super().__init__(store)
        self.inputs, self.kernels, self.split_up_to = inputs, kernels, split_up_to
        self.places_T = inputs.places.long()

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.store.keys[layer], self.store.values[layer]

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        number = self.next_call()
        self.store.write(number, self.places_T, k_TKD, v_TKD)
        return self.read(number, q_THD.contiguous(), scores)

    def read(self, layer: int, q_THD: Tensor, scores: Scores) -> Tensor:
        inputs, pool = self.inputs, self.pool(layer)
        out_THD = q_THD.new_empty((*q_THD.shape[:2], pool[1].shape[2]))
        options = {
            "page_size": self.store.page_size,
            "scale": scores.scale,
            "window": scores.window,
            "softcap": scores.softcap,
            "sinks_H": scores.sinks_H,
        }
        if self.split_up_to:
            rows = slice(inputs.sizes.decodes)
            self.kernels.paged_decode(
                q_THD[rows],
                *pool,
                inputs.table[rows],
                inputs.lengths,
                out_THD[rows],
                max_length=self.split_up_to,
                **options,
            )
        else:
            self.kernels.paged_extend(q_THD, *pool, inputs.table, inputs.tiles, out_THD, **options)
        return out_THD


class _InFlight:
    """A launched step whose tokens are being copied to the host."""

    def __init__(self, output: Tensor, samples: int, event: torch.cuda.Event | None) -> None:
        self.output, self.samples, self.event = output, samples, event

    def result(self) -> SampledBatch:
        if self.event is not None:
            self.event.synchronize()
        ids, logprobs = self.output[:, : self.samples].numpy()
        values = logprobs.view(np.float32).copy()
        finite = np.isfinite(values)
        if not finite.all():
            raise NonFiniteLogits(everywhere=not finite.any())
        return SampledBatch(ids.astype(np.int64), values, values)


class _Bucket(NamedTuple):
    """How a plan runs: its padded sizes, the length bound of split histories, and whether a CUDA graph runs it."""

    sizes: Sizes
    split: int
    graph: bool


class CudaRunner:
    """Runs steps through the trainer's module, whose weights it does not own."""

    ahead = True

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        slots: Slots,
        *,
        states: StateStore | None = None,
        group: int,
        max_tokens: int,
        max_samples: int | None = None,
        eager: bool = False,
        deterministic: bool = False,
        fp8: Fp8Linears | None = None,
    ) -> None:
        self.fp8 = fp8
        self.model, self.store, self.slots, self.states = model, store, slots, states
        self.eager, self.deterministic = eager, deterministic
        self.device = store.device
        experts.install(model)
        self.graphs = self.device.type == "cuda" and not eager
        self.kernels = kernels_for(self.device)
        self.fused = self._fused()
        self.image_inputs = ImageInputs(model, slots) if patches_of(model) is not None else None
        self._weights = self._weight_pointers()
        config = model.config.get_text_config()
        self.group = group  # query heads per key/value head, the largest of all layers
        self.kv_heads = max((keys.shape[1] for keys in store.keys), default=1)
        count, width = slots.table_SP.shape
        self.pad = Padding(trash=store.num_pages * store.page_size, no_slot=count)
        self.last_ids = torch.zeros(count + 1, dtype=torch.int64, device=self.device)
        tokens = bucket(max_tokens)
        rows = max(count, GRAPH_CHUNKS)
        self.max_samples = max_samples or count
        self.axes = 1 if self.image_inputs is None else 3
        most = self.max_samples
        size = Sizes(tokens, count, rows, tokens + rows + count, most, width, most, self.axes).offsets()["end"]
        self.buffer = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.hidden = torch.zeros((tokens, config.hidden_size), dtype=model.dtype, device=self.device)
        self.out = torch.zeros((2, most), dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self.host = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_BUFFERS)]
        self.back = [torch.zeros((2, most), dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_BUFFERS)]
        self._turn = 0
        self._views: dict[Sizes, StepInputs] = {}
        self._captured: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.graphs else None

    def weights_changed(self) -> None:
        """Called when a new weight version begins. Rebuilds fused weights and graphs if parameters were moved instead
        of written in place, or if adapters were switched."""
        if self._weights != self._weight_pointers():
            self.fused = self._fused()
            if self.deterministic and self.fused is None:
                raise EngineError("deterministic rollout does not support adapters; turn off one of the two")
            self._weights = self._weight_pointers()
            self._captured.clear()
        if self.image_inputs is not None:
            self.image_inputs.weights_changed()

    def _fused(self) -> FusedDecoder | None:
        if self.eager or not fusable(self.model, invariant=self.deterministic):
            return None
        return FusedDecoder(self.model, self.kernels, invariant=self.deterministic, fp8=self.fp8)

    def _weight_pointers(self) -> list[object]:
        return [*(p.data_ptr() for p in self.model.parameters()), *switches(self.model)]

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> _InFlight | FinishedStep:
        self._turn = (self._turn + 1) % HOST_BUFFERS
        seen = self.image_inputs.seen(plan) if self.image_inputs is not None else None
        plain = seen is None and (self.states is None or self._only_decodes(plan))
        sizes, split, graph = self._bucket(plan, plain)
        host = self.host[self._turn]
        size = fill(
            host.numpy(),
            sizes,
            plan,
            self.slots,
            page_size=self.store.page_size,
            group=self.group,
            padding=self.pad,
            positions=self.image_inputs.positions(plan) if self.image_inputs is not None else None,
        )
        self.buffer[:size].copy_(host[:size], non_blocking=True)
        inputs = self._inputs(sizes) if graph else StepInputs.of(self.buffer, sizes)
        if plan.copies:
            source, target = inputs.copies[:, : len(plan.copies)].long()
            self.store.copy_pages_at(source, target)
        states = None
        if self.states is not None:
            self.states.copy(plan.saves)
            self.states.copy(plan.loads)
            states = partial(self._states, plan, inputs)  # called inside the graph, which must compute its own rows
        self._replay(graph, ("body", *sizes[:4], split), lambda: self._body(inputs, split, seen, states))
        if self.states is not None:
            self.states.copy(plan.snapshots)
        samplers = plan.samplers
        special = self.slots.filters[samplers] | self.slots.constrained[samplers]
        if len(samplers) and (self.deterministic or special.any()):
            return self._sample_by_torch(inputs, plan)
        if len(samplers):
            self._replay(True, ("head", sizes.samples), lambda: self._head(inputs))
        return self._read_back(len(samplers))

    def _states(self, plan: StepPlan, inputs: StepInputs) -> StepStates:
        """A step of decoding tokens reads the rows of its states from the device, so that a graph can run it."""
        assert self.states is not None
        if self._only_decodes(plan):
            padding = inputs.sizes.tokens - inputs.sizes.samples
            return DecodeStates(self.states, F.pad(inputs.slots.long(), (0, padding), value=self.states.trash))
        return step_states(self.states, plan, step_rows(plan, self.slots))

    def _only_decodes(self, plan: StepPlan) -> bool:
        """Whether every request of the step has one token and a state."""
        return not plan.chunks and bool((self.slots.computed[plan.decodes] > 1).all())

    def _inputs(self, sizes: Sizes) -> StepInputs:
        """Cached views, for the few sizes that graphs have."""
        if sizes not in self._views:
            self._views[sizes] = StepInputs.of(self.buffer, sizes)
        return self._views[sizes]

    def _bucket(self, plan: StepPlan, plain: bool) -> _Bucket:
        """`plain`: the step has no image tokens, and no chunks of a model with states. One that has runs without a
        graph, since image features and the segments of chunks have no fixed address."""
        decodes, samples = len(plan.decodes), len(plan.samplers)
        tokens = decodes + sum(c.tokens for c in plan.chunks)
        pages = self.slots.table_SP.shape[1]
        split, width = self._split_up_to(plan), extend_tokens(self.group)
        graph = self.graphs and plain and tokens <= GRAPH_TOKENS and len(plan.chunks) <= GRAPH_CHUNKS
        if graph:
            return self._graph_bucket(tokens, samples, split, chunked=bool(plan.chunks))
        tiles = 0 if split else decodes + sum(-(-c.tokens // width) for c in plan.chunks)
        samples = min(self.max_samples, bucket(samples))
        sizes = Sizes(tokens, decodes, len(plan.chunks), tiles, samples, pages, self.max_samples, self.axes)
        return _Bucket(sizes, split, graph)

    def _graph_bucket(self, tokens: int, samples: int, split: int, *, chunked: bool) -> _Bucket:
        tokens, (count, pages) = bucket(tokens), self.slots.table_SP.shape
        decodes, chunks = min(count, tokens), GRAPH_CHUNKS if chunked else 0
        tiles = 0 if split else decodes + (tokens // extend_tokens(self.group) + chunks if chunked else 0)
        samples = min(self.max_samples, bucket(samples))
        return _Bucket(Sizes(tokens, decodes, chunks, tiles, samples, pages, self.max_samples, self.axes), split, True)

    @torch.no_grad()
    def capture(self) -> int:
        """Capture the graphs of the steps that text needs, so that no rollout waits for a capture. Returns how many
        exist. Models with states capture theirs when they are first used, and so do long split histories."""
        buckets = self._capturable() if self.graphs and self.states is None and not self._captured else []
        for sizes, split, graph in buckets:
            empty = StepPlan(decodes=np.empty(0, np.int64), chunks=[])
            size = fill(
                self.host[0].numpy(),
                sizes,
                empty,
                self.slots,
                page_size=self.store.page_size,
                group=self.group,
                padding=self.pad,
            )
            self.buffer[:size].copy_(self.host[0][:size])
            inputs = self._inputs(sizes)
            self._replay(graph, ("body", *sizes[:4], split), partial(self._body, inputs, split, None, None))
            if not self.deterministic:
                self._replay(graph, ("head", sizes.samples), partial(self._head, inputs))
        return len(self._captured)

    def _capturable(self) -> list[_Bucket]:
        """What `_bucket` makes of plans with a graph, the largest first: later ones reuse its memory."""
        count, pages = self.slots.table_SP.shape
        most, found = min(GRAPH_TOKENS, len(self.hidden)), []
        few = FEW_PROGRAMS // (self.kv_heads * group_parts(self.group))
        for tokens in sorted({bucket(n) for n in range(1, most + 1)}, reverse=True):
            samples = min(tokens, self.max_samples)
            found.append(self._graph_bucket(tokens, samples, 0, chunked=True))
            if tokens <= bucket(count):
                found.append(self._graph_bucket(tokens, samples, 0, chunked=False))
            if tokens <= bucket(few) and pages * self.store.page_size > SPLIT and not self.deterministic:
                found.append(self._graph_bucket(tokens, samples, SPLIT_BOUND, chunked=False))
        return found

    def _split_up_to(self, plan: StepPlan) -> int:
        """0 if histories are not split, else an upper bound of their lengths, rounded so that few graphs are needed."""
        programs = len(plan.decodes) * self.kv_heads * group_parts(self.group)
        if plan.chunks or programs > FEW_PROGRAMS or self.deterministic:
            return 0
        longest = int(self.slots.computed[plan.decodes].max())
        return max(SPLIT_BOUND, 1 << (longest - 1).bit_length()) if longest > SPLIT else 0

    def _body(
        self, inputs: StepInputs, split: int, seen: SeenImages | None, states: Callable[[], StepStates] | None
    ) -> None:
        attention = KernelAttention(self.store, inputs, self.kernels, split)
        if states is not None:
            attention.use_states(states())
        known, source = inputs.ids.long(), inputs.source.long()
        ids_T = torch.where(source >= 0, self.last_ids[source.clamp(min=0)], known)
        with recorded_routes(self.store, attention.places_T):
            if self.fused is not None:
                hidden = self.fused(ids_T, inputs.positions, attention.places_T, attention)
            else:
                with forward_in_fp8(self.fp8):
                    hidden = packed_hidden(self.model, ids_T, inputs.positions.long(), attention, seen)
        self.hidden[: inputs.sizes.tokens].copy_(hidden)

    def _head(self, inputs: StepInputs) -> None:
        samples = inputs.sizes.samples
        logits = self._logits(self.hidden[inputs.last.long()]).float()
        ids = torch.empty(samples, dtype=torch.int64, device=self.device)
        logprobs = torch.empty(samples, dtype=torch.float32, device=self.device)
        self.kernels.sample(logits, inputs.temperature, inputs.uniform, ids, logprobs)
        self.last_ids.index_copy_(0, inputs.slots.long(), ids)
        self.out[0, :samples] = ids
        self.out[1, :samples] = logprobs.view(torch.int32)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.fused.logits(hidden) if self.fused is not None else head_logits(self.model, hidden)

    def _replay(self, graph: bool, key: tuple[object, ...], run: Callable[[], None]) -> None:
        """Run directly, or through a CUDA graph, which is captured after a first direct run that compiles the
        kernels. Graphs are those of FP8, if it is set."""
        if not (graph and self.graphs) or (self.fp8 is not None and not self.fp8.active):
            run()
        elif key in self._captured:
            self._captured[key].replay()
        else:
            run()
            graph_ = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph_, pool=self._memory, capture_error_mode="thread_local"):
                run()
            self._captured[key] = graph_

    def _sample_by_torch(self, inputs: StepInputs, plan: StepPlan) -> FinishedStep:
        samplers = plan.samplers
        rows = inputs.last[: len(samplers)].long()
        logits = self._logits(self.hidden[rows])
        sampled = sample(logits, Draw.of(self.slots, samplers, plan.targets(self.slots)))
        places = torch.from_numpy(samplers).to(self.device)  # of drafts too, whose steps nothing overlaps
        self.last_ids[places] = torch.from_numpy(sampled.ids).to(self.device)
        return FinishedStep(sampled)

    def _read_back(self, samples: int) -> _InFlight:
        output = self.back[self._turn]
        output.copy_(self.out, non_blocking=True)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return _InFlight(output, samples, event)


def bucket(count: int) -> int:
    """The padded size of `count`: powers of two, and from 64 on steps of a quarter of the power below."""
    power = 1 << max(0, count - 1).bit_length()
    step = max(1, power // 8) if power > 64 else power
    return max(1, -(-count // step) * step)
