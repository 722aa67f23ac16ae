"""Layers that hold state give the same in packed forwards, over trees of segments, as one history at a time."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.architectures import small_model, words
from rally.models import attention, state_layers, state_scans
from rally.models.attention import packed_hidden
from rally.models.kv_layers import cached_parts
from rally.models.segment_tree import SegmentTree, StateSegment
from rally.models.state_scans import chunked_scan, conv, stepwise_scan

CPU = torch.device("cpu")
HEADS, KEY, VALUE, WIDTH = 2, 5, 3, 4


def random_tree(rng: random.Random, rows: int = 0) -> SegmentTree:
    """Segments in any order, parents before or after them; some continue one of `rows` initial states."""
    count = rng.randint(1, 12)
    lengths = [rng.choice((1, 1, 2, 5, 16, 17, 64, 65, 130)) for _ in range(count)]
    parents = [rng.randrange(-1, number) for number in range(count)]
    places = list(range(count))
    rng.shuffle(places)
    segments = [StateSegment(0)] * count
    for number, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        initial = rng.randrange(-1, rows) if parent < 0 and rows else -1
        segments[places[number]] = StateSegment(length, places[parent] if parent >= 0 else -1, initial)
    return SegmentTree(segments, CPU)


def path(tree: SegmentTree, number: int) -> tuple[list[int], int]:
    """The packed tokens of a history up to the end of a segment, and its initial row."""
    tokens: list[int] = []
    segment = number
    while True:
        tokens = [*range(int(tree.begins[segment]), int(tree.ends[segment])), *tokens]
        if tree.segments[segment].parent < 0:
            return tokens, tree.segments[segment].initial
        segment = tree.segments[segment].parent


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, as the definition says."""
    outputs = []
    for t in range(len(q)):
        decay = g[t].exp()
        state = state * (decay[:, None, None] if decay.ndim == 1 else decay[..., None])
        value = v[t]
        if beta is not None:
            value = (value - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][..., None] * value[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("kind", ["delta", "delta per channel", "sum"])
def test_scans_over_trees_equal_the_recurrence(kind: str, rows: int) -> None:
    for seed in range(4):
        tree, generator = random_tree(random.Random(seed), rows), torch.Generator().manual_seed(seed)

        def draw(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()

        t = tree.tokens
        q, k, v, initial = draw(t, HEADS, KEY), draw(t, HEADS, KEY), draw(t, HEADS, VALUE), draw(3, HEADS, KEY, VALUE)
        gate = draw(t, HEADS, KEY) if kind == "delta per channel" else draw(t, HEADS)
        weight = None if kind == "sum" else draw(t, HEADS)
        inputs = [x for x in (q, k, v, gate, weight, initial if rows else None) if x is not None]
        g, beta = -F.softplus(gate), None if weight is None else weight.sigmoid()
        unit = F.normalize(k, dim=-1)
        output, final = chunked_scan(q, unit, v, g, beta, tree, initial if rows else None, keep=True)
        assert final is not None
        probe = torch.randn(output.shape, generator=generator)
        expected = torch.zeros_like(output)
        states = []
        for number in range(len(tree.segments)):
            at, row = path(tree, number)
            start = initial[row] if row >= 0 else torch.zeros_like(initial[0])
            outputs, state = recurrence(q[at], unit[at], v[at], g[at], None if beta is None else beta[at], start)
            own = tree.segments[number].length
            expected = expected.index_put((torch.tensor(at[-own:]),), outputs[-own:])
            states.append(state)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(final, torch.stack(states), atol=2e-5, rtol=1e-4)
        ours = torch.autograd.grad((output * probe).sum() + final.sum(), inputs, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad((expected * probe).sum() + sum(x.sum() for x in states), inputs, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(_or_zeros(a), _or_zeros(b), atol=1e-4, rtol=1e-3)


def _or_zeros(gradient: Tensor | None) -> Tensor:
    return torch.zeros(()) if gradient is None else gradient


@pytest.mark.parametrize("rows", [0, 3])
def test_convolutions_and_elementwise_scans_over_trees(rows: int) -> None:
    for seed in range(6):
        tree, generator = random_tree(random.Random(seed), rows), torch.Generator().manual_seed(seed)
        x = torch.randn(HEADS, tree.tokens, generator=generator)
        weight, bias = torch.randn(HEADS, WIDTH, generator=generator), torch.randn(HEADS, generator=generator)
        before = torch.randn(3, HEADS, WIDTH - 1, generator=generator)
        decay = torch.rand(tree.tokens, HEADS, generator=generator)
        state = torch.randn(3, HEADS, generator=generator)
        output, last = conv(x, weight, bias, tree, before if rows else None, keep=True)
        scanned, final = stepwise_scan(decay, x.t(), tree, state if rows else None, keep=True)
        assert last is not None and final is not None
        for number, segment in enumerate(tree.segments):
            at, row = path(tree, number)
            history = torch.cat([before[row] if row >= 0 else torch.zeros(HEADS, WIDTH - 1), x[:, at]], 1)
            expected = F.conv1d(history[None], weight[:, None], bias, groups=HEADS)[0]
            torch.testing.assert_close(output[:, at[-segment.length :]], expected[:, -segment.length :])
            torch.testing.assert_close(last[number], history[:, -WIDTH + 1 :])
            h = state[row] if row >= 0 else torch.zeros(HEADS)
            for token in at:
                h = decay[token] * h + x[:, token]
                torch.testing.assert_close(scanned[token], h)
            torch.testing.assert_close(final[number], h)


def test_long_scans_are_computed_again_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same states and gradients, with only a part of the states in memory."""
    tree, generator = random_tree(random.Random(3)), torch.Generator().manual_seed(3)
    a = torch.rand(tree.tokens, HEADS, generator=generator).requires_grad_()
    b = torch.randn(tree.tokens, HEADS, generator=generator).requires_grad_()
    whole, ends = stepwise_scan(a, b, tree, keep=True)
    expected = torch.autograd.grad(whole.square().sum(), (a, b))
    monkeypatch.setattr(state_scans, "STATE_NUMBERS", 7 * HEADS)
    output, final = stepwise_scan(a, b, tree, keep=True)
    assert torch.equal(output, whole) and ends is not None and final is not None and torch.equal(final, ends)
    for ours, theirs in zip(torch.autograd.grad(output.square().sum(), (a, b)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Steps:
    """A context that computes one history over several forwards, keeping states, for models without attention to the
    past; `attend` looks at the tokens of this forward only."""

    keeps_states, compressed = True, False

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, *lengths: int) -> "Steps":
        """Each history goes on by so many tokens."""
        rows = range(len(lengths)) if self.states else [-1] * len(lengths)
        self.tree = SegmentTree([StateSegment(n, initial=row) for n, row in zip(lengths, rows, strict=True)], CPU)
        return self

    def initial_states(self, name: str) -> Tensor | None:
        return self.states.get(name)

    def store_final_states(self, name: str, states: Tensor) -> None:
        self.states = {**self.states, name: states}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Any) -> Tensor:
        groups, rows = q.shape[1] // k.shape[1], []
        for number, (queries, keys, values) in enumerate(
            zip(*(x.split([s.length for s in self.tree.segments]) for x in (q, k, v)), strict=True)
        ):
            past = self.keys.get(1000 * layer + number)
            if past is not None:
                keys, values = torch.cat([past[0], keys]), torch.cat([past[1], values])
            self.keys[1000 * layer + number] = (keys, values)
            weights = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(groups, 1)) * scores.scale
            hidden = torch.ones_like(weights, dtype=torch.bool).triu(1 + len(keys) - len(queries))
            weights = weights.masked_fill(hidden, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1)))
        return torch.cat(rows)


FAMILIES = ["qwen3_5_text", "kimi_linear", "lfm2", "falcon_h1", "jamba", "zamba", "minimax", "recurrent_gemma", "rwkv"]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_kept_states_continue_a_history(name: str) -> None:
    """Two histories computed in pieces, down to single tokens, equal the module's own forward over the whole."""
    model = small_model(name)
    histories = [torch.tensor(words(1, 40)), torch.tensor(words(2, 31))]
    expected = [
        attention.body_of(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in histories
    ]
    attention.install(model)
    attention.install(model)  # again: nothing changes
    context, done, found = Steps(), [0, 0], [[], []]  # type: ignore[var-annotated]
    for lengths in ((20, 17), (1, 1), (1, 1), (9, 3), (1, 9), (8, 0)):
        pieces = [ids[at : at + n] for ids, at, n in zip(histories, done, lengths, strict=True) if n]
        positions = torch.cat([torch.arange(at, at + n) for at, n in zip(done, lengths, strict=True)])
        hidden = packed_hidden(model, torch.cat(pieces), positions, context.begin(*(n for n in lengths if n)))
        for row, part in enumerate(hidden.split([n for n in lengths if n])):
            found[row].append(part)
        done = [at + n for at, n in zip(done, lengths, strict=True)]
    assert done == [40, 31]
    for parts, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, atol=2e-5, rtol=1e-4)
    shapes = cached_parts(model).states
    assert {key: (shape, dtype) for key, (shape, dtype) in shapes.items()} == {
        key: (states.shape[1:], states.dtype) for key, states in context.states.items()
    }


def test_forwards_without_a_context_call_the_original_functions() -> None:
    model = small_model("qwen3_5_text")
    ids = torch.tensor([words(1, 30), words(2, 30)])
    expected = model(input_ids=ids).logits
    attention.install(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert state_layers.holds_state(model)
    assert not state_layers.holds_state(small_model("llama"))


def test_a_context_without_segments_is_refused() -> None:
    model = small_model("lfm2")
    attention.install(model)
    ids = torch.tensor(words(1, 5))
    with pytest.raises(TypeError, match="does not support Lfm2ShortConv"):
        packed_hidden(model, ids, torch.arange(5), object())  # type: ignore[arg-type]
    assert model(input_ids=ids[None]).logits.isfinite().all()
