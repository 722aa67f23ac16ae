"""Shared prefixes of rows are computed once, and the gradients do not change."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VOCABULARY, make_model
from train_cases import Gradients, difference, size
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from rally.models import attention
from rally.train.forward import packed_attention as packed_module
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import CHUNK, KEYS_PER_TOKEN, PackedRows, Row, micro_batches, pack, shared
from rally.types import Image, ImageSpan

CPU = torch.device("cpu")


def row(*ids: int, sampled: int, episode: int = 0) -> Row:
    """The last `sampled` tokens are sampled."""
    at = tuple(range(len(ids) - sampled, len(ids)))
    return Row(ids=ids, sampled=at, logprobs=(-1.0,) * sampled, episode=episode, advantages=(1.0,) * sampled)


def group(rng: random.Random, prompt: int, answers: list[int]) -> list[Row]:
    """Answers of these lengths to one prompt; two of three share a prefix with an earlier one; some have a tail."""
    question = [rng.randrange(VOCABULARY) for _ in range(prompt)]
    spoken: list[list[int]] = [[]]
    for length in answers:
        answer = rng.choice(spoken)[: rng.randrange(length + 1)] if rng.random() < 0.67 else []
        spoken.append(answer + [rng.randrange(VOCABULARY) for _ in range(length - len(answer))])
    rows = [row(*question, *answer, sampled=len(answer)) for answer in spoken[1:]]
    return [replace(r, ids=(*r.ids, *[rng.randrange(VOCABULARY)] * rng.randrange(3))) for r in rows]


def beginnings(rows: list[Row]) -> int:
    """The number of distinct prefixes, which is the number of tokens to compute."""
    return len({tuple(r.inputs[: n + 1].tolist()) for r in rows for n in range(len(r.inputs))})


def histories(packed: PackedRows) -> list[list[int]]:
    """The context of each branch, as ids."""
    source = torch.arange(len(packed.ids_T)) if packed.source_S is None else packed.source_S
    return [packed.ids_T[part].tolist() for part in source.split(packed.keys)]


def windowed() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=6, initializer_range=0.2, **sizes
    )
    return MistralForCausalLM(config).eval()


def learned(model: PreTrainedModel, batches: list[list[Row]]) -> tuple[torch.Tensor, Gradients]:
    """Log-probabilities, and the gradient of a sum with a different weight for every token."""
    model.zero_grad(set_to_none=True)
    found = torch.cat([token_logprobs(model, pack(batch, model.device)).logp_M for batch in batches])
    (found * torch.linspace(0.5, 1.5, len(found), device=model.device)).sum().backward()
    return found.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


TREES = [
    ("one prompt, eight answers", 12, [9] * 8),
    ("answers of many lengths", 5, [1, 2, 3, 5, 8, 13, 1, 1]),
    ("a prompt of one token", 1, [4, 4, 4]),
]


@pytest.mark.parametrize(("what", "prompt", "answers"), TREES)
@pytest.mark.parametrize("family", ["qwen2", "llama", "windowed"])
def test_sharing_changes_neither_logprobs_nor_gradients(
    family: str, what: str, prompt: int, answers: list[int]
) -> None:
    model = windowed() if family == "windowed" else make_model(family)
    attention.install(model)
    rng = random.Random(what)
    rows = [r for _ in range(2) for r in group(rng, prompt, answers)]
    [together] = micro_batches(rows, 10**6)
    assert pack(together, CPU).source_S is not None, "nothing was shared"
    found, gradients = learned(model, [together])
    alone, expected = learned(model, [[r] for r in together])
    assert float((found - alone).abs().max()) <= 1e-5
    assert difference(gradients, expected) <= 1e-5 * size(expected)


def one_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
    """Computes variable-length flash attention sequence by sequence, the last query aligned with the last key."""
    query_ends, key_ends, most_queries, most_keys = sizes
    left, right = options["window_size"]
    assert right == 0 and query_ends.dtype == key_ends.dtype == torch.int32 and query_ends[0] == key_ends[0] == 0
    assert most_queries == int(query_ends.diff().max()) and most_keys == int(key_ends.diff().max())
    outputs = []
    cut = (x.split(ends.diff().tolist()) for x, ends in ((q, query_ends), (k, key_ends), (v, key_ends)))
    for parts in zip(*cut, strict=True):
        one, key, value = (x.transpose(0, 1) for x in parts)
        behind = torch.arange(key.shape[1] - one.shape[1], key.shape[1])[:, None] - torch.arange(key.shape[1])
        seen = (behind >= 0) & ((behind <= left) | (left == -1))
        found = F.scaled_dot_product_attention(one, key, value, seen, scale=options["scale"], enable_gqa=True)
        outputs.append(found.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["qwen2", "windowed"])
def test_all_branches_in_one_call_are_the_same_attention(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model = windowed() if family == "windowed" else make_model()
    attention.install(model)
    rows = [r for prompt, answers in ((12, [9] * 4), (3, [1, 5, 20])) for r in group(random.Random(1), prompt, answers)]
    [batch] = micro_batches(rows, 10**6)
    by_shape, expected = learned(model, [batch])
    calls: list[int] = []
    monkeypatch.setattr(packed_module, "fits_one_call", lambda q: True)
    monkeypatch.setattr(packed_module, "varlen_attn", lambda *a, **k: calls.append(1) or one_call(*a, **k))
    found, gradients = learned(model, [batch])
    assert len(calls) == model.config.num_hidden_layers
    assert float((found - by_shape).abs().max()) <= 1e-5
    assert difference(gradients, expected) <= 1e-5 * size(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["qwen2", "windowed"])
def test_on_a_gpu_half_precision_follows_float32(family: str) -> None:
    """Flash attention over the shared tree against float32 sdpa of each row alone; grouped heads in both."""
    model = (windowed() if family == "windowed" else make_model()).cuda()
    attention.install(model)
    [batch] = micro_batches(group(random.Random(2), 12, [9] * 8), 10**6)
    exact, expected = learned(model, [[r] for r in batch])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    found, gradients = learned(model, [batch])
    assert float((found - exact).abs().mean()) <= 0.03
    for name, gradient in gradients.items():
        if "k_proj.bias" not in name:  # it shifts all scores of a query equally, so its gradient is nearly 0
            ours, theirs = gradient.float().flatten(), expected[name].flatten()
            assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.98, name


groups = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(0, 99))
def test_every_token_is_there_once_and_every_row_can_be_read_back(
    sizes: list[tuple[int, list[int]]], seed: int
) -> None:
    rng = random.Random(seed)
    rows = [r for prompt, answers in sizes for r in group(rng, prompt, answers)]
    [batch] = micro_batches(rows, 10**6)
    packed = pack(batch, CPU)
    assert len(packed.ids_T) == sum(packed.queries) == beginnings(rows)
    read = {tuple(ids) for ids in histories(packed)}
    assert all(any(one[: len(r.inputs)] == tuple(r.inputs.tolist()) for one in read) for r in rows)
    assert read <= {tuple(r.inputs.tolist()) for r in rows}
    targets = packed.targets_U[packed.pair_M].tolist()
    assert targets == [r.ids[p] for r in batch for p in r.sampled]
    assert packed.positions_T[packed.predict_U][packed.pair_M].tolist() == [p - 1 for r in batch for p in r.sampled]
    assert len(packed.predict_U) == len({tuple(r.ids[: p + 1].tolist()) for r in rows for p in r.sampled})


def test_a_row_that_is_there_twice_is_computed_once() -> None:
    one = row(1, 2, 3, 4, sampled=2)
    once, twice = pack([one], CPU), pack([one, replace(one, episode=1, advantages=(-2.0, -3.0))], CPU)
    assert twice.ids_T.tolist() == once.ids_T.tolist() == [1, 2, 3]
    assert twice.predict_U.tolist() == [1, 2] and twice.pair_M.tolist() == [0, 1, 0, 1]
    assert twice.advantages_M.tolist() == [1, 1, -2, -3] and twice.episode_M.tolist() == [0, 0, 1, 1]


def test_rows_without_anything_in_common_are_not_copied() -> None:
    assert pack([row(1, 2, 3, sampled=1), row(2, 2, 3, sampled=1)], CPU).source_S is None


def test_what_comes_after_the_last_sampled_token_is_not_computed() -> None:
    late = Row(ids=(5, 6, 7, 8, 9), sampled=(2,), logprobs=(-1.0,), episode=0)
    assert pack([late], CPU).ids_T.tolist() == [5, 6]


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(0, 99), st.integers(1, 60), st.none() | st.integers(1, 5))
def test_micro_batches_keep_every_row_and_the_budget(
    sizes: list[tuple[int, list[int]]], seed: int, most: int, max_rows: int | None
) -> None:
    rng = random.Random(seed)
    rows = [r for prompt, answers in sizes for r in group(rng, prompt, answers)]
    rows = [replace(r, episode=i) for i, r in enumerate(rows)]
    parts = list(micro_batches(rows, most, max_rows))
    assert sorted(r.episode for part in parts for r in part) == list(range(len(rows)))
    for part in parts:
        assert len(part) <= (max_rows or 99)
        assert len(part) == 1 or (beginnings(part) <= most and sum(len(r.inputs) for r in part) <= 8 * most)


def test_the_budget_counts_what_is_computed() -> None:
    """Ten answers of three tokens to a prompt of fifty: 50 + 10 * 2 tokens, where rows alone would have 520."""
    rows = [row(*range(50), 60 + i, 1, 2, sampled=3) for i in range(10)]
    assert [len(part) for part in micro_batches(rows, 70)] == [10]
    assert len(list(micro_batches(rows, 69))) == 2


def test_a_long_prompt_does_not_bring_copies_without_end() -> None:
    rows = [row(*range(50), 60 + i, 1, sampled=2) for i in range(30)]
    parts = list(micro_batches(rows, 60))
    assert all(51 * len(part) <= KEYS_PER_TOKEN * 60 for part in parts) and len(parts) > 1


def test_a_group_is_not_cut_where_another_place_will_do() -> None:
    rows = [row(first, *range(10, 20), 30 + i, sampled=1) for first in range(6) for i in range(4)]
    cut = [[r.ids[0] for r in part] for part in micro_batches(rows, 10**6, 6)]
    assert cut == [[first] * 4 for first in range(6)]


def test_rows_that_sampled_nothing_are_left_out() -> None:
    assert list(micro_batches([Row(ids=(1, 2), sampled=(), logprobs=(), episode=0)], 10)) == []


def shared_slowly(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def divided_slowly(rows: list[Row], max_tokens: int, max_rows: int | None) -> list[list[int]]:
    """The specification of `micro_batches`, over tuples: the episodes of each batch."""
    order = sorted((tuple(r.inputs.tolist()), i) for i, r in enumerate(rows) if r.sampled.size)
    shares = [0, *(shared_slowly(a, b) for (a, _), (b, _) in itertools.pairwise(order))]
    batches: list[list[int]] = []
    first = 0
    while first < len(order):
        end, tokens, keys = first + 1, len(order[first][0]), len(order[first][0])
        while end < min(len(order), first + (max_rows or len(order))):
            tokens, keys = tokens + len(order[end][0]) - shares[end], keys + len(order[end][0])
            if tokens > max_tokens or keys > KEYS_PER_TOKEN * max_tokens:
                break
            end += 1
        if end < len(order):
            places = range(first + 1 + (end - first) // 2, end + 1)
            end = min(places, key=lambda i: (shares[i], -i), default=end)
        batches.append([i for _, i in order[first:end]])
        first = end
    return batches


IMAGES = [Image(hash=Image.hash_of(b"%d" % i), format="png", width=8, height=8, data=b"%d" % i) for i in range(3)]


@settings(max_examples=80, deadline=None)
@given(groups, st.integers(0, 99), st.integers(1, 90), st.none() | st.integers(1, 5), st.booleans())
def test_rows_are_divided_as_tuples_would_be(
    sizes: list[tuple[int, list[int]]], seed: int, most: int, max_rows: int | None, seen: bool
) -> None:
    """Ids up to the largest that fit, rows without sampled tokens, equal rows, and images, whose ids are negative."""
    rng = random.Random(seed)
    wide = [0, 1, 255, 256, 65_536, 2**24, 2**31 - 1]
    rows = []
    for prompt, answers in sizes:
        for r in [*group(rng, prompt, answers), row(3, 4, sampled=0)]:
            ids = [wide[i % len(wide)] if rng.random() < 0.3 else int(i) % 5 for i in r.ids]
            begins = rng.randrange(1, 4)
            span = ImageSpan(start=0, rows=1, columns=begins, image=rng.choice(IMAGES))
            pictures = (span,) if seen and rng.random() < 0.5 and r.sampled.size and begins < r.sampled[0] else ()
            rows.append(replace(r, ids=ids, images=pictures))
    rows += rows[:2]
    found = micro_batches([replace(r, episode=i) for i, r in enumerate(rows)], most, max_rows)
    assert [[r.episode for r in part] for part in found] == divided_slowly(rows, most, max_rows)


@given(st.integers(0, 2 * CHUNK), st.integers(0, 2 * CHUNK), st.integers(0, 2 * CHUNK))
def test_a_common_prefix_is_found_across_chunks(first: int, second: int, differs: int) -> None:
    a, b = np.zeros(first, np.int32), np.zeros(second, np.int64)
    b[differs : differs + 1] = -1
    assert shared(a, b) == shared(b, a) == min(first, second, differs if differs < second else first)
