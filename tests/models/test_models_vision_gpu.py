"""On a GPU, kernels and CUDA graphs equal a vision-language model's own forward, up to half precision: in the engine,
and in training with its gradients."""

import copy

import pytest
import torch
from test_models_vision import answered, ask, asked, make_core
from vision_cases import FAMILIES, OTHERS, full_logits, full_logprobs, make_codec, make_image, make_vision_model

from rally.engines.embedded.request_slots import Request
from rally.models import attention
from rally.train.forward import logprobs
from rally.train.packing import Row, micro_batches, pack
from rally.types import SamplingParams, Segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = "cuda"


def sampled_logprobs(segment: Segment, logprobs: list[float]) -> torch.Tensor:
    return torch.tensor(logprobs)[torch.tensor(segment.response_mask) == 1]


@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_a_multi_turn_episode_with_images(family: str) -> None:
    spec, codec = make_vision_model(family), make_codec(family)
    model = make_vision_model(family).to(DEVICE, torch.bfloat16)
    plain = copy.deepcopy(model)  # with transformers' own attention
    core = make_core(model, "paged", max_num_batched_tokens=24)  # images are split into several chunks
    segment = ask(core, asked(codec, make_image(1), make_image(2, 40, 20)))
    segment = ask(core, answered(codec, segment, make_image(3, 16, 32)))
    start, images = len(segment.prompt_ids), segment.images
    recorded = sampled_logprobs(segment, list(segment.response_logprobs))
    exact = sampled_logprobs(segment, full_logprobs(spec, segment.ids, start, images))
    own = sampled_logprobs(segment, full_logprobs(plain, segment.ids, start, images))
    rounding = float((own - exact).abs().mean())  # of the module itself in half precision
    assert float((recorded - exact).abs().mean()) < max(0.08, 2 * rounding)
    assert float((recorded - own).abs().mean()) < max(0.08, 2 * rounding)
    attention.install(model)
    trained = logprobs.token_logprobs(model, pack([Row.of(segment, 0)], model.device)).logp_M.detach().cpu()
    assert float((recorded - trained).abs().mean()) < max(0.05, rounding)


@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_training_has_the_gradients_of_the_ordinary_forward(family: str) -> None:
    codec, model = make_codec(family), make_vision_model(family).to(DEVICE, torch.bfloat16)
    plain = make_vision_model(family)  # in float32 on the CPU: what both round
    rows = []
    for number in range(4):
        prompt = asked(codec, make_image(number // 2), make_image(9, 40, 20))
        ids = (*prompt.ids, *(5 + (7 * i + number) % 60 for i in range(8)))
        at = tuple(range(len(prompt.ids), len(ids)))
        rows.append(Row(ids=ids, sampled=at, logprobs=(0.0,) * len(at), episode=number, images=prompt.images))
    attention.install(model)
    [batch] = micro_batches(rows, 4096)
    ours_M = logprobs.token_logprobs(model, pack(batch, model.device)).logp_M
    ours_M.sum().backward()
    theirs = []
    for row in batch:
        logp = torch.log_softmax(full_logits(plain, row.ids.tolist(), row.images), -1)
        theirs += [logp[p - 1, row.ids[p]] for p in row.sampled]
    theirs_M = torch.stack(theirs)
    theirs_M.sum().backward()
    assert float((ours_M.detach().cpu() - theirs_M.detach()).abs().mean()) < 0.1
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    both = [(a.grad.float().cpu().flatten(), b.grad.flatten()) for a, b in pairs if a.grad is not None]
    ours, exact = (torch.cat(side) for side in zip(*both, strict=True))
    assert float(torch.cosine_similarity(ours, exact, dim=0)) > 0.97


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "mistral3"])
def test_many_requests_with_and_without_images_run_together(family: str) -> None:
    """Steps with image tokens run directly, the others through CUDA graphs."""
    codec, model = make_codec(family), make_vision_model(family).to(DEVICE, torch.bfloat16)
    spec = make_vision_model(family)
    core = make_core(model, "paged", num_pages=256, max_num_batched_tokens=64)
    asked_for = [asked(codec, *([make_image(i)] if i % 2 else []), text=f"No {i}") for i in range(6)]
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    requests: list[Request] = [core.add(one.ids, params, images=one.images) for one in asked_for]
    while any(request.finish is None for request in requests):
        core.step()
    for one, request in zip(asked_for, requests, strict=True):
        segment = one.append_sampled(request.result())
        exact = torch.tensor(full_logprobs(spec, segment.ids, len(one.ids), one.images))
        assert float((torch.tensor(segment.response_logprobs) - exact).abs().mean()) < 0.12
