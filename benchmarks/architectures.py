"""Every language model that the installed transformers can build small: exact, or refused in a sentence.

Each architecture is built with random float32 weights and then used as runs use it: `rally sft` and runs over servers
train it (the start-up check, then the training forward), also with LoRA, and the embedded engine samples from it. What
the start-up check accepts is measured once more, on other and longer rows, against a copy that Rally has never touched.
An accepted architecture whose log-probabilities or gradients differ there is WRONG, and an exception that is not a
sentence is a TRACEBACK; there must be none of either. `--record` writes benchmarks/architectures.json and the table of
docs/models.md. Vision-language models are built whole (`mistral3+vision`) and used for text.

python -m benchmarks.architectures [--only qwen3_5 lfm2 ...] [--json results.json] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rally.engines import EmbeddedEngine
from rally.engines.embedded import EngineSettings
from rally.models import attention
from rally.models.load import turn_off_dropout
from rally.models.lora import LoraSettings, add_adapters, merged_weights
from rally.models.rope import decide_rope
from rally.models.vision_loading import auto_class, freeze_unused
from rally.train.forward.fused_layers import training_forward
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, micro_batches, pack
from rally.train.policy import OptimizerSettings, Policy
from rally.train.startup_check import check_rollout, check_training, compared_rows, plain_logprobs
from rally.types import RallyError, SamplingParams

VOCABULARY = 256
MAX_LENGTH = 400  # of a run; longer than every window below
MOST_PARAMETERS = 5_000_000
MOST_WITH_TOWER = 120_000_000  # a vision tower names its sizes in its own way
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks")
WIDTH = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "dim", "embed_dim", "emb_dim", "lru_width"), 64
)
HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
)
INNER = dict.fromkeys(
    (
        *("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dim_ff"),
        "ffn_hidden_size",
    ),
    64,
)
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
SIZES: dict[str, Any] = {
    **WIDTH,
    **HEADS,
    **INNER,
    **EXPERTS,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_num_active_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "sliding_window": 128,
    "attention_chunk_size": 128,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "n_groups": 1,
    "laurel_rank": 8,
    "rank": 8,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SUBMODELS = {
    **dict.fromkeys(("depth", "num_hidden_layers", "num_global_layers", "conf_num_hidden_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "conf_num_attention_heads"), 2),
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32),
    "image_size": 28,
    "out_hidden_size": 64,
}
ABSENT = object()
TWO_KINDS = ["sliding_attention", "full_attention"]
SCALED = {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
PARTICULAR: dict[str, dict[str, Any]] = {
    **{
        key: {"rope_parameters": THREE_AXES}
        for key in (
            *("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "cosmos3_edge", "paddleocr_vl"),
            *("glm4v", "glm46v", "glm_ocr", "glmga"),
        )
    },
    "glm4v_moe": {"rope_parameters": {**THREE_AXES, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granite_swa", "granitemoe_swa"), SCALED),
    **{key: {"layer_types": ABSENT} for key in ("falcon_h1", "falcon_mamba", "mamba")},
    **{key: {"rotary_dim": 8} for key in ("gptj", "codegen")},
    **{key: {"head_dim": 16} for key in ("hunyuan_v1_dense", "ministral")},
    **{
        key: {"head_dim": ABSENT, "layer_types": TWO_KINDS, "num_kv_shared_layers": 0}
        for key in ("gemma4_text", "gemma4_unified_text")
    },
    "granitemoehybrid": {"logits_scaling": 8.0},
    "hyperclovax": {"logits_scaling": 0.25},
    "mixtral": {"router_jitter_noise": 0.1},
    "bamba": {"layer_types": ABSENT, "attn_layer_indices": [1]},
    "mamba2": {"layer_types": ABSENT, "num_heads": 8},
    "jamba": {
        "layer_types": ABSENT,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {
        "layer_types": 2 * TWO_KINDS,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "zamba2": {
        "layer_types": ABSENT,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 512,
        "indexer_compress_ratio": 1,
    },
}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3+longrope": ("phi3", LONGROPE),
    "llama+dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "seed_oss+dropout": ("seed_oss", {"attention_dropout": 0.3, "residual_dropout": 0.3}),
}
"""Architectures with settings that matter, by name."""


RECORD = Path(__file__).parent / "architectures.json"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"


class NotBuilt(Exception):
    """This architecture cannot be built small."""


VISION = "+vision"
"""At the end of a name: the whole vision-language model, used for text."""


def architectures() -> list[str]:
    whole = (f"{name}{VISION}" for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS, *whole]


def small_model(name: str) -> PreTrainedModel:
    """A small random float32 model; NotBuilt if transformers cannot build it so."""
    kind, more = VARIANTS.get(name, (name.removesuffix(VISION), {}))
    try:
        config = _small_config(kind, more)
        auto = auto_class(config) if name.endswith(VISION) else AutoModelForCausalLM
        with torch.device("meta"):
            sketch = auto.from_config(config, dtype=torch.float32)
        most = MOST_WITH_TOWER if name.endswith(VISION) else MOST_PARAMETERS
        if sum(x.numel() for x in (*sketch.parameters(), *sketch.buffers())) > most:
            raise NotBuilt("its configuration stays large")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=torch.float32).eval()
            _spread_out(model)
        with torch.no_grad():
            logits = model(input_ids=torch.randint(3, VOCABULARY, (1, 24)), use_cache=False).logits
    except NotBuilt:
        raise
    except Exception as problem:
        raise NotBuilt(f"{type(problem).__name__}: {problem}") from problem
    if logits.shape[-1] != VOCABULARY or not logits.isfinite().all():
        raise NotBuilt("its logits are not those of a language model")
    assert isinstance(model, PreTrainedModel)
    return model


def _small_config(kind: str, more: dict[str, Any]) -> Any:
    default = CONFIG_MAPPING[kind]()
    text = default.get_text_config()
    sizes = _small_sizes(text) | PARTICULAR.get(kind, {}) | more
    chosen = {name: value for name, value in sizes.items() if value is not ABSENT}
    if text is default:
        config = type(default)(**chosen)
    else:
        name = next(name for name in ("text_config", "decoder", "language_config") if getattr(default, name, 0) is text)
        setattr(default, name, type(text)(**chosen))
        for part in (getattr(default, "vision_config", None), getattr(default, "audio_config", None)):
            for field, value in SUBMODELS.items():
                if isinstance(getattr(part, field, None), int):
                    setattr(part, field, value)
        config = default
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def _small_sizes(text: Any) -> dict[str, Any]:
    """The sizes that this configuration has, made small; every kind of layer stays."""
    values = vars(text)
    fields = set(values) | set(getattr(type(text), "attribute_map", None) or {})
    fields |= {name for base in type(text).__mro__ for name in getattr(base, "__annotations__", {})}
    sizes = {name: value for name, value in SIZES.items() if name in fields and values.get(name, 0) is not None}
    depth = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), None)
    kinds = list(dict.fromkeys(values.get("layer_types") or ()))
    layers = max(2, len(kinds))
    sizes |= {name: layers for name in LAYERS if isinstance(getattr(text, name, None), int)}
    if kinds:
        sizes["layer_types"] = (kinds * layers)[:layers]
    per_layer = {name for name, value in values.items() if isinstance(value, list) and depth and len(value) == depth}
    sizes |= {name: values[name][:layers] for name in per_layer - set(sizes)}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return sizes | {name: value for name, value in TOKENS.items() if name in fields}


@torch.no_grad()
def _spread_out(model: PreTrainedModel) -> None:
    """Weights large enough that mistakes show: the usual initialisation gives nearly uniform predictions."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.3 if "embed" in name else 0.6 / parameter.shape[-1] ** 0.5)
        elif not name.endswith(("A_log", "dt_bias", ".D")):
            parameter.add_(0.1 * torch.randn_like(parameter))


@dataclass(frozen=True)
class Verdict:
    """What happened to one architecture in one use."""

    outcome: Literal["packed", "row by row", "exact", "refused", "WRONG", "TRACEBACK"]
    says: str = ""


def words(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def trained(model: PreTrainedModel, untouched: PreTrainedModel, checkpointing: bool) -> Verdict:
    """The start-up check of training, SFT and runs over servers, and what the training forward computes afterwards."""
    try:
        turn_off_dropout(model)
        freeze_unused(model)
        attention.install(model)
        decide_rope(model, MAX_LENGTH)
        policy = Policy(model, OptimizerSettings(), 1, gradient_checkpointing=checkpointing)
        rows = compared_rows([words(1, 70), words(2, 70)], MAX_LENGTH)
        check_training(policy, rows, MAX_LENGTH, lambda warning: None)
    except RallyError as refusal:
        return Verdict("refused", str(refusal))
    except Exception as problem:  # noqa: BLE001 what is counted here
        return Verdict("TRACEBACK", f"{type(problem).__name__}: {problem}")
    decide_rope(untouched, MAX_LENGTH)
    off, share = _measured(policy, untouched)
    if off > 1e-3 or share > 1e-2:
        return Verdict("WRONG", f"log-probabilities off by {off:.1e}, gradients by a share of {share:.1e}")
    by = ", with a mask" if training_forward(model) == "masked" else ""
    return Verdict(
        "row by row" if training_forward(model) == "unpacked" else "packed", f"{off:.0e} nats, gradient {share:.0e}{by}"
    )


def _measured(policy: Policy, untouched: PreTrainedModel) -> tuple[float, float]:
    """The largest log-probability difference and the relative gradient difference over other, longer rows."""
    prompt, other = words(3, 90), words(4, 40)
    histories = [prompt + words(5, 170), prompt + words(6, 20), prompt + other + words(7, 60), words(8, 300), other]
    rows = [
        Row(ids=tuple(ids), sampled=(at := tuple(range(30, len(ids)))), logprobs=(0.0,) * len(at), episode=i)
        for i, ids in enumerate(histories)
    ]
    (batch,) = micro_batches(rows, sys.maxsize)
    policy.model.train()
    ours_M = token_logprobs(policy.model, pack(batch, policy.device)).logp_M
    ours_M.sum().backward()
    policy.model.eval()
    theirs = []
    for row in batch:
        logp = torch.log_softmax(
            untouched(input_ids=torch.tensor([row.ids.tolist()]), use_cache=False).logits[0].float(), -1
        )
        theirs.append(torch.stack([logp[at - 1, row.ids[at]] for at in row.sampled]))
    theirs_M = torch.cat(theirs)
    theirs_M.sum().backward()
    pairs = zip(policy.model.parameters(), untouched.parameters(), strict=True)
    ours, plain = zip(*((a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None), strict=True)
    off = torch.stack([(a - b).norm() for a, b in zip(ours, plain, strict=True)]).norm()
    return float((ours_M - theirs_M).detach().abs().max()), float(off / torch.stack([b.norm() for b in plain]).norm())


def with_adapters(model: PreTrainedModel, untouched: PreTrainedModel) -> Verdict:
    """The start-up check of a policy with LoRA adapters on all linear layers; then what it computes, against a model
    with the merged weights, which is what servers and checkpoints get."""
    try:
        turn_off_dropout(model)
        add_adapters(model, LoraSettings(rank=2), "small")
        logits = model(input_ids=torch.tensor([words(5, 90)]), use_cache=False).logits
        if logits.requires_grad:  # Reformer's do not, in eval mode
            logits.log_softmax(-1)[..., 7].sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:  # one step; adapters that the model does not read stay as they are
                parameter.data -= 0.1 * parameter.grad / parameter.grad.abs().max().clamp(min=1e-9)
                parameter.grad = None
        attention.install(model)
        decide_rope(model, MAX_LENGTH)
        policy = Policy(model, OptimizerSettings(), 1)
        rows = compared_rows([words(1, 70), words(2, 70)], MAX_LENGTH)
        check_training(policy, rows, MAX_LENGTH, lambda warning: None)
        untouched.load_state_dict(merged_weights(model), strict=False)
    except RallyError as refusal:
        return Verdict("refused", str(refusal))
    except Exception as problem:  # noqa: BLE001 what is counted here
        return Verdict("TRACEBACK", f"{type(problem).__name__}: {problem}")
    decide_rope(untouched, MAX_LENGTH)
    rows = compared_rows([words(3, 90), words(4, 90)], MAX_LENGTH)
    with torch.no_grad():
        ours_M = token_logprobs(model, pack(rows, policy.device)).logp_M
        theirs_M = plain_logprobs(untouched, rows).logp_M
    off = float((ours_M - theirs_M).abs().max())
    if off > 1e-3:
        return Verdict("WRONG", f"log-probabilities off by {off:.1e}")
    return Verdict("row by row" if training_forward(model) == "unpacked" else "packed", f"{off:.0e} nats")


async def sampled(
    model: PreTrainedModel, untouched: PreTrainedModel, backend: Literal["gather", "paged"] = "gather"
) -> Verdict:
    """The start-up check of the embedded engine, and what it records afterwards. The backend `paged` is the path of a
    GPU, here with the kernels' plain torch reference."""
    engine = None
    try:
        turn_off_dropout(model)
        engine = EmbeddedEngine(
            model, EngineSettings(max_model_len=MAX_LENGTH, max_num_seqs=4, backend=backend), num_pages=128
        )
        params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=3)
        await check_rollout(engine, model, [words(1, 70), words(2, 70)], params)
        prompts = [words(3, 150), [*words(3, 150)[:-1], 5], words(4, 90)]
        generations = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    except RallyError as refusal:
        return Verdict("refused", str(refusal))
    except Exception as problem:  # noqa: BLE001 what is counted here
        return Verdict("TRACEBACK", f"{type(problem).__name__}: {problem}")
    finally:
        if engine is not None:
            await engine.close()
    decide_rope(untouched, MAX_LENGTH)
    off = 0.0
    for prompt, one in zip(prompts, generations, strict=True):
        ids = torch.tensor([[*prompt, *one.ids]])
        with torch.no_grad():
            logits_TV = untouched(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp_T = torch.log_softmax(logits_TV.float(), -1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        off = max(off, float((logp_T - torch.tensor(one.logprobs)).abs().max()))
    return Verdict("exact" if off <= 1e-3 else "WRONG", f"{off:.0e} nats")


def examine(name: str) -> dict[str, Verdict]:
    """Every use of one architecture."""
    model = small_model(name)
    uses = {}
    for use, checkpointing in (("training", False), ("training with checkpointing", True)):
        uses[use] = trained(copy.deepcopy(model), copy.deepcopy(model), checkpointing)
    uses["LoRA"] = with_adapters(copy.deepcopy(model), copy.deepcopy(model))
    uses["embedded engine"] = asyncio.run(sampled(copy.deepcopy(model), copy.deepcopy(model)))
    uses["embedded engine, paged"] = asyncio.run(sampled(copy.deepcopy(model), copy.deepcopy(model), "paged"))
    return uses


def recorded(results: Mapping[str, Mapping[str, Verdict]]) -> dict[str, dict[str, str]]:
    """The outcomes without what differs from machine to machine; refusals with their reason."""
    return {
        name: {use: one.outcome + (f": {reason(one)}" if one.outcome == "refused" else "") for use, one in uses.items()}
        for name, uses in results.items()
    }


def reason(verdict: Verdict) -> str:
    """The first clause of a refusal, without numbers and class names."""
    text = re.split(r";|: the |, and |, which the embedded", verdict.says)[0]
    text = re.sub(r" fails for .*", " fails", text)
    text = re.sub(r" \(.*", "", text)
    text = re.sub(r"^\w+(For\w+|WithLMHead|LMHeadModel|Model\w*) ", "", text)
    return re.sub(r"from \w+ as", "as", text).strip().replace("|", "/")


COLUMNS = {"rollout": "embedded engine", "training": "training", "LoRA": "LoRA"}
BEGIN, END = "<!-- architectures begin -->", "<!-- architectures end -->"


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """The table of docs/models.md."""
    counts = {
        column: sum(not uses[use].startswith("refused") for uses in found.values()) for column, use in COLUMNS.items()
    }
    packed = sum(uses["training"] == "packed" for uses in found.values())
    lines = [
        BEGIN,
        f"Of {len(found)} architectures, {packed} are exact in packed training, {counts['training'] - packed} row by "
        "row,",
        f"{counts['LoRA']} with LoRA, and {counts['rollout']} in the embedded engine.",
        "",
        "| architecture | rollout (embedded) | training, SFT, servers | LoRA | reason |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, uses in sorted(found.items()):
        cells = [uses[use].partition(":")[0] for use in COLUMNS.values()]
        reasons = [f"{column}: {r}" for column, use in COLUMNS.items() if (r := uses[use].partition(": ")[2])]
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(reasons)} |")
    return "\n".join([*lines, END])


def replaced(document: str, found: Mapping[str, Mapping[str, str]]) -> str:
    """The document with a new table between its marks."""
    before, rest = document.split(BEGIN)
    return before + page(found) + rest.split(END)[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=architectures())
    parser.add_argument("--json", type=Path, help="write every outcome with its numbers")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} and the table of {PAGE.name}")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    results: dict[str, dict[str, Verdict]] = {}
    not_built: dict[str, str] = {}
    began = time.perf_counter()
    for name in options.only:
        try:
            results[name] = examine(name)
        except NotBuilt as problem:
            not_built[name] = str(problem)
            continue
        print(name, *(f"{use}: {one.outcome} ({one.says})" for use, one in results[name].items()), sep="\n    ")
    print(f"\n{len(results)} architectures of transformers {transformers.__version__} were built small,", end=" ")
    print(f"{len(not_built)} were not: {', '.join(not_built)}")
    for use in next(iter(results.values()), {}):
        counts = Counter(one[use].outcome for one in results.values())
        print(f"{use}: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}")
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json:
        found = {name: {use: asdict(one) for use, one in uses.items()} for name, uses in results.items()}
        options.json.write_text(json.dumps(found, indent=1))
    if options.record:
        known = {} if options.only == architectures() else json.loads(RECORD.read_text())
        now = dict(sorted((known | recorded(results)).items()))
        RECORD.write_text(json.dumps(now, indent=1) + "\n")
        PAGE.write_text(replaced(PAGE.read_text(), now))
    return int(any(one.outcome in ("WRONG", "TRACEBACK") for uses in results.values() for one in uses.values()))


if __name__ == "__main__":
    sys.exit(main())
