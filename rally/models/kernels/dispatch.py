"""Selects the kernels of a step: Triton on a GPU, the plain torch reference on any other device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor


class Kernels(NamedTuple):
    """The functions of one implementation; see `reference` for what they compute."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    rotate_and_store: Callable[..., None]
    gated: Callable[..., Tensor]
    sample: Callable[..., None]
    paged_decode: Callable[..., None]
    paged_extend: Callable[..., None]
    invariant_linear: Callable[..., Tensor]
    scan_step: Callable[..., None]
    grouped_linear: Callable[..., None]
    quantize_rows: Callable[..., None]
    fp8_linear: Callable[..., Tensor]


def has_triton() -> bool:
    return find_spec("triton") is not None


def kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda":
        from rally.models.kernels.activation import gated
        from rally.models.kernels.batch_invariant_matmul import linear
        from rally.models.kernels.fp8_linear import fp8_linear, quantize_rows
        from rally.models.kernels.grouped_linear import grouped_linear
        from rally.models.kernels.paged_decode import paged_decode
        from rally.models.kernels.paged_extend import paged_extend
        from rally.models.kernels.rms_norm import add_rms_norm, rms_norm
        from rally.models.kernels.rotary import rotate_and_store
        from rally.models.kernels.sampling import sample
        from rally.models.kernels.scan_step import scan_step

        return Kernels(
            rms_norm,
            add_rms_norm,
            rotate_and_store,
            gated,
            sample,
            paged_decode,
            paged_extend,
            linear,
            scan_step,
            grouped_linear,
            quantize_rows,
            fp8_linear,
        )
    from rally.models.kernels import reference

    return Kernels(
        reference.rms_norm,
        reference.add_rms_norm,
        reference.rotate_and_store,
        reference.gated,
        reference.sample,
        reference.paged_decode,
        reference.paged_extend,
        reference.linear,
        reference.scan_step,
        reference.grouped_linear,
        reference.quantize_rows,
        reference.fp8_linear,
    )
