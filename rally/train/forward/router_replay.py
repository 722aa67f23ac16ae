"""Rows with the expert choices that their tokens are computed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.models.residence import device_of
from rally.models.routing import ExpertRouter, Routing, fitting, routers_of
from rally.models.sequence_parallel import SequenceGroup
from rally.models.sharding import ranks_of
from rally.train.forward.logprobs import token_logprobs
from rally.train.micro_batches import MicroBatchLimits, in_order, micro_batches_for, parts_of, share_of
from rally.train.packing import PackedRows, Row, pack, route_array
from rally.types import Routes


def fitted_row(row: Row, routers: list[ExpertRouter], decoder_layers: int) -> Row:
    """The row with one route per router; servers also count layers without one."""
    assert row.routes is not None
    return _with_routes(row, fitting(route_array(row.routes)[: len(row.inputs)], routers, decoder_layers))


@torch.no_grad()
def recorded_rows(
    model: PreTrainedModel, rows: Sequence[Row], limits: MicroBatchLimits, temperature: float = 1.0
) -> list[Row]:
    """The rows with the experts that the model chooses for them now. Only rank 0 has rows."""
    ranks = ranks_of(model)
    bare = [replace(row, routes=None) for row in rows]
    rounds = micro_batches_for(ranks, bare, limits)
    layers, experts = len(routers := routers_of(model)), routers[0].chosen
    mine = [torch.zeros(0)]
    for part in share_of(ranks, rounds):
        packed, routing = pack(part.rows, device_of(model)), Routing(record=True)
        token_logprobs(model, packed, temperature, routing=routing)
        routes_TLk = _recorded(routing, packed, ranks.sequence_group, (layers, experts)).cpu().numpy()
        if part.counts:
            mine.extend(torch.from_numpy(routes_TLk[path].reshape(-1)) for path in packed.paths)

    def count(row: Row) -> int:
        return layers * experts * len(row.inputs)

    found: dict[int, np.ndarray[Any, Any]] = {}
    for part_rows, numbers in zip(parts_of(rounds), in_order(ranks, rounds, torch.cat(mine), count), strict=True):
        pieces = numbers.split([count(row) for row in part_rows])
        found |= zip(map(id, part_rows), (piece.numpy().reshape(-1, layers, experts) for piece in pieces), strict=True)
    return [_with_routes(row, found[id(row)]) if len(row.sampled) else row for row in bare]


def _recorded(routing: Routing, packed: PackedRows, group: SequenceGroup | None, shape: tuple[int, int]) -> Tensor:
    """The experts of all packed tokens. Each rank of a sequence-parallel group has recorded those of its own tokens."""
    if group is None:
        return routing.recorded(len(packed.ids_T))
    shares = group.tokens(len(packed.ids_T))
    own = shares[group.rank]
    found = routing.recorded(len(packed.ids_T))[own.start : own.stop] if own else packed.ids_T.new_empty((0, *shape))
    return group.gather(found.int(), [len(share) for share in shares])  # no backend sends 16 bits


def _with_routes(row: Row, routes: np.ndarray[Any, Any]) -> Row:
    data = np.ascontiguousarray(routes[: len(row.inputs)], dtype="<i2").tobytes()
    return replace(row, routes=Routes(data, *routes.shape[1:]))
