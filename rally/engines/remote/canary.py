"""Verifies that a server samples from the trainer's weights and reports the log-probabilities that training needs.

The canary is one short greedy generation after every update. The probe at the start also samples with the parameters of
training. Both are compared with the trainer's own forward. While the trainer changes its weights, what it computed
before is compared: the tokens up to the first one that differs. Shapes: T tokens of a history, V vocabulary.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rally.engines.base import EngineError, ReplicaGone
from rally.engines.remote.client import HEALTH_SECONDS, ServerReplica, retry_while_busy
from rally.types import Generation, SamplingParams

PROMPT_TOKENS = 16
NEW_TOKENS = 8

Forward = Callable[[Sequence[int]], Tensor]
"""The trainer's logits_TV over a history, or over its first tokens if no more are known."""


class CanaryError(EngineError):
    """A server samples from other weights than the trainer's, or reports other log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The trainer's own forward, to compare servers with."""

    forward: Forward
    vocabulary: int
    tolerance: float
    """The largest difference in a log-probability between two correct implementations."""

    def prompt(self) -> list[int]:
        """Token ids from all over the vocabulary, including the last one."""
        return [(self.vocabulary - 1 - 7919 * i) % self.vocabulary for i in range(PROMPT_TOKENS)]


def tolerance_of(dtype: torch.dtype) -> float:
    """Kernels round differently: little in float32, visibly in half precision. There, logits between 32 and 64 are 0.25
    apart, and two correct implementations may differ by two such steps."""
    return 1e-3 if dtype == torch.float32 else 0.5


async def canary(server: ServerReplica, oracle: Oracle) -> float:
    """The largest difference in a log-probability; CanaryError if rounding does not explain it."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
    prompt = oracle.prompt()
    generation = await _sampled(server, prompt, greedy)
    logp_TV = _logp(await _logits(oracle, prompt, generation), 1.0)
    sampled_T = _of_sampled(logp_TV, generation)
    regret = float((logp_TV.amax(1) - sampled_T).max())
    difference = _difference(sampled_T, generation)
    if max(difference, regret) > oracle.tolerance:
        at = int((sampled_T - torch.tensor(generation.logprobs[: len(sampled_T)])).abs().argmax())
        raise CanaryError(
            f"{server.name} does not sample from the weights of version {server.version}: in a greedy canary "
            f"generation, token {at} has log-probability {generation.logprobs[at]:.4f} on the server and "
            f"{float(sampled_T[at]):.4f} in the trainer, whose best token is better by {regret:.4f}; the run stops, "
            "because the server does not sample from this policy"
        )
    if generation.spans and generation.spans[-1].version != server.version:
        raise CanaryError(
            f"{server.name} reports weight version {generation.spans[-1].version} instead of {server.version}"
        )
    return difference


async def probe(server: ServerReplica, oracle: Oracle, sampling: SamplingParams, max_model_len: int) -> None:
    """Raise if the server has another model, too short a context or other log-probabilities than training needs."""
    window = server.api.window_of(await server.call(server.api.window(), HEALTH_SECONDS))
    if window is not None and window < max_model_len:
        raise EngineError(
            f"{server.name} supports histories of {window} tokens, and this run needs {max_model_len}; start it with "
            "a longer context, or lower rollout.max_model_len"
        )
    try:
        await canary(server, oracle)
    except CanaryError as problem:
        raise CanaryError(f"{problem} (they were just loaded: does the server run another model?)") from None
    prompt = oracle.prompt()
    params = replace(sampling, max_tokens=NEW_TOKENS, stop_ids=(), stop=(), ignore_eos=True, seed=1)
    generation = await _sampled(server, prompt, params)
    _check_semantics(server, oracle, await _logits(oracle, prompt, generation), generation, params)


async def _sampled(server: ServerReplica, prompt: Sequence[int], params: SamplingParams) -> Generation:
    generation = await retry_while_busy(functools.partial(server.generate, prompt, params))
    if generation.finish != "length":
        raise ReplicaGone(f"{server.name} returned {len(generation.ids)} of {NEW_TOKENS} requested tokens")
    return generation


def _check_semantics(
    server: ServerReplica, oracle: Oracle, logits_TV: Tensor, generation: Generation, params: SamplingParams
) -> None:
    temperature = params.temperature or 1.0
    differences = {t: _difference(_of_sampled(_logp(logits_TV, t), generation), generation) for t in {temperature, 1.0}}
    if differences[temperature] <= oracle.tolerance:
        return
    largest = differences[temperature]
    problem = f"{server.name} reports log-probabilities that differ by up to {largest:.4f} from the trainer's"
    if differences[1.0] <= oracle.tolerance:
        why = (
            f"they are those before temperature {temperature:g} (vLLM: start it with --logprobs-mode processed_logprobs"
        )
        raise CanaryError(f"{problem}: {why}; SGLang: without SGLANG_RETURN_ORIGINAL_LOGPROB)")
    if params.top_p < 1 or params.top_k > 0 or params.min_p > 0:
        raise CanaryError(
            f"{problem}: they are those after top-p, top-k or min-p, not those of the trained policy (vLLM: "
            "sample at temperature 1 from a server with --logprobs-mode raw_logprobs, or without filters)"
        )
    raise CanaryError(f"{problem}, although its greedy tokens are right; they cannot be used for training")


def _of_sampled(logp_TV: Tensor, generation: Generation) -> Tensor:
    return logp_TV.gather(1, torch.tensor(generation.ids[: len(logp_TV)])[:, None])[:, 0]


def _difference(sampled_T: Tensor, generation: Generation) -> float:
    return float((sampled_T - torch.tensor(generation.logprobs[: len(sampled_T)])).abs().max())


async def _logits(oracle: Oracle, prompt: Sequence[int], generation: Generation) -> Tensor:
    """The trainer's logits at the sampled positions, or at the first of them if no more are known."""
    whole_TV = await asyncio.to_thread(oracle.forward, [*prompt, *generation.ids])
    logits_TV = whole_TV[len(prompt) - 1 : len(prompt) - 1 + len(generation.ids)]
    assert len(logits_TV), "the logits after the prompt are always known"
    if int(max(generation.ids)) >= logits_TV.shape[1]:
        raise CanaryError(f"the server sampled token {max(generation.ids)}, which is outside the policy's vocabulary")
    return logits_TV


def _logp(logits_TV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the whole vocabulary at each position."""
    return torch.log_softmax(logits_TV.float().cpu() / temperature, -1)
