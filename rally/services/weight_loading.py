"""New weights of a running engine server: from files, as deltas, or broadcast by a trainer.

Weights from files are checked before any is replaced. A broadcast that fails leaves weights of no version: all requests
end with an error, and later ones fail, until weights were loaded completely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rally.engines.embedded.engine import EmbeddedEngine, WeightsLost
from rally.engines.remote.inside.rally_weight_group import GroupInvitation, TensorForm, WeightGroup, received
from rally.engines.remote.weight_deltas import DeltaError, StoredTensor, apply_in_place, read_delta, stored_tensors
from rally.models.load import LoadError, load_model
from rally.platforms import on_accelerator
from rally.services.admission import Refused
from rally.types import RallyError

SHARED_FOLDER = "set rollout.checkpoint_engine.folder of the run to storage that it shares with the server"


class BroadcastRequest(BaseModel):
    """Weights that a trainer broadcasts now, in buckets: their names, dtypes and shapes, in the order of coming."""

    model_config = ConfigDict(extra="forbid")

    group: str
    weights: list[tuple[str, str, list[int]]] = Field(max_length=1_000_000)
    bucket_bytes: int = Field(ge=1, le=2**40)


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    folder: Path | None = None
    deltas: list[Path] = Field(default=[], max_length=1000)
    """Files that are applied, in this order, to the weights of `folder` or, without one, to the current ones."""
    broadcast: BroadcastRequest | None = None
    version: int = Field(ge=0, lt=2**63, strict=True)
    in_flight: Literal["abort", "keep", "recompute"]


class JoinRequest(BaseModel):
    """Where a trainer and its servers meet."""

    model_config = ConfigDict(extra="forbid", strict=True)

    place: str = Field(max_length=300, pattern=r"^\S+:[0-9]{1,5}$")
    name: str = Field(max_length=100)
    backend: str = Field(max_length=20)
    rank: int = Field(ge=1)
    size: int = Field(ge=2, le=10_000)
    secret: str = Field(max_length=200, repr=False)
    seconds: float = Field(gt=0, le=3600)


class WeightService:
    """Loads weights into an engine. Its settings determine what happens to requests in flight."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._group: WeightGroup | None = None  # in which a trainer broadcasts

    def join(self, request: JoinRequest) -> None:
        """Join a group of weights, and leave the one before."""
        self._leave()
        try:
            self._group = WeightGroup(GroupInvitation(**request.model_dump()), self._engine.core.model.device)
        except (RallyError, RuntimeError, OSError) as problem:  # torch's errors are RuntimeErrors
            raise Refused(500, f"this server cannot join the group of weights: {problem}") from problem

    def load(self, request: LoadRequest) -> None:
        """Load weights between two steps of the engine."""
        in_flight = self._engine.core.settings.in_flight
        if request.in_flight != in_flight:
            raise Refused(
                400,
                f"requests in flight follow {in_flight!r} here, not {request.in_flight!r}; set rollout.in_flight to it",
            )
        if request.broadcast is None:
            _load_files(self._engine, request)
        else:
            self._load_broadcast(request.broadcast, request.version)

    def _load_broadcast(self, request: BroadcastRequest, version: int) -> None:
        ours = self._engine.core.model.state_dict()
        forms = [TensorForm(name, dtype, tuple(shape)) for name, dtype, shape in request.weights]
        if misfit := next(_mismatches(ours, {form.name: form.shape for form in forms}), None):
            raise Refused(
                400, f"the weights of the trainer do not fit this model: {misfit}; serve the model of the run"
            )
        if self._group is None or self._group.name != request.group:
            raise Refused(409, f"this server is not in the group {request.group!r}; join it first")
        try:
            with self._engine.updating(version):
                self._receive(self._group, forms, request.bucket_bytes, ours)
        except WeightsLost as lost:
            self._leave()
            raise Refused(500, str(lost), code="bad_weights") from lost

    def _receive(
        self, group: WeightGroup, forms: Sequence[TensorForm], bucket_bytes: int, into: Mapping[str, Tensor]
    ) -> None:
        try:
            with torch.no_grad():
                for name, weight in received(group, forms, bucket_bytes):
                    into[name].copy_(weight)
        except (RallyError, RuntimeError) as problem:
            raise WeightsLost(f"a broadcast of weights failed: {problem}; load them again") from problem

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _load_files(engine: EmbeddedEngine, request: LoadRequest) -> None:
    """Load weights of files."""
    if request.folder is not None and not request.folder.is_dir():
        raise Refused(400, f"{request.folder} is no folder on this machine; {SHARED_FOLDER}")
    ours = engine.core.model.state_dict()
    loaded = _with_deltas(request, ours) if request.deltas else _from_folder(request.folder, ours)
    if misfit := next(_mismatches(ours, {name: tuple(weight.shape) for name, weight in loaded.items()}), None):
        where = request.folder or request.deltas[0]
        raise Refused(400, f"the weights in {where} do not fit this model: {misfit}; serve the model of the run")
    with torch.no_grad(), engine.updating(request.version):
        for name, weight in loaded.items():
            ours[name].copy_(weight)


def _from_folder(folder: Path | None, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a folder, under the names of the module. Folders of some families have other names, such as a
    tensor for each expert; transformers then reads the folder."""
    if folder is None:
        raise Refused(400, "name a folder with weights, or deltas to the current ones")
    loaded: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            loaded |= load_file(file)
    except (OSError, SafetensorError, ValueError) as problem:
        raise Refused(400, f"the weights in {folder} cannot be read: {problem}") from problem
    renamed = loaded.keys() - ours.keys() and ours.keys() - loaded.keys()
    if not renamed or not (folder / "config.json").is_file():
        return loaded
    dtype = str(next(iter(ours.values())).dtype).removeprefix("torch.")
    try:
        return load_model(str(folder), dtype=dtype, option="the folder of the weights").state_dict()
    except LoadError as problem:
        raise Refused(400, f"the weights in {folder} do not fit this model: {problem}") from problem


def _with_deltas(request: LoadRequest, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights after all deltas. Those that the engine samples from are only read."""
    try:
        deltas = [read_delta(path) for path in request.deltas]
        if request.folder is not None:
            stored = stored_tensors(request.folder)
        else:
            stored = {one.name: _stored(ours[one.name]) for one in deltas[0].weights if one.name in ours}
        for delta in deltas:
            apply_in_place(delta, stored)
    except (OSError, ValueError, LookupError, DeltaError) as problem:
        raise Refused(400, f"the deltas cannot be applied: {problem}", code="wrong_base") from problem
    if deltas[-1].version != request.version:
        raise Refused(
            400, f"the deltas end at version {deltas[-1].version}, not {request.version}; send the others too"
        )
    return {name: _tensor(one) for name, one in stored.items()}


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _stored(weight: Tensor) -> StoredTensor:
    """A copy of a weight as bytes."""
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return StoredTensor(
        NAMES[weight.dtype], tuple(weight.shape), data if on_accelerator(weight.device) else data.copy()
    )


def _tensor(stored: StoredTensor) -> Tensor:
    return torch.from_numpy(stored.data).view(DTYPES[stored.dtype]).reshape(stored.shape)


def _mismatches(ours: Mapping[str, Tensor], loaded: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Names and shapes that differ. One of several tied weights is enough."""
    covered = {ours[name].data_ptr() for name in loaded if name in ours}
    yield from (f"it has no {name}" for name in loaded if name not in ours)
    yield from (f"{name} is missing" for name, weight in ours.items() if weight.data_ptr() not in covered)
    for name, shape in loaded.items():
        if shape != tuple(ours[name].shape):
            yield f"{name} is {shape} there and {tuple(ours[name].shape)} here"
