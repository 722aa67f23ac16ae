"""Builds the engines of the ranks: a sharded policy cannot generate, so every rank samples from a whole copy of it.

Each rank serves its engine over HTTP, and rank 0 and its loop workers ask all of them through the router. A rank
computes one thing at a time: while it executes a message, its engine makes no step, and on a GPU its KV cache lends its
memory. The copies follow the policy by `PublishWeights`, bit by bit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rally.config import Config
from rally.engines import EmbeddedEngine
from rally.engines.base import EngineError
from rally.engines.embedded.memory_plan import free_bytes
from rally.engines.remote import GatheredWeights, Oracle, RankReplica, RemoteEngine, RemoteSettings
from rally.engines.remote.rally_api import IMAGE_BODY_MB
from rally.models.residence import device_of
from rally.models.sharding import Message, copy_gathered, ranks_of
from rally.models.token_masks import Grammars
from rally.models.vision import patches_of
from rally.nodes import RunNodes
from rally.platforms import on_accelerator
from rally.runs.build.engines import client_settings_of, joining_of, oracle_of, router_settings_of, transport_of
from rally.runs.build.models import model_of, tokenizer_of
from rally.runs.build.rollout import engine_settings_of, sampling_of
from rally.runs.build.run_inputs import RunInputs
from rally.train.policy import Policy
from rally.train.rank_messages import PublishWeights, StartEngine

REQUESTS = 4  # that a rank accepts, times max_num_seqs
GIB = 2**30


class RankEngine:
    """The engine of this rank, over a copy of the policy, and its HTTP server."""

    def __init__(self, engine: EmbeddedEngine, tokenizer: PreTrainedTokenizerBase, address: str, token: str) -> None:
        from rally.services.admission import Served
        from rally.services.engine import create_app
        from rally.services.http_server import ServerThread

        self.engine = engine
        self._complete = False  # whether the copy has had all weights, also those that are not trained
        running = engine.core.settings.max_num_seqs
        served = Served(engine=engine, tokenizer=tokenizer, name="policy", max_requests=REQUESTS * running)
        most = IMAGE_BODY_MB if patches_of(engine.core.model) is not None else None
        self._server = ServerThread(lambda: create_app(served, token), address, max_body_mb=most)
        self.port = self._server.port

    def during(self, message: Message) -> AbstractContextManager[None]:
        if isinstance(message, PublishWeights):
            return self.engine.updating(message.version)
        return self.engine.paused()

    def copy_weights(self, policy: PreTrainedModel) -> None:
        """Copy the policy's weights. All ranks must do so together, within `PublishWeights`."""
        copy_gathered(policy, self.engine.core.model, trained_only=self._complete)
        self._complete = True

    def close(self) -> None:
        closing = threading.Thread(target=asyncio.run, args=(self.engine.close(),))  # an event loop may run in this one
        closing.start()
        closing.join()
        self._server.close()


class StartedEngines(NamedTuple):
    """The engine of this rank, and the ports of all ranks' engines."""

    own: RankEngine
    ports: list[int]


def start_engine(
    config: Config, policy: PreTrainedModel, checkpoint: Path | None, end_ids: Sequence[int]
) -> StartedEngines:
    """Start this rank's engine. All ranks must do so together, within `StartEngine`. `checkpoint` is the actor's
    folder, if the run is resumed. `end_ids` are the ends of turns of rank 0's codec."""
    ranks = ranks_of(policy)
    _check_memory(config, policy)
    model = model_of(config, None if checkpoint is None else str(checkpoint)).requires_grad_(False)
    settings = engine_settings_of(config)
    settings = replace(settings, isolated=settings.deterministic and model.device.type == "cpu")
    tokenizer = tokenizer_of(config)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    grammars = Grammars(tokenizer, model.config.get_text_config().vocab_size, end_ids)
    engine = EmbeddedEngine(model, settings, decode=decode, grammars=grammars)
    own = RankEngine(engine, tokenizer, ranks.address, ranks.token)
    ranks.host(own)
    ports = ranks.all_gather(torch.tensor([own.port]))
    return StartedEngines(own, [int(port) for port in ports])


def _check_memory(config: Config, policy: PreTrainedModel) -> None:
    """EngineError if a whole copy of the policy does not fit on this rank's GPU."""
    if not on_accelerator(device_of(policy)):
        return
    size = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    free = free_bytes(device_of(policy))
    if size > free:
        raise EngineError(
            f"a whole copy of the policy needs {size / GIB:.1f} GiB on each GPU, and {free / GIB:.1f} are free; set "
            "rollout.name=vllm or sglang, with rollout.tensor_model_parallel_size above 1"
        )


def rank_engines_of(
    config: Config, inputs: RunInputs, policy: Policy, nodes: RunNodes, checkpoint: Path | None
) -> RemoteEngine:
    """The engine of rank 0 over the engines of all ranks, which are started here."""
    model, ranks = policy.model, policy.ranks
    end_ids = inputs.codec.stop_ids
    with ranks.broadcast(StartEngine(end_ids)):
        own, ports = start_engine(config, model, checkpoint, end_ids)

    def publish(version: int) -> None:
        with ranks.broadcast(PublishWeights(version)):
            own.copy_weights(model)

    weights, oracle = GatheredWeights(publish, transport_of(config, model, nodes)), oracle_of(model)
    settings, each = client_settings_of(config, model, inputs.codec.decode), ranks.world_size // len(nodes.trainer)
    addresses = [node.address for node in nodes.trainer for _ in range(each)]
    return RemoteEngine(
        [
            RankReplica(rank, f"http://{address}:{port}", settings, ranks.token)
            for rank, (address, port) in enumerate(zip(addresses, ports, strict=True))
        ],
        weights,
        replace(oracle, forward=PublishedForward(oracle, weights)),
        RemoteSettings(
            max_model_len=config.max_model_len,
            sampling=sampling_of(config, inputs.codec),
            in_flight=config.rollout.in_flight,
            join_seconds=config.rollout.server.join_timeout,
            router=router_settings_of(config),
        ),
        None if config.rollout.deterministic else joining_of(config, model, inputs.codec.decode),
    )


class PublishedForward:
    """The policy's forward for the canary, computed once for equal tokens and weights: all ranks sample the same."""

    def __init__(self, oracle: Oracle, weights: GatheredWeights) -> None:
        self._oracle, self._weights = oracle, weights
        self._version: int | None = None
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, ids: Sequence[int]) -> Tensor:
        if self._version != self._weights.version:
            self._version = self._weights.version
            self._known.clear()
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = self._oracle.forward(ids)
        return self._known[key]
