"""Linear layers in FP8, for rollouts: 8-bit copies of the trainer's weights, and forwards that multiply by them.

A copy is float8_e4m3fn with one float32 scale per output feature. Inputs are quantised with one scale per token. The
trainer's weights are only read, and training forwards never see the copies. `refresh` writes new weights into the same
memory, so that CUDA graphs stay valid. The attention and MLP projections of decoder layers are covered; adapters, the
output head, embeddings and norms stay as they are. What cannot be covered is refused with Fp8Error.

Shapes: T tokens, C features in, F features out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from rally.models.attention import body_of
from rally.models.decoder_families import NO_CACHE
from rally.models.kernels.dispatch import kernels_for
from rally.models.lora import plain_linear
from rally.models.vision import image_parts_of
from rally.platforms import fp8_problem, on_accelerator
from rally.types import RallyError

E4M3 = torch.float8_e4m3fn
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("o_proj",), ("out_proj",), ("gate_proj", "up_proj"),
               ("gate_up_proj",), ("down_proj",), ("fc1",), ("fc2",), ("c_fc",), ("c_proj",))  # fmt: skip
"""The covered layers by name; those of one group have the same input, and their copies are adjacent."""
NUMBERS = {name: number for number, group in enumerate(PROJECTIONS) for name in group}
EXPERTS = ("num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHECKED_ROWS, LARGE_INPUT = 16, 256.0  # random inputs of a layer that is compared, and their standard deviation
MULTIPLE = 16  # of features in and out, which the product of GPUs needs
KEY = "rollout.quantization"


class Fp8Error(RallyError):
    """A model or a device that cannot compute its linear layers in FP8."""


def check_config(config: PreTrainedConfig, key: str = KEY) -> None:
    """Fp8Error if FP8 does not support a model, as far as its configuration shows; before weights are loaded."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    states = sorted(set(kinds) & set(NO_CACHE))
    feature = None
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        feature = "a vision or audio tower"
    elif any(getattr(text, name, None) for name in EXPERTS):
        feature = "experts"
    elif getattr(text, "kv_lora_rank", None):
        feature = "latent attention"
    elif states:
        feature = f"layers of type {', '.join(states)}"
    if feature is not None:
        raise Fp8Error(f"{key}=fp8 does not support {text.model_type}, which has {feature}; leave it out")


def check_device(device: torch.device, dtype: torch.dtype, key: str = KEY) -> None:
    """Fp8Error if a device cannot compute in FP8. A CPU can, slowly, in plain torch."""
    if problem := fp8_problem(device):
        raise Fp8Error(f"{key}=fp8 {problem}; leave it out")
    if on_accelerator(device) and dtype != torch.bfloat16:
        shown = str(dtype).removeprefix("torch.")
        raise Fp8Error(f"{key}=fp8 needs weights in bfloat16 on a GPU, and these are {shown}; leave one of the two out")


class Fp8Weight(NamedTuple):
    """Weights of linear layers with the same input: 8-bit numbers, and a scale for each output feature."""

    data_FC: Tensor
    scale_F: Tensor

    def rows(self, start: int, count: int) -> Fp8Weight:
        return Fp8Weight(self.data_FC[start : start + count], self.scale_F[start : start + count])


class CoveredLayers(NamedTuple):
    """The groups of layers that FP8 covers, by name, and the names of the linear layers that it does not."""

    groups: list[dict[str, nn.Linear]]
    others: list[str]

    @property
    def bytes(self) -> int:
        """The size of the copies: a byte for each weight, and four for each scale."""
        layers = [layer for group in self.groups for layer in group.values()]
        return sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)


def covered_layers(model: PreTrainedModel, key: str = KEY) -> CoveredLayers:
    """Fp8Error if a layer with the name of a covered one cannot be covered, or if there is none."""
    groups: dict[tuple[str, int], dict[str, nn.Linear]] = {}
    others: list[str] = []
    if parts := image_parts_of(model):
        raise Fp8Error(f"{key}=fp8 does not support {type(model).__name__}, which has {', '.join(parts)}; leave it out")
    for name, layer in _linear_layers(body_of(model)):
        parent, _, last = name.rpartition(".")
        if last not in NUMBERS:
            others.append(name)
            continue
        plain = plain_linear(layer)
        if plain is None:
            raise Fp8Error(f"{key}=fp8 does not support {name}, which is no plain linear layer; leave it out")
        inside, outside = plain.base.in_features, plain.base.out_features
        if inside % MULTIPLE or outside % MULTIPLE:
            shape = f"{name} has {inside} and {outside}"
            raise Fp8Error(f"{key}=fp8 needs layers of multiples of {MULTIPLE} features, and {shape}; leave it out")
        groups.setdefault((parent, NUMBERS[last]), {})[last] = plain.base
    if not groups:
        names = ", ".join(NUMBERS)
        raise Fp8Error(f"{key}=fp8 finds no layers in {type(model).__name__} that it covers ({names}); leave it out")
    ordered = [
        {f"{parent}.{last}": group[last] for last in PROJECTIONS[number] if last in group}
        for (parent, number), group in groups.items()
    ]
    return CoveredLayers(ordered, others)


def _linear_layers(body: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers by name; one with adapters counts once, and its adapters do not."""
    adapted: str | None = None
    for name, module in body.named_modules():
        if adapted is not None and name.startswith(adapted):
            continue
        if isinstance(getattr(module, "base_layer", None), nn.Linear):
            adapted = f"{name}."
            yield name, module
        elif isinstance(module, nn.Linear):
            yield name, module


class Product(NamedTuple):
    """A linear layer, or several that share an input: its channels, and the function that a forward uses."""

    channels: int
    function: Callable[[Tensor], Tensor]


class LayerError(NamedTuple):
    """The error of a layer's outputs, relative to their norm."""

    relative: float
    name: str


class Fp8Linears:
    """The copies of a model's linear layers, in memory that is taken once. While not `active`, forwards that know them
    multiply by the weights themselves."""

    def __init__(self, model: PreTrainedModel, key: str = KEY) -> None:
        check_config(model.config, key)
        check_device(model.device, model.dtype, key)
        self.model, self.covered = model, covered_layers(model, key)
        self.active = True
        self.kernels = kernels_for(model.device)
        self._copies: dict[str, tuple[nn.Linear, Fp8Weight]] = {}
        self._packed: dict[tuple[int, ...], Fp8Weight] = {}
        for group in self.covered.groups:
            sizes = [layer.out_features for layer in group.values()]
            first = next(iter(group.values())).weight
            whole = Fp8Weight(
                torch.empty((sum(sizes), first.shape[1]), dtype=E4M3, device=first.device),
                torch.empty(sum(sizes), dtype=torch.float32, device=first.device),
            )
            starts = itertools.accumulate([0, *sizes[:-1]])
            for (name, layer), start, size in zip(group.items(), starts, sizes, strict=True):
                self._copies[name] = layer, whole.rows(start, size)
            self._packed[tuple(map(id, group.values()))] = whole
        layer, copy = next(iter(self._copies.values()))
        try:
            self.refresh()
            with torch.no_grad():
                self.product(layer.weight[:1], copy, layer.bias)
        except RuntimeError as problem:
            if isinstance(problem, torch.OutOfMemoryError):
                raise
            reason = str(problem).strip().partition("\n")[0]
            raise Fp8Error(
                f"{key}=fp8: torch {torch.__version__} cannot multiply in FP8 on {model.device} ({reason}); leave "
                "it out"
            ) from problem

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weights as they are now. The memory of the copies stays the same."""
        self._by_parameter = {id(layer.weight): copy for layer, copy in self._copies.values()}
        for layer, copy in self._copies.values():
            self.kernels.quantize_rows(layer.weight, *copy)

    def copy_of(self, weight: Tensor) -> Fp8Weight | None:
        """The copy of a parameter, if it is of a covered layer."""
        return self._by_parameter.get(id(weight))

    def packed(self, layers: Sequence[nn.Linear]) -> Fp8Weight:
        """The copy of layers that share an input, in the order of their names in PROJECTIONS."""
        return self._packed[tuple(map(id, layers))]

    def product(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        """The linear layer of `weight` on inputs of any number of dimensions."""
        assert not torch.is_grad_enabled(), "training does not compute in FP8"
        x_TC = x.reshape(-1, x.shape[-1])
        data_TC = torch.empty(x_TC.shape, dtype=E4M3, device=x.device)
        scale_T = torch.empty(len(x_TC), dtype=torch.float32, device=x.device)
        self.kernels.quantize_rows(x_TC, data_TC, scale_T)
        y_TF = self.kernels.fp8_linear(data_TC, scale_T, *weight, bias, x.dtype)
        return y_TF.view(*x.shape[:-1], -1)

    def products(self) -> dict[str, Product]:
        """The covered layers of the module, as its own forward computes them."""

        def of(layer: nn.Module) -> Callable[[Tensor], Tensor]:
            def product(x_TC: Tensor) -> Tensor:
                with forward_in_fp8(self):
                    y_TF: Tensor = layer(x_TC)
                return y_TF

            return product

        body = body_of(self.model)
        return {
            name: Product(base.in_features, of(body.get_submodule(name))) for name, (base, _) in self._copies.items()
        }

    @torch.no_grad()
    def largest_error(self, products: Mapping[str, Product] | None = None) -> LayerError:
        """The product that FP8 changes most, by default of those of the module. Inputs are random ones, so large that a
        bias does not hide their product, and zeros, for the bias alone. No forward may run meanwhile."""
        random, found = torch.Generator().manual_seed(0), []
        for name, product in (self.products() if products is None else products).items():
            large_TC = torch.randn((CHECKED_ROWS, product.channels), generator=random).mul(LARGE_INPUT)
            for x_TC in (large_TC, torch.zeros_like(large_TC)):
                exact_TF, in_fp8_TF = (self._computed(product, x_TC, in_fp8=chosen) for chosen in (False, True))
                off = (in_fp8_TF - exact_TF).norm() / exact_TF.norm().clamp(min=1e-12)
                found.append(LayerError(float(off.nan_to_num(nan=math.inf)), name))
        return max(found)

    def _computed(self, product: Product, x_TC: Tensor, *, in_fp8: bool) -> Tensor:
        before, self.active = self.active, in_fp8
        try:
            return product.function(x_TC.to(self.model.device, self.model.dtype)).float()
        finally:
            self.active = before

    def words(self) -> str:
        """What computes in FP8 and what does not, in a sentence."""
        covered, others = self.covered, self.covered.others
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in others}))
        return (
            f"{len(self._copies)} linear layers of the rollout compute in FP8, whose copies take "
            f"{covered.bytes / 2**30:.2f} GiB; embeddings, norms and the output head do not"
            + (f", nor do {len(others)} other linear layers ({kinds})" if others else "")
        )


class _Fp8Forward(TorchFunctionMode):
    """Within it, on this thread, the covered layers of the module's own forward multiply by their copies."""

    def __init__(self, linears: Fp8Linears) -> None:
        super().__init__()
        self.linears = linears

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        copy = self.linears.copy_of(weight)
        return F.linear(input, weight, bias) if copy is None else self.linears.product(input, copy, bias)


def forward_in_fp8(linears: Fp8Linears | None) -> AbstractContextManager[Any]:
    """A context for a forward of the module: in FP8, or unchanged without active copies."""
    return _Fp8Forward(linears) if linears is not None and linears.active else nullcontext()
