"""Helpers for tests of engines over servers: settings, an oracle over a module, and a rule for logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from fake_server import RULE_LOGPROB, rule
from small_models import VOCABULARY
from transformers import PreTrainedModel

from rally.engines.remote import Oracle, RemoteSettings
from rally.types import SamplingParams

PARAMS = SamplingParams(max_tokens=8, seed=5, temperature=0.8)
SETTINGS = RemoteSettings(max_model_len=64, sampling=PARAMS, restart_delay=0.0, max_restarts=2)


def oracle_of(model: PreTrainedModel) -> Oracle:
    @torch.no_grad()
    def forward(ids: Sequence[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([list(ids)])).logits[0]

    return Oracle(forward=forward, vocabulary=VOCABULARY, tolerance=1e-3)


def change(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)


def ruled(ids: Sequence[int]) -> torch.Tensor:
    """The rule of a fake server without a model, as logits."""
    probability = math.exp(RULE_LOGPROB)
    logits_TV = torch.full((len(ids), VOCABULARY), math.log((1 - probability) / (VOCABULARY - 1)))
    logits_TV[range(len(ids)), [rule(token) for token in ids]] = RULE_LOGPROB
    return logits_TV
