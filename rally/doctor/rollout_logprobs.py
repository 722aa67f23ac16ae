"""Doctor check of the policy: the rollout must record the log-probabilities that training computes.

Two turns are sampled on the CPU and compared with an ordinary forward over the whole history and with the trainer's
packed one. The configured model is used if it is on this machine and small, or if the user asks for it; otherwise a
random model of the same architecture with few, narrow layers.
"""

from __future__ import annotations

import asyncio
import copy
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rally.config import Config
from rally.doctor.check_context import DoctorCase, Finding
from rally.engines import EmbeddedEngine
from rally.engines.embedded import EngineSettings
from rally.engines.remote.client import Address
from rally.models.load import load_model, weights_folder
from rally.models.vision_loading import auto_class
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack
from rally.types import SamplingParams, Segment

SMALL = 200_000_000  # parameters, in float32: loading and a few tokens take seconds
TOKENS = 12
PROMPT = 48
TOLERANCE = 1e-3  # in float32 real differences are far smaller
NARROW = 32
HEALTH_SECONDS = 5.0


class Compared(NamedTuple):
    """The largest log-probability difference between the rollout and each of the two forwards."""

    tokens: int
    plain: float
    packed: float


def policy(case: DoctorCase) -> Iterator[Finding]:
    config = case.config
    if config.rollout.mode == "server":
        for url in config.rollout.server_urls:
            yield check_server(url)
    if config.rollout.name != "embedded":
        note = (
            f"log-probabilities of {config.rollout.name} are compared with the trainer's when its servers have started"
        )
        yield Finding("policy", "ok", f"{note}, and in every step (actor/rollout_mismatch_kl)")
        return
    real = case.options.model_check or _small_and_local(case)
    model = _real_model(config) if real else small_version_of(case.model_config, trust=config.model.trust_remote_code)
    vocabulary = model.config.get_text_config().vocab_size
    ids = [i % vocabulary for i in case.codec.encode_prompt(case.first_task.prompt)][-PROMPT:]
    compared = asyncio.run(compare(model, ids, config.rollout.temperature))
    which = "the model itself" if real else f"a small random model ({type(model).__name__})"
    result = f"{which}: over {compared.tokens} sampled tokens, the rollout's log-probabilities differ by at most "
    result += f"{compared.plain:.1e} from a full forward and {compared.packed:.1e} from the trainer's"
    if max(compared.plain, compared.packed) <= TOLERANCE:
        yield Finding("policy", "ok", f"{result} (float32, CPU)")
    else:
        advice = "the embedded engine does not support this model; use actor_rollout_ref.rollout.name=vllm or sglang"
        yield Finding("policy", "error", f"{result}, more than {TOLERANCE:g}; {advice}")


def check_server(url: str) -> Finding:
    """Whether a running rollout server answers its health check."""
    url, credentials = Address.of(url)
    try:
        request = urllib.request.Request(f"{url}/health", headers=credentials)
        with urllib.request.urlopen(request, timeout=HEALTH_SECONDS):
            return Finding("policy", "ok", f"the rollout server {url} answers")
    except (OSError, ValueError) as error:
        problem = f"the rollout server {url} does not answer ({error})"
        return Finding("policy", "error", f"{problem}; start it, or correct actor_rollout_ref.rollout.server.url")


async def compare(model: PreTrainedModel, prompt: Sequence[int], temperature: float) -> Compared:
    settings = EngineSettings(max_model_len=len(prompt) + 4 * TOKENS, max_num_seqs=2, page_size=16)
    engine = EmbeddedEngine(model, settings, num_pages=32)
    history = Segment(prompt_ids=tuple(prompt))
    try:
        for turn in range(2):
            params = SamplingParams(temperature=temperature or 1.0, max_tokens=TOKENS, ignore_eos=True, seed=turn)
            history = history.append_sampled(await engine.generate(history.ids, params))
            history = history if turn else history.append_observed(prompt[:TOKENS])
    finally:
        await engine.close()
    row = Row.of(history, 0)
    recorded_M = torch.from_numpy(row.logprobs)
    with torch.no_grad():
        packed_M = token_logprobs(model, pack([row], model.device), temperature or 1.0).logp_M
    plain_M = _full_forward(model, row, temperature or 1.0)
    return Compared(len(row.sampled), _largest(recorded_M - plain_M), _largest(recorded_M - packed_M))


@torch.no_grad()
def _full_forward(model: PreTrainedModel, row: Row, temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([row.ids.tolist()])).logits[0].float() / temperature
    logp = torch.log_softmax(logits, -1)
    return torch.stack([logp[at - 1, row.ids[at]] for at in row.sampled.tolist()])


def _largest(difference_M: torch.Tensor) -> float:
    return float(difference_M.abs().max())


def _small_and_local(case: DoctorCase) -> bool:
    path = str(case.config.model.path)
    here = Path(path).expanduser().is_file() or weights_folder(path) is not None
    return here and case.size.parameters <= SMALL


def _real_model(config: Config) -> PreTrainedModel:
    model = config.model
    return load_model(
        str(model.path),
        dtype="float32",
        trust_remote_code=model.trust_remote_code,
        overrides=dict(model.override_config),
    )


def small_version_of(model_config: PreTrainedConfig, *, trust: bool = False) -> PreTrainedModel:
    """A small random model of the same architecture, with its windows, norms and layer types."""
    config = copy.deepcopy(model_config)
    text = config.get_text_config()
    for name, value in _small_sizes(text).items():
        derived = isinstance(getattr(type(text), name, None), property)
        if getattr(text, name, None) is not None and not derived:
            setattr(text, name, value)
    for name in ("depth", "num_hidden_layers"):
        if isinstance(getattr(getattr(config, "vision_config", None), name, None), int):
            setattr(config.vision_config, name, 1)  # only text is compared
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=trust)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _small_sizes(text: Any) -> dict[str, Any]:
    grouped = text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    head = (
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    )  # rotary embeddings depend on it
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    layers = max(2, len(kinds))
    return {
        "num_hidden_layers": layers,
        "layer_types": (kinds * layers)[:layers] or None,
        "max_window_layers": min(getattr(text, "max_window_layers", 0) or 0, layers),
        "num_attention_heads": 2 * grouped,
        "num_key_value_heads": 2,
        "hidden_size": 2 * grouped * head,
        "head_dim": head,
        "intermediate_size": 2 * NARROW,
        "moe_intermediate_size": NARROW,
        "vocab_size": min(text.vocab_size, 1024),
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
