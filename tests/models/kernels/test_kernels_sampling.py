"""The sampling kernel and the filters equal their reference, and the reference equals the engine's sampler."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from kernel_cases import gpu, interpreted, replayed
from torch import Tensor

from rally.engines.embedded import sampler
from rally.engines.embedded.sampler import filtered_logprobs
from rally.models.kernels import reference

NAN, INF = float("nan"), float("inf")
LAST = 1 - 2.0**-32  # the largest value of the engine's hash


class Drawn(NamedTuple):
    ids: Tensor
    logprobs: Tensor


def draw(function: object, logits: Tensor, temperature: Tensor, uniform: Tensor) -> Drawn:
    ids = torch.full((len(logits),), -1, device=logits.device)
    logprobs = torch.zeros(len(logits), device=logits.device)
    function(logits, temperature, uniform, ids, logprobs)  # type: ignore[operator]
    return Drawn(ids, logprobs)


def batch(device: str, rows: int, vocabulary: int, scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = scale * torch.randn(rows, vocabulary + 3, generator=generator)
    logits[:, ::7] = -INF
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3])[torch.arange(rows) % 4]
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    return logits[:, :vocabulary].to(device), temperature.to(device), uniform.to(device)


def assert_same_draws(ours: Drawn, theirs: Drawn, logits: Tensor, temperature: Tensor, uniform: Tensor) -> None:
    """The same tokens, except where the uniform number is within 1e-6 of the boundary between two."""
    for i in (ours.ids != theirs.ids).nonzero().flatten().tolist():
        assert temperature[i] > 0
        cdf = (logits[i].double() / temperature[i]).softmax(-1).cumsum(-1)
        assert (cdf - uniform[i]).abs().min() < 1e-6
    same = ours.ids == theirs.ids
    assert same.float().mean() > 0.9
    torch.testing.assert_close(ours.logprobs[same], theirs.logprobs[same], rtol=1e-5, atol=5e-6)


def test_reference_is_the_engines_sampler() -> None:
    logits, temperature, _ = batch("cpu", 64, 1000)
    numbers = sampler.uniforms(np.arange(64, dtype=np.uint64), np.arange(100, 164))
    ours = draw(reference.sample, logits, temperature, torch.from_numpy(numbers))
    off = np.full(64, -1), np.ones(64), np.zeros(64), np.zeros(64, np.bool_)
    theirs = sampler.sample(logits, sampler.Draw(numbers, temperature.numpy(), *off))
    assert ours.ids.tolist() == theirs.ids.tolist()
    torch.testing.assert_close(ours.logprobs, torch.from_numpy(theirs.logprobs))


def check(device: str, rows: int, vocabulary: int) -> None:
    from rally.models.kernels.sampling import sample

    logits, temperature, uniform = batch(device, rows, vocabulary)
    ours = draw(sample, logits, temperature, uniform)
    theirs = draw(reference.sample, logits, temperature, uniform)
    assert_same_draws(ours, theirs, logits, temperature, uniform)
    assert ours.logprobs.isfinite().all() and (ours.ids < vocabulary).all()
    alone = draw(sample, logits[-1:], temperature[-1:], uniform[-1:])
    assert torch.equal(alone.ids, ours.ids[-1:]) and torch.equal(alone.logprobs, ours.logprobs[-1:])
    assert torch.equal(draw(sample, logits, temperature, uniform.float()).ids[2::4], ours.ids[2::4])


def check_edges(device: str) -> None:
    from rally.models.kernels.sampling import sample

    vocabulary = 9000
    allowed = [3, 4096, 5000]  # in two of the three chunks
    rows = torch.full((3, vocabulary), -INF)
    rows[:, allowed] = 1.0
    numbers = torch.tensor([0.0, 0.5, LAST], dtype=torch.float64)
    one = torch.ones(3)
    drawn = draw(sample, rows.to(device), one.to(device), numbers.to(device))
    assert drawn.ids.tolist() == allowed
    torch.testing.assert_close(drawn.logprobs.cpu(), torch.full((3,), 1 / 3).log())

    tied = draw(sample, rows.to(device), torch.zeros(3, device=device), numbers.to(device))
    assert tied.ids.tolist() == [3, 3, 3]


def check_broken(device: str) -> None:
    from rally.models.kernels.sampling import sample

    good = torch.zeros(9000)
    rows = torch.stack([good] * 4 + [torch.full_like(good, -INF), torch.full_like(good, NAN)])
    rows[1, 5000] = NAN
    rows[2, 5000] = INF
    rows[3, 8999] = INF
    for heat in (0.0, 1.0):
        temperature, number = (torch.full((6,), x, device=device) for x in (heat, 0.5))
        drawn = draw(sample, rows.to(device), temperature, number)
        assert drawn.logprobs.isnan().tolist() == [False] + [True] * 5
        assert ((drawn.ids >= 0) & (drawn.ids < 9000)).all()


@interpreted
@pytest.mark.parametrize(("rows", "vocabulary"), [(4, 50), (4, 9001), (1, 4096)])
def test_interpreted(rows: int, vocabulary: int) -> None:
    check("cpu", rows, vocabulary)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_edges_and_broken_logits() -> None:
    check_edges("cpu")
    check_broken("cpu")


@gpu
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 151936), (3, 151936), (256, 151936), (1000, 32001), (5, 262144)])
def test_compiled(rows: int, vocabulary: int) -> None:
    check("cuda", rows, vocabulary)


@gpu
def test_compiled_edges_and_broken_logits() -> None:
    check_edges("cuda")
    check_broken("cuda")


@gpu
def test_captured() -> None:
    from rally.models.kernels.sampling import sample

    case = batch("cuda", 256, 151936)
    graph, eager = replayed(lambda: draw(sample, *case)), draw(sample, *case)
    assert torch.equal(graph.ids, eager.ids) and torch.equal(graph.logprobs, eager.logprobs)


def filtered_alone(row: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The reference, one row at a time."""
    keep = torch.ones_like(row, dtype=torch.bool)
    if 0 < top_k < row.numel():
        keep &= row >= row.topk(top_k).values[-1]
    if top_p < 1:
        values, order = row.masked_fill(~keep, -INF).softmax(-1).sort(descending=True)
        keep[order[values.cumsum(-1) - values >= top_p]] = False
    if min_p > 0:
        keep &= row >= row.max() + float(np.log(min_p))
    return row.masked_fill(~keep, -INF).log_softmax(-1)


def test_filters_of_all_rows_at_once_are_the_filters_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = (3 * torch.randn(96, 300, generator=generator)).log_softmax(-1)
    logp[::5, :100] = -INF
    logp[::5] = logp[::5].log_softmax(-1)
    logp[1::5] = logp[1::5].mul(2).round().log_softmax(-1)  # many equal tokens
    ks, ps, ms = [-1, 1, 5, 299, 300, 5000], [1.0, 0.9, 0.35, 1e-6], [0.0, 0.1, 0.99]
    params = [(ks[i % 6], ps[i // 6 % 4], ms[i // 24 % 3]) for i in range(96)]
    top_k, top_p, min_p = (torch.tensor(values) for values in zip(*params, strict=True))
    ours = filtered_logprobs(logp, top_k, top_p.double(), min_p.double())
    theirs = torch.stack([filtered_alone(row, *each) for row, each in zip(logp, params, strict=True)])
    torch.testing.assert_close(ours.sort().values, theirs.sort().values)
    # The reference does not define which of several equal tokens is the last one kept.
    distinct = torch.arange(96) % 5 > 1
    torch.testing.assert_close(ours[distinct], theirs[distinct])
    unfiltered = (top_k == -1) & (top_p == 1) & (min_p == 0)
    assert unfiltered.sum() == 2 and torch.equal(ours[unfiltered], logp[unfiltered])
