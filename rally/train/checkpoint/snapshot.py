"""Snapshots of training state: copied to main memory at once, written to disk later while training continues.

A part of a checkpoint is a function that writes into the checkpoint's folder. It is made on the training thread, owns
all the memory it needs from then on, and may be called on any thread.
"""

from __future__ import annotations

import functools
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rally.models.load import save_tokenizer
from rally.models.lora import adapter_weights, has_adapters, merged_weights, plain_twin, save_adapters
from rally.models.sharding import full_tensor, model_state, ranks_of
from rally.models.vision_loading import processor_files
from rally.platforms import on_accelerator, platform_of
from rally.util.background_threads import started

THREADS = 8
PIECE = 32 * 2**20
"""Bytes that a thread copies at once."""


def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="rally-host")


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, each in its own memory."""
    made = [
        torch.empty(one.shape, dtype=one.dtype) if _by_pieces(one) else one.detach().to("cpu", copy=True)
        for one in tensors
    ]
    fill([(one, copy) for one, copy in zip(tensors, made, strict=True) if _by_pieces(one)])
    return made


def _by_pieces(tensor: Tensor) -> bool:
    return on_accelerator(tensor.device) and tensor.is_contiguous()


def fill(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the first tensor of each pair into the second, which is on the CPU. Both are contiguous, of one shape and
    dtype."""
    with threads() as workers:
        for _ in workers.map(_copy, (piece for pair in pairs for piece in _pieces(*pair))):
            pass  # raises what a worker raised


class _Piece(NamedTuple):
    source: Tensor
    target: Tensor


def _pieces(source: Tensor, target: Tensor) -> Iterator[_Piece]:
    source_bytes, target_bytes = as_bytes(source), as_bytes(target)
    for at in range(0, len(source_bytes), PIECE):
        yield _Piece(source_bytes[at : at + PIECE], target_bytes[at : at + PIECE])


def _copy(piece: _Piece) -> None:
    piece.target.numpy()[:] = staged(piece.source).numpy()  # numpy, because torch would start further threads


_of_thread = threading.local()


def staged(piece: Tensor) -> Tensor:
    """At most PIECE bytes in main memory, valid for this thread until its next call."""
    platform = platform_of(piece.device)
    if platform is None:
        return piece
    with platform.module.device(piece.device):  # a new thread would use the first GPU
        if not hasattr(_of_thread, "pinned"):
            _of_thread.pinned = torch.empty(PIECE, dtype=torch.uint8).pin_memory()
        pinned: Tensor = _of_thread.pinned
        return pinned[: len(piece)].copy_(piece)


def write_state(state: Any, path: Path) -> None:
    """Write `state` as `torch.save` does, byte for byte. It must not change until this returns. A full disk raises
    OSError, where torch would raise a RuntimeError about file positions."""
    queue = _SaveQueue({tensor.untyped_storage().data_ptr() for tensor in tensors_in(state)})
    with path.open("wb") as file:
        saving = started(lambda: queue.save(state), "rally-state")
        try:
            while (data := queue.chunks.get()) is not None:
                file.write(data)
        finally:
            wait([saving])
    saving.result()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested mappings, lists and tuples, except those sharded over ranks."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


class _SaveQueue:
    """A file for `torch.save` that queues what is written. Memory at the addresses `lasting` outlives the saving and is
    queued without a copy; torch reuses all other memory after `write`, so that is copied. The last chunk is None."""

    def __init__(self, lasting: set[int]) -> None:
        self._lasting = lasting
        self.chunks: SimpleQueue[memoryview | bytes | None] = SimpleQueue()

    def save(self, state: Any) -> None:
        try:
            torch.save(state, cast(BinaryIO, self))
        finally:
            self.chunks.put(None)

    def write(self, data: memoryview) -> int:
        lasts = len(data) > 0 and np.frombuffer(data, np.uint8).ctypes.data in self._lasting
        self.chunks.put(data if lasts else bytes(data))
        return len(data)

    def flush(self) -> None:
        """Required by torch; the thread that writes the file flushes it."""


Part = Callable[[Path], None]
WHOLE = "huggingface"  # the folder of the merged model, inside that of its adapters


class Weights(NamedTuple):
    """The weights of a model, or of its adapters; `merged`: also the model with the adapters merged in."""

    own: dict[str, Tensor]
    merged: dict[str, Tensor] | None


def copied_weights(model: PreTrainedModel, *, merged: bool) -> Weights:
    adapted = has_adapters(model)
    own = copied(adapter_weights(model) if adapted else model_state(model))
    return Weights(own, copied(merged_weights(model)) if merged and adapted else None)


def model_part(
    folder: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, merged: bool = False
) -> Part:
    """A Hugging Face folder with the tokenizer. For a model with adapters it is a PEFT folder, which with `merged` also
    holds a folder of the full model."""
    adapted = has_adapters(model)
    weights, both = copied_weights(model, merged=merged)
    saver = model if ranks_of(model).world_size == 1 else plain_twin(model)
    files = {**_tokenizer_files(tokenizer), **processor_files(model)}

    def write(checkpoint: Path) -> None:
        target = checkpoint / folder
        if adapted:
            save_adapters(model, weights, target)
        else:
            saver.save_pretrained(target, state_dict=weights)
        _write_files(files, target)
        if both is not None:
            plain_twin(model).save_pretrained(target / WHOLE, state_dict=both)
            _write_files(files, target / WHOLE)

    return write


def state_part(name: str, state: Mapping[str, Any], *, in_place: bool = False) -> Part:
    """Tensors and plain values as one `torch.save` file. `in_place`: see `copied`."""
    mine = copied(dict(state), in_place=in_place)
    return lambda checkpoint: write_state(mine, checkpoint / name)


def json_part(name: str, state: Mapping[str, Any]) -> Part:
    """Plain values as JSON. Raises ValueError or TypeError for values that JSON would change."""
    text = json.dumps(state)
    if json.loads(text) != state:
        raise ValueError("JSON would change it")

    def write(checkpoint: Path) -> None:
        (checkpoint / name).write_text(text, encoding="utf-8")

    return write


def copied(value: Any, *, in_place: bool = False) -> Any:
    """A copy on the CPU. Tied tensors stay tied, so they are written once. `in_place`: what is in main memory is not
    copied, because it does not change before it has been written."""
    distinct = {
        _identity(tensor): tensor
        for tensor in tensors_in(value)
        if not in_place or on_accelerator(tensor.device) or not _whole(tensor)
    }
    return _with(dict(zip(distinct, copies(list(distinct.values())), strict=True)), value)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _whole(tensor: Tensor) -> bool:
    """Whether the tensor is all of its memory. torch saves the memory of a part as a whole."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _with(copies: Mapping[tuple[Any, ...], Tensor], value: Any) -> Any:
    """`value` with its tensors replaced by the copies. Sharded tensors are gathered here; all ranks do so in this
    order."""
    if isinstance(value, DTensor):
        return full_tensor(value)
    if isinstance(value, Tensor):
        return copies.get(_identity(value), value)
    if isinstance(value, Mapping):
        return {name: _with(copies, inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with(copies, inner) for inner in value)
    return value


@functools.lru_cache(maxsize=1)
def _tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, bytes]:
    """The files of the run's tokenizer, saved once on the training thread: saving takes a third of a second and is not
    safe while another thread encodes."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        save_tokenizer(tokenizer, root)
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def _write_files(files: Mapping[str, bytes], target: Path) -> None:
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
