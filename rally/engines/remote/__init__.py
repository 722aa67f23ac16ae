"""The remote engine: rollout servers (vLLM, SGLang, `rally serve engine`) behind the engine protocol."""

from rally.engines.remote.canary import CanaryError, Oracle, tolerance_of
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.engine import RemoteEngine, RemoteSettings
from rally.engines.remote.joining import JoinFolder, ServerAnnouncement, announce, join_folder
from rally.engines.remote.launched_server import LaunchedServer
from rally.engines.remote.rally_api import Rally, RallyReplica
from rally.engines.remote.rank_engines import GatheredWeights, RankReplica
from rally.engines.remote.server_api import Launch, ServerApi
from rally.engines.remote.sglang_api import Sglang
from rally.engines.remote.vllm_api import Vllm
from rally.engines.remote.weight_broadcast import BroadcastWeights, StagedWeights
from rally.engines.remote.weight_deltas import DeltaFiles
from rally.engines.remote.weight_updates import (
    CudaIpcWeights,
    WeightFiles,
    WeightTransport,
    choose_weights_folder,
    remove_stale_folders,
)

__all__ = [
    "CanaryError",
    "ClientSettings",
    "GatheredWeights",
    "RankReplica",
    "ServerApi",
    "Launch",
    "Oracle",
    "LaunchedServer",
    "Rally",
    "RallyReplica",
    "RemoteEngine",
    "RemoteSettings",
    "ServerReplica",
    "Sglang",
    "Vllm",
    "BroadcastWeights",
    "StagedWeights",
    "DeltaFiles",
    "JoinFolder",
    "ServerAnnouncement",
    "announce",
    "join_folder",
    "WeightFiles",
    "CudaIpcWeights",
    "WeightTransport",
    "choose_weights_folder",
    "remove_stale_folders",
    "tolerance_of",
]
