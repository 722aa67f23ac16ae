"""A server is believed after it has shown that it samples from the trainer's weights and reports what we train on.

The canary is one short greedy generation after every update; the probe, at the start, also samples as training will.
Both are held against the trainer's own forward. T tokens of a history, V the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rally.engines.base import EngineError, ReplicaGone
from rally.engines.remote.client import HEALTH_SECONDS, ServerReplica, patiently
from rally.types import Generation, SamplingParams

PROMPT_TOKENS = 16
NEW_TOKENS = 8

Forward = Callable[[Sequence[int]], Tensor]
"""The trainer's logits_TV over a history."""


class CanaryError(EngineError):
    """A server that samples from other weights than the trainer's, or reports other numbers."""


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What the trainer knows about its own policy."""

    forward: Forward
    vocabulary: int
    tolerance: float
    """The most that two sound implementations may differ in a log-probability."""

    def prompt(self) -> list[int]:
        """Ids from all over the vocabulary, its last one included."""
        return [(self.vocabulary - 1 - 7919 * place) % self.vocabulary for place in range(PROMPT_TOKENS)]


def tolerance_of(dtype: torch.dtype) -> float:
    """Kernels round differently: hardly in float32, visibly in half precision, where logits between 32 and 64 lie 0.25
    apart, and two sound implementations may be two of these steps from each other."""
    return 1e-3 if dtype == torch.float32 else 0.5


async def canary(server: ServerReplica, oracle: Oracle) -> float:
    """The largest difference in a log-probability; CanaryError where it is more than rounding."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
    prompt = oracle.prompt()
    generation = await _sampled(server, prompt, greedy)
    logp_TV = _logp(oracle, prompt, generation, 1.0)
    sampled_T = logp_TV.gather(1, torch.tensor(generation.ids)[:, None])[:, 0]
    regret = float((logp_TV.amax(1) - sampled_T).max())
    difference = _difference(sampled_T, generation)
    if max(difference, regret) > oracle.tolerance:
        place = int((sampled_T - torch.tensor(generation.logprobs)).abs().argmax())
        raise CanaryError(
            f"{server.name} does not sample from the weights of version {server.version}: of a greedy canary, token "
            f"{place} has log-probability {generation.logprobs[place]:.4f} there and {float(sampled_T[place]):.4f} "
            f"here, and the trainer would prefer another token by {regret:.4f}; the run stops, since what such a "
            "server samples is not this policy's"
        )
    if generation.spans and generation.spans[-1].version != server.version:
        raise CanaryError(
            f"{server.name} says that it has weights {generation.spans[-1].version}, not {server.version}"
        )
    return difference


async def probe(server: ServerReplica, oracle: Oracle, sampling: SamplingParams, max_model_len: int) -> None:
    """Refuse in words a server that another model, window or reading of log-probabilities makes useless."""
    window = server.dialect.window_of(await server.call(server.dialect.window(), HEALTH_SECONDS))
    if window is not None and window < max_model_len:
        raise EngineError(
            f"{server.name} takes histories of {window} tokens and this run has up to {max_model_len}; start it with "
            "more, or lower rollout.max_model_len"
        )
    try:
        await canary(server, oracle)
    except CanaryError as problem:
        raise CanaryError(f"{problem} (it was given them just now: is it another model?)") from None
    prompt = oracle.prompt()
    params = replace(sampling, max_tokens=NEW_TOKENS, stop_ids=(), stop=(), ignore_eos=True, seed=1)
    generation = await _sampled(server, prompt, params)
    _check_semantics(server, oracle, prompt, generation, params)


async def _sampled(server: ServerReplica, prompt: Sequence[int], params: SamplingParams) -> Generation:
    generation = await patiently(functools.partial(server.generate, prompt, params))
    if generation.finish != "length":
        raise ReplicaGone(f"{server.name} was asked for {NEW_TOKENS} tokens and gave up after {len(generation.ids)}")
    return generation


def _check_semantics(
    server: ServerReplica, oracle: Oracle, prompt: Sequence[int], generation: Generation, params: SamplingParams
) -> None:
    temperature = params.temperature or 1.0
    found = {t: _differs(oracle, prompt, generation, t) for t in {temperature, 1.0}}
    if found[temperature] <= oracle.tolerance:
        return
    what = f"{server.name} reports log-probabilities that differ by up to {found[temperature]:.4f} from the trainer's"
    if found[1.0] <= oracle.tolerance:
        why = (
            f"they are those before temperature {temperature:g} (vLLM: start it with --logprobs-mode processed_logprobs"
        )
        raise CanaryError(f"{what}: {why}; SGLang: without SGLANG_RETURN_ORIGINAL_LOGPROB)")
    if params.top_p < 1 or params.top_k > 0 or params.min_p > 0:
        raise CanaryError(
            f"{what}: they are those after top-p, top-k or min-p, which is not the policy that is trained (vLLM: "
            "sample at temperature 1 from a server with --logprobs-mode raw_logprobs, or without filters)"
        )
    raise CanaryError(f"{what}, though it samples greedily as the trainer would; they cannot be trained on")


def _differs(oracle: Oracle, prompt: Sequence[int], generation: Generation, temperature: float) -> float:
    logp_TV = _logp(oracle, prompt, generation, temperature)
    return _difference(logp_TV.gather(1, torch.tensor(generation.ids)[:, None])[:, 0], generation)


def _difference(sampled_T: Tensor, generation: Generation) -> float:
    return float((sampled_T - torch.tensor(generation.logprobs)).abs().max())


def _logp(oracle: Oracle, prompt: Sequence[int], generation: Generation, temperature: float) -> Tensor:
    """Log-probabilities of every token, at each place where one was sampled."""
    logits_TV = oracle.forward([*prompt, *generation.ids])[len(prompt) - 1 : -1]
    if int(max(generation.ids)) >= logits_TV.shape[1]:
        raise CanaryError(f"the server sampled token {max(generation.ids)} of a larger vocabulary than the policy has")
    return torch.log_softmax(logits_TV.float().cpu() / temperature, -1)
