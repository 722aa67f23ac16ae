"""Rollout servers (vLLM, SGLang, our own) behind the engine protocol."""

from rally.engines.remote.canary import CanaryError, Oracle, tolerance_of
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.engine import RemoteEngine, RemoteSettings
from rally.engines.remote.launched_server import OwnServer
from rally.engines.remote.rally_api import Rally, RallyReplica
from rally.engines.remote.server_api import Dialect, Launch
from rally.engines.remote.sglang_api import Sglang
from rally.engines.remote.vllm_api import Vllm
from rally.engines.remote.weight_updates import WeightFiles, WeightHandles, WeightTransport, roomy, sweep

__all__ = [
    "CanaryError",
    "ClientSettings",
    "Dialect",
    "Launch",
    "Oracle",
    "OwnServer",
    "Rally",
    "RallyReplica",
    "RemoteEngine",
    "RemoteSettings",
    "ServerReplica",
    "Sglang",
    "Vllm",
    "WeightFiles",
    "WeightHandles",
    "WeightTransport",
    "roomy",
    "sweep",
    "tolerance_of",
]
