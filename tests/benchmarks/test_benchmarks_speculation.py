"""Runs of one engine are independent, and drafts change no sample."""

import torch
from small_models import make_model

from benchmarks.speculation import core_for, run
from rally.engines.embedded import NgramSpeculation
from rally.types import SamplingParams


@torch.inference_mode()
def test_each_run_begins_with_nothing_cached_and_counts_its_own_steps() -> None:
    model, params = make_model(), SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5, 6]]
    drafting = core_for(model, 2, NgramSpeculation(disable_by_batch_size=10**6))
    first, again = (run(drafting, prompts, params, []) for _ in range(2))
    assert first[1:] == again[1:] and first.drafted > 0, "all but the seconds"
    plain = run(core_for(model, 2, None), prompts, params, [])
    assert plain.outputs == first.outputs and plain.drafted == 0
    assert first.steps < plain.steps
