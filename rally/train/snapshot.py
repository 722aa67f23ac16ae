"""What a checkpoint holds is copied at once and written later: training may go on meanwhile and changes none of it.

A part of a checkpoint is a function that writes into the checkpoint's folder. It is made on the training thread, from
then on owns all the memory it needs, and may be called on any other.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rally.train.host import copies
from rally.train.lora import adapter_weights, has_adapters, merged_weights, plain_twin, save_adapters
from rally.train.ranks import ranks_of
from rally.train.sharded import model_state, whole
from rally.train.sight import processor_files
from rally.train.state_file import tensors_in, write_state

Part = Callable[[Path], None]
WHOLE = "huggingface"  # the folder of the merged model, inside that of its adapters


class Weights(NamedTuple):
    """Of a model, or of its adapters; `merged`: of the model with these merged in, where both are wanted."""

    own: dict[str, Tensor]
    merged: dict[str, Tensor] | None


def copied_weights(model: PreTrainedModel, *, merged: bool) -> Weights:
    adapted = has_adapters(model)
    own = copied(adapter_weights(model) if adapted else model_state(model))
    return Weights(own, copied(merged_weights(model)) if merged and adapted else None)


def model_part(
    folder: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, merged: bool = False
) -> Part:
    """A Hugging Face folder with its tokenizer; of a model with adapters a PEFT folder, which with `merged` holds the
    folder of the whole model as well."""
    adapted = has_adapters(model)
    weights, both = copied_weights(model, merged=merged)
    saver = model if ranks_of(model).count == 1 else plain_twin(model)
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


def state_part(name: str, state: Mapping[str, Any]) -> Part:
    """Tensors and plain values as one file of torch."""
    mine = copied(dict(state))
    return lambda checkpoint: write_state(mine, checkpoint / name)


def json_part(name: str, state: Mapping[str, Any]) -> Part:
    """Plain values as text that gives back an equal state; ValueError or TypeError for what JSON would change."""
    text = json.dumps(state)
    if json.loads(text) != state:
        raise ValueError("it would come back changed")

    def write(checkpoint: Path) -> None:
        (checkpoint / name).write_text(text, encoding="utf-8")

    return write


def copied(value: Any) -> Any:
    """The same on the CPU, in memory of its own. Tensors that are one stay one: tied weights are written once."""
    found = {_identity(tensor): tensor for tensor in tensors_in(value)}
    return _with(dict(zip(found, copies(list(found.values())), strict=True)), value)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _with(made: Mapping[tuple[Any, ...], Tensor], value: Any) -> Any:
    """`value` with the copies in it; what is spread over ranks is put together now, by all of them in this order."""
    if isinstance(value, DTensor):
        return whole(value)
    if isinstance(value, Tensor):
        return made[_identity(value)]
    if isinstance(value, Mapping):
        return {name: _with(made, inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with(made, inner) for inner in value)
    return value


@functools.lru_cache(maxsize=1)
def _tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, bytes]:
    """A run's tokenizer does not change, takes a third of a second to write, and may not be written while another
    thread encodes with it: so it is written once, on the training thread, and remembered."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        root = Path(place)
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def _write_files(files: Mapping[str, bytes], target: Path) -> None:
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
