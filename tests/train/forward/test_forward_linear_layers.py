"""Layers over one input have the outputs and gradients of their modules."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rally.train.forward.linear_layers import linear_layers

T, C = 11, 24


def layers_of(biases: list[bool], sizes: list[int]) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(C, size, bias=bias, dtype=torch.float64) for bias, size in zip(biases, sizes, strict=True)]


def learned(layers: list[nn.Linear], fused: bool) -> list[Tensor]:
    x_TC = torch.randn((T, C), dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for layer in layers:
        layer.zero_grad()
    outputs = linear_layers(layers, x_TC) if fused else [layer(x_TC) for layer in layers]
    sum((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum() for y in outputs).backward()
    assert x_TC.grad is not None
    gradients = [p.grad.clone() for layer in layers for p in layer.parameters() if p.grad is not None]
    return [*(y.detach() for y in outputs), x_TC.grad, *gradients]


@pytest.mark.parametrize("biases", [[True, False, True], [False], [False, False]])
def test_outputs_and_gradients_are_those_of_the_modules(biases: list[bool]) -> None:
    layers = layers_of(biases, [40, 8, 16][: len(biases)])
    expected, found = learned(layers, False), learned(layers, True)
    assert len(found) == 2 * len(layers) + 1 + sum(biases)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_frozen_weights_and_biases_get_no_gradient() -> None:
    layers = layers_of([True, True], [40, 8])
    layers[0].weight.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    expected, found = learned(layers, False), learned(layers, True)
    assert layers[0].weight.grad is None and layers[1].bias.grad is None
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_frozen_layers_do_not_keep_their_input() -> None:
    """Of a model whose adapters are on some layers only, the others need no input in the backward pass."""
    layers = layers_of([True, False], [40, 8])
    for layer in layers:
        layer.requires_grad_(False)
    x_TC = torch.randn(T, C, dtype=torch.float64, requires_grad=True)

    def kept() -> bool:
        saved: list[int] = []
        with saved_tensors_hooks(lambda value: saved.append(value.data_ptr()) or value, lambda value: value):
            first, second = linear_layers(layers, x_TC)
        x_TC.grad = None
        (first.sum() + second.sum()).backward()
        torch.testing.assert_close(x_TC.grad, sum(layer.weight.sum(0) for layer in layers).expand(T, C))
        return x_TC.data_ptr() in saved

    assert not kept()
    layers[1].weight.requires_grad_(True)
    assert kept()


def test_a_layer_that_is_not_plain_is_computed_by_its_module() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    torch.manual_seed(0)
    layers = [nn.Linear(C, 4), Doubled(C, 4)]
    x_TC = torch.randn(T, C)
    for ours, layer in zip(linear_layers(layers, x_TC), layers, strict=True):
        assert torch.equal(ours, layer(x_TC))
