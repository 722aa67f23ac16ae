"""Rollout servers (vLLM, SGLang, our own) behind the engine protocol."""

from rally.engines.remote.canary import CanaryError, Oracle, tolerance_of
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.engine import RemoteEngine, RemoteSettings
from rally.engines.remote.handles import WeightHandles
from rally.engines.remote.own_server import OwnServer
from rally.engines.remote.rally import Rally, RallyReplica
from rally.engines.remote.sglang import Sglang
from rally.engines.remote.vllm import Vllm
from rally.engines.remote.weights import WeightFiles, WeightTransport, roomy, sweep
from rally.engines.remote.wire import Dialect, Launch

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
