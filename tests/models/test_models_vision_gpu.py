"""On a GPU, kernels and CUDA graphs equal a vision-language model's own forward, up to half precision."""

import pytest
import torch
from test_models_vision import answered, ask, asked, make_core
from vision_cases import FAMILIES, full_logprobs, make_codec, make_image, make_vision_model

from rally.models import attention
from rally.train.forward import logprobs
from rally.train.packing import Row, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_multi_turn_episode_with_images(family: str) -> None:
    spec, codec = make_vision_model(family), make_codec()
    model = make_vision_model(family).to("cuda", torch.bfloat16)
    core = make_core(model, "paged", max_num_batched_tokens=24)
    segment = ask(core, asked(codec, make_image(1), make_image(2, 40, 20)))
    segment = ask(core, answered(codec, segment, make_image(3, 16, 32)))
    expected = torch.tensor(full_logprobs(spec, segment.ids, len(segment.prompt_ids), segment.images))
    sampled = torch.tensor(segment.response_mask) == 1
    recorded = torch.tensor(segment.response_logprobs)
    assert float((recorded - expected)[sampled].abs().mean()) < 0.08
    attention.install(model)
    trained = logprobs.token_logprobs(model, pack([Row.of(segment, 0)], model.device)).logp_M.detach().cpu()
    assert float((recorded[sampled] - trained).abs().mean()) < 0.05
