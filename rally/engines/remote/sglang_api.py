"""The API of SGLang: token ids to /generate, weights from disk or by CUDA IPC. No text is involved.

Written from the sources of 0.5.16 and 0.5.23. Log-probabilities are those after the temperature and before top-p, top-k
and min-p, unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB, which the probe at the start rejects. Seeds have
an effect only with --enable-deterministic-inference. The server also stops at the model's own end-of-text ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rally.engines.base import EngineError
from rally.engines.remote.launched_server import probe_package
from rally.engines.remote.server_api import (
    LAUNCHER,
    GenerationRequest,
    HttpCall,
    InFlight,
    Launch,
    Source,
    as_list,
    checked_generation,
    flags,
    get_field,
    int32_routes,
    no_broadcast,
    without_deltas,
)
from rally.types import Generation

PAUSE = {"abort": "abort", "keep": "in_place", "recompute": "retract"}


class Sglang:
    """The `ServerApi` of SGLang."""

    name = "sglang"
    stops_at_strings = False  # it has no tokenizer
    applies_grammars = False  # it does not return which tokens were allowed
    takes_images = False  # its processor may compute other patches

    def generate(self, request: GenerationRequest) -> HttpCall:
        params = request.params
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "max_new_tokens": params.max_tokens,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": not params.stop_ids,  # with it SGLang ignores all stop ids
        }
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed & 0x7FFFFFFF  # SGLang stores it in 32 bits
        return HttpCall(
            "/generate",
            {
                "rid": request.id,
                "input_ids": as_list(request.prompt_ids),
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": -1,
                "stream": False,
                "extra_key": request.salt,
                **({"return_routed_experts": True} if request.route_experts else {}),
            },
        )

    def generation(self, answer: Any, request: GenerationRequest) -> Generation:
        meta = get_field(answer, "meta_info")
        logprobs = meta.get("output_token_logprobs")
        ids = get_field(answer, "output_ids")
        if isinstance(logprobs, list) and isinstance(ids, list) and [get_field(one, 1) for one in logprobs] != ids:
            logprobs = None  # they belong to other tokens
        return checked_generation(
            request,
            ids,
            None if logprobs is None else [get_field(one, 0) for one in logprobs],
            get_field(meta, "finish_reason", "type"),
            spans=meta.get("weight_versions"),
            prompt_tokens=meta.get("prompt_tokens"),
            cached_tokens=meta.get("cached_tokens"),
            queued_seconds=meta.get("queue_time"),  # only with --enable-metrics
            salted=True,
            routes=int32_routes(
                meta.get("routed_experts"), len(request.prompt_ids) + len(ids) - 1, request.route_experts
            ),
        )

    def abort(self, request_id: str) -> HttpCall | None:
        return HttpCall("/abort_request", {"rid": request_id})

    def load(self, source: Source, version: int, in_flight: InFlight) -> tuple[HttpCall, ...]:
        options = {"abort_all_requests": in_flight == "abort", "flush_cache": in_flight != "keep"}
        return HttpCall("/pause_generation", {"mode": PAUSE[in_flight]}), _update(source, version, options)

    def join(self, invitation: Mapping[str, Any]) -> HttpCall:
        raise no_broadcast("SGLang")

    def sleep(self) -> tuple[HttpCall, ...]:
        return (
            # first, because its own health check is a request, and releasing memory during a request kills it
            HttpCall("/pause_generation", {"mode": "abort"}),
            HttpCall("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        )

    def wake(self, source: Source, version: int) -> tuple[HttpCall, ...]:
        return (
            HttpCall("/resume_memory_occupation", {"tags": ["weights"]}, wakes="weights"),
            _update(source, version, {}),
            HttpCall("/resume_memory_occupation", {"tags": ["kv_cache"]}, wakes="kv_cache"),
        )

    def resume(self) -> HttpCall:
        return HttpCall("/continue_generation", {})

    def window(self) -> HttpCall:
        return HttpCall("/get_server_info")

    def window_of(self, answer: Any) -> int | None:
        length = answer.get("context_length") if isinstance(answer, dict) else None
        return length if isinstance(length, int) else None

    def command(self, launch: Launch) -> list[str]:
        _check_no_false_flags(launch)
        probe_package(launch.python, "sglang")
        _require_memory_saver(launch)
        options: dict[str, Any] = {
            "model_path": launch.folder,
            "host": launch.host,
            "port": launch.port,
            "dtype": launch.dtype,
            "context_length": launch.max_model_len,
            "max_running_requests": launch.max_num_seqs,
            "chunked_prefill_size": launch.max_num_batched_tokens,
            "mem_fraction_static": launch.memory_share,
            "tp_size": launch.tensor_parallel,
            "random_seed": launch.seed,
            "disable_cuda_graph": launch.eager,
            "log_level": launch.log_level,
            "log_level_http": launch.log_level or "warning",  # otherwise it logs every request
            "skip_tokenizer_init": True,
            "enable_memory_saver": launch.sleeps,
            "enable_return_routed_experts": launch.routes,
        }
        return [launch.python, LAUNCHER, "sglang.launch_server", *flags({**options, **launch.extra}, negated=False)]

    def environment(self, by_handles: bool = False) -> dict[str, str]:
        return {}

    def headers(self) -> dict[str, str]:
        return {}


def _update(source: Source, version: int, options: dict[str, Any]) -> HttpCall:
    source, fields = without_deltas(source, "SGLang"), {"weight_version": str(version), **options}
    if isinstance(source, str):
        return HttpCall("/update_weights_from_disk", {"model_path": source, **fields})
    return HttpCall("/update_weights_from_tensor", {"serialized_named_tensors": [source.for_sglang()], **fields})


def _require_memory_saver(launch: Launch) -> None:
    try:
        if launch.sleeps:
            probe_package(launch.python, "torch_memory_saver")
    except EngineError:
        raise EngineError(
            f"SGLang releases GPU memory for the update only with torch_memory_saver, which {launch.python} lacks; "
            "install it there (pip install torch-memory-saver), or set rollout.free_cache_engine=false"
        ) from None


def _check_no_false_flags(launch: Launch) -> None:
    for key, value in launch.extra.items():
        if value is False:
            raise EngineError(
                f"rollout.engine_kwargs.sglang.{key}=false: SGLang's flags can only be switched on; leave it out"
            )
