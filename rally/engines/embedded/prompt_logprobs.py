"""Log-probabilities of the tokens of a prompt, from the module's own forward over the whole prompt.

Nothing is read from or written to the KV cache. Logits are computed in chunks and never all in memory at once.

Shapes: P scored tokens, K likeliest tokens at each of them, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rally.engines.base import ContextExceeded, EngineError, PromptLogprobs
from rally.models.attention import body_of
from rally.models.lm_head import chunk_rows, head_logits

MAX_TOP = 256
"""The most likely tokens of a position that a request may ask for."""


def check_prompt(ids: Sequence[int], start: int, top: int, *, vocabulary: int, max_model_len: int) -> None:
    """Raise EngineError for a request that cannot be answered."""
    if len(ids) > max_model_len:
        raise ContextExceeded(f"{len(ids)} tokens are more than max_model_len={max_model_len}; send fewer or raise it")
    if not 1 <= start < len(ids):
        raise EngineError(f"start={start} of {len(ids)} tokens; it must be from 1 on and leave a token to score")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise EngineError(f"the prompt contains a token id outside the model's vocabulary of {vocabulary}")
    if not 0 <= top <= min(MAX_TOP, vocabulary):
        raise EngineError(f"top={top} likeliest tokens; ask for 0 to {min(MAX_TOP, vocabulary)}")


@torch.no_grad()
def prompt_logprobs(
    model: PreTrainedModel, ids: Sequence[int], start: int, top: int, temperature: float = 1.0
) -> PromptLogprobs:
    """The log-probabilities of `ids[start:]` under softmax(logits / temperature), and the `top` likeliest tokens there,
    likeliest first."""
    ids_1L = torch.tensor([list(ids)], device=model.device)
    hidden_PC = body_of(model)(input_ids=ids_1L[:, :-1], use_cache=False).last_hidden_state[0, start - 1 :]
    targets_P = ids_1L[0, start:]
    rows = chunk_rows(model.config.get_text_config().vocab_size, hidden_PC.device)
    found = PromptLogprobs([], [], [])
    for hidden, targets in zip(hidden_PC.split(rows), targets_P.split(rows), strict=True):
        logp_PV = torch.log_softmax(head_logits(model, hidden).float() / temperature, -1)
        best_PK, best_ids_PK = logp_PV.topk(top)
        found.logprobs.extend(logp_PV.gather(1, targets[:, None])[:, 0].tolist())
        found.top_ids.extend(best_ids_PK.tolist())
        found.top_logprobs.extend(best_PK.tolist())
    return found
