"""Copies to main memory in pieces equal the source and share no memory with it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rally.train.checkpoint import snapshot as host
from rally.train.checkpoint.snapshot import copied, copies, fill

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(0, 7), max_size=3)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5), st.integers(1, 40))
def test_pieces_of_any_size_fill_tensors_of_any_shape(kinds: list[tuple[list[int], torch.dtype]], piece: int) -> None:
    given_ = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in kinds]
    taken = [torch.zeros_like(one) for one in given_]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "PIECE", piece)
        fill(list(zip(given_, taken, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(given_, taken, strict=True))


def test_a_piece_that_fails_is_heard_of() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        fill([(torch.ones(4), torch.ones(3))])


def device_cases() -> list[object]:
    here = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    return ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, here])]


@pytest.mark.parametrize("device", device_cases())
def test_a_copy_is_its_own_and_what_was_one_stays_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PIECE", 1000)
    weight = torch.randn(33, 47, device=device)
    state = {"a": weight, "b": [weight, weight.t()], "n": 3, "empty": torch.empty(0, device=device)}
    before = weight.cpu().clone()
    copy = copied(state)
    weight.zero_()
    assert torch.equal(copy["a"], before) and torch.equal(copy["b"][1], before.t()) and copy["n"] == 3
    assert copy["b"][0] is copy["a"] and copy["empty"].shape == (0,)
    assert all(one.device.type == "cpu" for one in (copy["a"], *copy["b"], copy["empty"]))


@pytest.mark.parametrize("device", device_cases())
def test_strides_are_kept(device: str) -> None:
    [copy] = copies([torch.arange(12.0, device=device).view(3, 4).t()])
    assert copy.stride() == (1, 4) and torch.equal(copy, torch.arange(12.0).view(3, 4).t())
