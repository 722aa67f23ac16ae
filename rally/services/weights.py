"""A served engine takes the weights of a folder under the version it is told, all of them or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file
from torch import Tensor

from rally.engines.embedded.engine import EmbeddedEngine
from rally.services.desk import Refused


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    folder: Path
    version: int = Field(ge=0)
    in_flight: Literal["abort", "keep", "recompute"]


def load_weights(engine: EmbeddedEngine, asked: LoadRequest) -> None:
    """Between two steps of the engine; requests in flight are treated as its settings say."""
    settled = engine.core.settings.in_flight
    if asked.in_flight != settled:
        raise Refused(
            400, f"requests in flight follow {settled!r} here, not {asked.in_flight!r}; set rollout.in_flight to it"
        )
    found: dict[str, Tensor] = {}
    for file in sorted(asked.folder.glob("*.safetensors")):
        found |= load_file(file)
    ours = engine.core.model.state_dict()
    if problem := next(_misfits(ours, found), None):
        raise Refused(400, f"the weights in {asked.folder} are not this model's: {problem}; start it from the same one")
    with torch.no_grad(), engine.updating(asked.version):
        for name, weight in found.items():
            ours[name].copy_(weight)


def _misfits(ours: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    """What does not fit. Of names that share a memory one is enough."""
    given = {ours[name].data_ptr() for name in found if name in ours}
    yield from (f"it has no {name}" for name in found if name not in ours)
    yield from (f"{name} is missing" for name, weight in ours.items() if weight.data_ptr() not in given)
    for name, weight in found.items():
        if weight.shape != ours[name].shape:
            yield f"{name} is {tuple(weight.shape)} there and {tuple(ours[name].shape)} here"
