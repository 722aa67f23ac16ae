"""Training on images equals the module's own multimodal forward, values and gradients, and computes nothing twice."""

import copy
from itertools import pairwise

import pytest
import torch
from vision_cases import FAMILIES, OTHERS, full_logits, make_codec, make_image, make_tokenizer, make_vision_model

from rally.engines.embedded.core import EngineCore
from rally.engines.embedded.settings import EngineSettings
from rally.models import attention
from rally.models.vision import image_parts_of, patches_of
from rally.train.forward import logprobs as forward
from rally.train.packing import Row, micro_batches, pack
from rally.types import SamplingParams, Segment

CPU = torch.device("cpu")


def sampled_rows(model) -> list[Row]:
    """Two prompts that differ only in their image, two answers to each; some were shown another image."""
    codec = make_codec(model.config.model_type)
    core = EngineCore(model, EngineSettings(max_model_len=400, max_num_seqs=4, page_size=8), num_pages=200)
    rows = []
    for number in range(4):
        parts = [{"type": "image", "image": make_image(number // 2, 24, 24)}, {"type": "text", "text": "What is it?"}]
        prompt = codec.prompt([{"role": "user", "content": parts}])
        segment = Segment(prompt_ids=prompt.ids, images=prompt.images)
        for turn in range(2):
            if turn:
                seen = [{"type": "image", "image": make_image(9 if number < 3 else 0, 16, 24)}]
                more = [{"role": "tool", "content": seen if number % 3 else "none"}]
                segment = segment.append_observed(*codec.delta(more))
            params = SamplingParams(max_tokens=4 + number, seed=number, ignore_eos=True)
            request = core.add(segment.ids, params, images=segment.images)
            while request.finish is None:
                core.step()
            segment = segment.append_sampled(request.result())
        rows.append(Row.of(segment, number))
    return rows


def spec(model, rows: list[Row]) -> torch.Tensor:
    """The reference: log-probabilities by one ordinary forward for each row."""
    found = []
    for row in rows:
        logp = torch.log_softmax(full_logits(model, row.ids.tolist(), row.images), -1)
        found += [logp[p - 1, row.ids[p]] for p in row.sampled]
    return torch.stack(found)


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [*((f, again) for f in FAMILIES for again in (False, True)), *((f, True) for f in OTHERS)],
)
def test_packed_values_and_gradients_are_those_of_ordinary_forwards(family: str, checkpointing: bool) -> None:
    model = make_vision_model(family)
    plain = copy.deepcopy(model)
    rows = sampled_rows(model)
    [part] = micro_batches(rows, 4096)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    weights = torch.linspace(-1, 1, sum(len(row.sampled) for row in part))
    packed = pack(part, CPU)
    assert len(packed.ids_T) < sum(len(row.inputs) for row in part) - 10  # the prompt of a group is packed once
    got = forward.token_logprobs(model, packed).logp_M
    expected = spec(plain, part)
    assert float((got - expected).abs().max()) < 1e-5
    recorded = torch.tensor([p for row in part for p in row.logprobs])
    assert float((got.detach() - recorded).abs().max()) < 1e-5  # rollout and training agree
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen = tuple(image_parts_of(model))
    assert ours.keys() == theirs.keys() and any(name.startswith(seen) and bool(g.any()) for name, g in ours.items())
    both = [make_tokenizer().unk_token_id, patches_of(model).token]  # see `full_logits`
    for found in (ours, theirs):
        rows_of = next(g for name, g in found.items() if name.endswith("embed_tokens.weight"))
        rows_of[both] = rows_of[both].sum(0)
    for name, gradient in ours.items():
        rounding = 1e-3 if "linear_attn" in name else 1e-5
        assert float((gradient - theirs[name]).abs().max()) < rounding * (1 + float(theirs[name].abs().max())), name


def test_an_image_is_looked_at_once_in_a_micro_batch() -> None:
    model = make_vision_model()
    rows = sampled_rows(model)
    looked: list[torch.Tensor] = []
    model.base_model.visual.register_forward_hook(
        lambda _, args, kwargs, out: looked.append(kwargs["grid_thw"]), with_kwargs=True
    )
    forward.token_logprobs(model, pack(rows, CPU))
    assert [len(grids) for grids in looked] == [3]  # of the six in the rows
    images = [span.image for row in rows for span in row.shown]
    assert len(images) == 6 and len(set(images)) == 3


def test_rows_that_differ_in_an_image_alone_share_nothing_after_it() -> None:
    model = make_vision_model()
    rows = sampled_rows(model)
    assert rows[0].ids[:20].tolist() == rows[2].ids[:20].tolist()
    [span] = rows[0].images[:1]
    for a, b in pairwise(next(iter(micro_batches(rows, 4096)))):
        if a.images[0].image != b.images[0].image:
            same = [x == y for x, y in zip(a.inputs, b.inputs, strict=False)]
            assert same.index(False) == span.start


def test_text_alone_trains_in_a_model_that_sees() -> None:
    model = make_vision_model("qwen3_vl")
    plain = copy.deepcopy(model)
    attention.install(model)
    row = Row(ids=tuple(range(4, 30)), sampled=(9, 20, 25), logprobs=(0.0,) * 3, episode=0)
    assert float((forward.token_logprobs(model, pack([row], CPU)).logp_M - spec(plain, [row])).abs().max()) < 1e-5
