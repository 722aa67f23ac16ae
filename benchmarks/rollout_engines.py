"""The engines that `benchmarks.rollout` times: a model of one shape with random weights, ids in, ids and logprobs out.

The embedded engine and `generate` run the same module and weights. vLLM and SGLang run through their own Python
engines, without HTTP, with weights of their own dummy loaders; they are imported only when requested.
"""

from __future__ import annotations

import gc
import itertools
import resource
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from benchmarks.rollout_workloads import Played, Reply, Workload, play, scripts
from rally.types import RallyError, SamplingParams

MEMORY_SHARE = 0.8  # of the GPU's memory, for every engine that takes a share; far more than the workloads need
BATCHED_TOKENS = 8192  # of one forward: what ours and the others' servers take by default, and vLLM in process does not
ROOM = 16  # tokens beyond the longest conversation: some engines want a little more than they are asked for


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `shrink` divides lengths and numbers of workloads, for a shape that only tests a script."""

    name: str
    config: PreTrainedConfig
    shrink: int = 1

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)


def shape_named(name: str) -> Shape:
    if name not in SHAPES:
        raise RallyError(f"there is no shape {name!r}; name one of {', '.join(SHAPES)}")
    family, architecture, sizes, shrink = SHAPES[name]
    family = CONFIG_MAPPING[family] if isinstance(family, str) else family
    return Shape(name, family(**{"tie_word_embeddings": True} | sizes, architectures=[architecture]), shrink)


SHAPES: dict[str, tuple[Any, str, dict[str, Any], int]] = {
    "qwen2.5-1.5b": (
        Qwen2Config,
        "Qwen2ForCausalLM",
        {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        1,
    ),
    "smollm2-135m": (
        LlamaConfig,
        "LlamaForCausalLM",
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
        1,
    ),
    "qwen3-4b": (
        "qwen3",
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151_936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
        },
        1,
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": False,
        },
        1,
    ),
    "qwen3.5-9b": ("qwen3_5_text", "Qwen3_5ForCausalLM", {"tie_word_embeddings": False}, 1),
    "gpt-oss-20b": (
        "gpt_oss",
        "GptOssForCausalLM",
        {
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
        1,
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            "vocab_size": 102_400,
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        1,
    ),
    "tiny": (
        Qwen2Config,
        "Qwen2ForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "initializer_range": 0.12,  # a small model with usual weights predicts every token alike
        },
        16,
    ),
}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def random_model(shape: Shape, dtype: torch.dtype | None = None, seed: int = 0) -> PreTrainedModel:
    """The same weights for the same seed, device and dtype."""
    torch.manual_seed(seed)
    with device():
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype or default_dtype())
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def peak_bytes() -> int:
    """The most memory this process has held on the GPU since `forget_peak`, or ever in RAM where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Contestant(ABC):
    """An engine that can run a workload; made and closed inside one event loop."""

    name: ClassVar[str]

    def __init__(self, shape: Shape) -> None:
        self.vocabulary = shape.vocabulary

    @abstractmethod
    async def play(self, workload: Workload, seed: int) -> Played: ...

    @property
    def steps(self) -> int | None:
        """Forwards so far, if the engine reports them."""
        return None

    @property
    def captured(self) -> int:
        """CUDA graphs captured so far, if the engine reports them."""
        return 0

    def peak_bytes(self) -> int:
        return peak_bytes()

    @abstractmethod
    async def close(self) -> None: ...


class Conversing(Contestant):
    """An engine that takes single requests, so that it can run several turns."""

    async def play(self, workload: Workload, seed: int) -> Played:
        return await play(self.sample, workload, self.vocabulary, seed)

    @abstractmethod
    async def sample(self, ids: Sequence[int], count: int) -> Reply: ...


class Embedded(Conversing):
    name = "embedded"
    deterministic = False
    return_routes = False
    quantization: Literal["fp8"] | None = None

    def __init__(self, shape: Shape, longest: int, running: int) -> None:
        from rally.engines.embedded import EmbeddedEngine, EngineSettings

        super().__init__(shape)
        if self.quantization is not None:
            self.name = f"{self.name} {self.quantization}"
        settings = EngineSettings(
            max_model_len=longest + ROOM,
            max_num_seqs=running,
            memory_share=MEMORY_SHARE,
            deterministic=self.deterministic,
            return_routes=self.return_routes,
            quantization=self.quantization,
        )
        self.engine = EmbeddedEngine(random_model(shape), settings)
        self.engine.core.prepare()  # as `rally train` does, and this too:
        gc.collect()
        gc.freeze()

    async def sample(self, ids: Sequence[int], count: int) -> Reply:
        params = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True)
        generation = await self.engine.generate(ids, params)
        return Reply(generation.ids, generation.logprobs, generation.cached_tokens)

    @property
    def steps(self) -> int:
        return self.engine.core.steps

    @property
    def captured(self) -> int:
        return len(getattr(self.engine.core.runner, "_captured", ()))

    async def close(self) -> None:
        await self.engine.close()


class Routed(Embedded):
    """The same engine of a mixture-of-experts model, which returns the experts of every token."""

    name = "routed"
    return_routes = True


class Deterministic(Embedded):
    """The same engine with batch-invariant kernels, to measure their cost."""

    name = "deterministic"
    deterministic = True


class Logprobs(LogitsProcessor):
    """Logprobs of what `generate` samples, without keeping every step's scores: a token is looked up one step later."""

    def __init__(self) -> None:
        self.seen_BV: Tensor | None = None
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.look_up(input_ids[:, -1:])
        self.seen_BV = torch.log_softmax(scores.float(), -1)
        return scores

    def look_up(self, token_B1: Tensor) -> None:
        if self.seen_BV is not None:
            self.steps.append(self.seen_BV.gather(1, token_B1))


class HuggingFace(Contestant):
    """`generate` on one batch with a static cache; on a GPU transformers compiles its decode step by itself."""

    name = "hf"

    def __init__(self, shape: Shape, longest: int, running: int) -> None:
        super().__init__(shape)
        self.model = random_model(shape)
        self.model.generation_config.eos_token_id = None

    async def play(self, workload: Workload, seed: int) -> Played:
        ids = torch.tensor([s.prompt for s in scripts(workload, self.vocabulary, seed)], device=device())
        sampling = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=workload.new, pad_token_id=0, cache_implementation="static"
        )
        generate: Any = self.model.generate
        logprobs = Logprobs()
        began = time.perf_counter()
        output = generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=sampling, logits_processor=[logprobs]
        )
        logprobs.look_up(output[:, -1:])
        returned = torch.cat(logprobs.steps, 1).tolist()
        seconds = time.perf_counter() - began
        assert sum(map(len, returned)) == workload.sampled
        return Played(seconds, workload.sampled, ids.numel(), 0, seconds * workload.conversations)

    async def close(self) -> None:
        del self.model


class OtherProcess(Conversing):
    """An engine that computes in another process and reads the shape from a folder with only a config."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._folder = tempfile.TemporaryDirectory()
        shape.config.save_pretrained(self._folder.name)

    @property
    def folder(self) -> str:
        return self._folder.name

    def peak_bytes(self) -> int:
        """Memory in use on the whole GPU: these engines allocate their share at the start and keep it."""
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return total - free

    async def close(self) -> None:
        self._folder.cleanup()


class Vllm(OtherProcess):
    name = "vllm"

    def __init__(self, shape: Shape, longest: int, running: int) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        super().__init__(shape)
        self.requests = itertools.count()
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self.folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=str(default_dtype()).removeprefix("torch."),
                max_model_len=longest + ROOM,
                max_num_seqs=running,
                max_num_batched_tokens=BATCHED_TOKENS,
                gpu_memory_utilization=MEMORY_SHARE,
                disable_log_stats=True,
            )
        )

    async def sample(self, ids: Sequence[int], count: int) -> Reply:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0,
            max_tokens=count,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(ids))
        [output] = [o async for o in self.engine.generate(prompt, params, str(next(self.requests)))]
        sampled = output.outputs[0]
        logprobs = [at[token].logprob for at, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]
        return Reply(sampled.token_ids, logprobs, output.num_cached_tokens or 0)

    async def close(self) -> None:
        self.engine.shutdown()
        await super().close()


class SGLang(OtherProcess):
    name = "sglang"

    def __init__(self, shape: Shape, longest: int, running: int) -> None:
        from sglang import Engine

        super().__init__(shape)
        self.engine = Engine(
            model_path=self.folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=str(default_dtype()).removeprefix("torch."),
            context_length=longest + ROOM,
            max_running_requests=running,
            mem_fraction_static=MEMORY_SHARE,
            cuda_graph_max_bs_decode=running,
            log_level="error",
        )

    async def sample(self, ids: Sequence[int], count: int) -> Reply:
        sampling = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
        output = await self.engine.async_generate(input_ids=list(ids), sampling_params=sampling, return_logprob=True)
        told = output["meta_info"]
        return Reply(output["output_ids"], [p for p, *_ in told["output_token_logprobs"]], told["cached_tokens"])

    async def close(self) -> None:
        self.engine.shutdown()
        await super().close()


ENGINES: dict[str, Any] = {
    engine.name: engine for engine in (Embedded, Routed, Deterministic, HuggingFace, Vllm, SGLang)
}


def missing(name: str) -> str | None:
    """The reason why an engine cannot run here, or None."""
    if name not in ENGINES:
        raise RallyError(f"there is no engine {name!r}; name some of {', '.join(ENGINES)}")
    if name in ("vllm", "sglang") and find_spec(name) is None:
        return f"{name} is not installed here and is left out; install it to measure it in this run"
    return None
