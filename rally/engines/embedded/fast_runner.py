"""The fast way to run a step: kernels over pages, CUDA graphs, one copy to the device and one back, a step ahead.

It computes what ModelRunner computes. On a GPU a step's body (embedding to last hidden state) is captured once per
bucket of tokens, the head and the sampling once per bucket of rows; weights are updated in place, so the graphs serve
every version. Large prefills run without a graph: there the GPU is busy for longer than Python needs to feed it. On a
CPU the same code runs with the kernels' specifications, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.engines.base import EngineError
from rally.engines.embedded.attention import head_logits, packed_hidden
from rally.engines.embedded.fused import FusedDecoder, fusable
from rally.engines.embedded.inputs import Inputs, Place, Sizes, chunk_rows, fill
from rally.engines.embedded.kernels import Kernels, kernels_for
from rally.engines.embedded.pages import KVStore
from rally.engines.embedded.sampler import Draw, Sampled, sample
from rally.engines.embedded.scheduler import Plan
from rally.engines.embedded.slots import Slots
from rally.kernels.tiles import extend_tiles, extend_tokens

GRAPH_TOKENS = 1024  # steps of more tokens run without a graph
GRAPH_CHUNKS = 64  # so many chunks fit into a graph with chunks
SPLIT = 512  # attention over longer histories is cut into parts of this size, so it decides which graphs are alike
FEW_SPLITS = 4  # so many are always provided for: more graphs would cost more than empty parts
HOST_BUFFERS = 3  # one being filled, one in flight, one being read
"""A step's host buffers are used again only after the step has been read back."""


class KernelAttention:
    """The context of one fast step: keys and values go to their places, then kernels read the pages."""

    def __init__(self, store: KVStore, inputs: Inputs, kernels: Kernels, max_length: int) -> None:
        self.store, self.inputs, self.kernels, self.max_length = store, inputs, kernels, max_length
        self.places_T = inputs.places.long()

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.store.keys[layer], self.store.values[layer]

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        for pool, new in zip(self.pool(layer), (k_TKD, v_TKD), strict=True):
            pool.index_copy_(0, self.places_T, new.to(pool.dtype))
        return self.read(layer, q_THD.contiguous(), scale, window)

    def read(self, layer: int, q_THD: Tensor, scale: float, window: int | None) -> Tensor:
        inputs, (keys, values) = self.inputs, self.pool(layer)
        out_THD = torch.empty_like(q_THD)
        decodes = inputs.sizes.decodes
        options = {"page_size": self.store.page_size, "scale": scale, "window": window}
        if decodes:  # rows that do not decode are cleared here, and those of chunks written below
            self.kernels.paged_decode(
                q_THD[:decodes],
                keys,
                values,
                inputs.table[:decodes],
                inputs.lengths,
                out_THD[:decodes],
                max_length=self.max_length,
                **options,
            )
        if inputs.sizes.tiles:
            self.kernels.paged_extend(q_THD, keys, values, inputs.table, inputs.tiles, out_THD, **options)
        return out_THD


class _InFlight:
    """A launched step whose tokens are on their way to the host."""

    def __init__(self, words: Tensor, samples: int, event: torch.cuda.Event | None) -> None:
        self.words, self.samples, self.event = words, samples, event

    def result(self) -> Sampled:
        if self.event is not None:
            self.event.synchronize()
        ids, logprobs = self.words[:, : self.samples].numpy()
        values = logprobs.view(np.float32).copy()
        if not np.isfinite(values).all():
            raise EngineError("the model's logits are not finite (NaN or infinity); its weights are broken or diverged")
        return Sampled(ids.astype(np.int64), values, values)


class _Read(NamedTuple):
    """A step that was sampled with filters and has been read back already."""

    sampled: Sampled

    def result(self) -> Sampled:
        return self.sampled


class FastRunner:
    """Owns no weights: the module is the trainer's."""

    ahead = True

    def __init__(
        self, model: PreTrainedModel, store: KVStore, slots: Slots, *, max_tokens: int, eager: bool = False
    ) -> None:
        self.model, self.store, self.slots = model, store, slots
        self.device = store.device
        self.graphs = self.device.type == "cuda" and not eager
        self.kernels = kernels_for(self.device)
        self.fused = FusedDecoder(model, self.kernels) if fusable(model) and not eager else None
        config = model.config.get_text_config()
        self.group: int = config.num_attention_heads // store.keys[0].shape[1]
        count, width = slots.table_SP.shape
        self.pad = Place(trash=store.num_pages * store.page_size, no_slot=count)
        self.last_ids = torch.zeros(count + 1, dtype=torch.int64, device=self.device)
        room = bucket(max_tokens)
        rows = max(count, GRAPH_CHUNKS)
        most = Sizes(room, count, rows, room + GRAPH_CHUNKS, count, width, count).offsets()["end"]
        self.buffer = torch.zeros(most, dtype=torch.int32, device=self.device)
        self.hidden = torch.zeros((room, config.hidden_size), dtype=model.dtype, device=self.device)
        self.out = torch.zeros((2, count), dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self.host = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_BUFFERS)]
        self.back = [torch.zeros((2, count), dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_BUFFERS)]
        self._turn = 0
        self._splits = min(FEW_SPLITS, -(-slots.ids.shape[1] // SPLIT))
        self._views: dict[Sizes, Inputs] = {}
        self._captured: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.graphs else None

    def weights_changed(self) -> None:
        """Called when a new weight version begins; parameters that were moved, not written, are found again here."""
        if self.fused is not None and not self.fused.intact:
            self.fused = FusedDecoder(self.model, self.kernels)
            self._captured.clear()

    @torch.no_grad()
    def launch(self, plan: Plan) -> _InFlight | _Read:
        self._turn = (self._turn + 1) % HOST_BUFFERS
        sizes, longest = self._sizes(plan)
        host = self.host[self._turn]
        words = fill(
            host.numpy(),
            sizes,
            plan,
            self.slots,
            page_size=self.store.page_size,
            group=self.group,
            pad=self.pad,
        )
        self.buffer[:words].copy_(host[:words], non_blocking=True)
        inputs = self._inputs(sizes)
        if plan.copies:
            source, target = inputs.copies[:, : len(plan.copies)].long()
            self.store.copy_pages_at(source, target)
        small = sizes.tokens <= GRAPH_TOKENS and len(plan.chunks) <= GRAPH_CHUNKS
        self._replay(small, ("body", *sizes[:4], longest), lambda: self._body(inputs, longest))
        samplers = plan.samplers
        if len(samplers) and self.slots.filters[samplers].any():
            return self._sample_filtered(inputs, plan)
        if len(samplers):
            self._replay(True, ("head", sizes.samples), lambda: self._head(inputs))
        return self._read_back(len(samplers))

    def _inputs(self, sizes: Sizes) -> Inputs:
        if sizes not in self._views:
            self._views[sizes] = Inputs.of(self.buffer, sizes)
        return self._views[sizes]

    def _sizes(self, plan: Plan) -> tuple[Sizes, int]:
        """The bucket of a plan, and a bound of its decoding histories' lengths."""
        decodes, samples = len(plan.decodes), len(plan.samplers)
        tokens = decodes + sum(c.tokens for c in plan.chunks)
        count, pages = self.slots.table_SP.shape
        longest = int(self.slots.computed[plan.decodes].max()) if decodes else 0
        splits = max(self._splits, 1 << (max(1, -(-longest // SPLIT)) - 1).bit_length())
        if tokens > GRAPH_TOKENS or len(plan.chunks) > GRAPH_CHUNKS or not self.graphs:
            tiles = len(extend_tiles(chunk_rows(plan, decodes), self.group)) if plan.chunks else 0
            shape = (tokens, decodes, len(plan.chunks), tiles)
        elif plan.chunks:
            padded = bucket(tokens)
            tiles = padded // extend_tokens(self.group) + GRAPH_CHUNKS
            shape = (padded, min(count, padded), GRAPH_CHUNKS, tiles)
        else:
            padded = bucket(tokens)
            shape = (padded, min(count, padded), 0, 0)
        return Sizes(*shape, min(count, bucket(samples)), pages, count), splits * SPLIT

    def _body(self, inputs: Inputs, longest: int) -> None:
        attention = KernelAttention(self.store, inputs, self.kernels, longest)
        given, source = inputs.ids.long(), inputs.source.long()
        ids_T = torch.where(source >= 0, self.last_ids[source.clamp(min=0)], given)
        if self.fused is not None:
            hidden = self.fused(ids_T, inputs.positions, attention.places_T, attention)
        else:
            hidden = packed_hidden(self.model, ids_T, inputs.positions.long(), attention)
        self.hidden[: inputs.sizes.tokens].copy_(hidden)

    def _head(self, inputs: Inputs) -> None:
        samples = inputs.sizes.samples
        logits = head_logits(self.model, self.hidden[inputs.last.long()]).float()
        ids = torch.empty(samples, dtype=torch.int64, device=self.device)
        logprobs = torch.empty(samples, dtype=torch.float32, device=self.device)
        self.kernels.sample(logits, inputs.temperature, inputs.uniform, ids, logprobs)
        self.last_ids.index_copy_(0, inputs.slots.long(), ids)
        self.out[0, :samples] = ids
        self.out[1, :samples] = logprobs.view(torch.int32)

    def _replay(self, graph: bool, key: tuple[object, ...], run: Callable[[], None]) -> None:
        """Run, through a CUDA graph if asked for: captured after a first plain run, which compiles what it needs."""
        if not (graph and self.graphs):
            run()
        elif key in self._captured:
            self._captured[key].replay()
        else:
            run()
            graph_ = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph_, pool=self._memory, capture_error_mode="thread_local"):
                run()
            self._captured[key] = graph_

    def _sample_filtered(self, inputs: Inputs, plan: Plan) -> _Read:
        samplers = plan.samplers
        rows = inputs.last[: len(samplers)].long()
        sampled = sample(head_logits(self.model, self.hidden[rows]), Draw.of(self.slots, samplers))
        places = torch.from_numpy(samplers).to(self.device)
        self.last_ids[places] = torch.from_numpy(sampled.ids).to(self.device)
        return _Read(sampled)

    def _read_back(self, samples: int) -> _InFlight:
        words = self.back[self._turn]
        words.copy_(self.out, non_blocking=True)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return _InFlight(words, samples, event)


def bucket(count: int) -> int:
    """The next size worth a graph of its own: powers of two, from 64 on in steps of a quarter of the power below."""
    power = 1 << max(0, count - 1).bit_length()
    step = max(1, power // 8) if power > 64 else power
    return max(1, -(-count // step) * step)
