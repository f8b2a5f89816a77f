"""Host code shared by all kernels that quantise keys and values and store them to the paged cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities, division_steps

COPIED = "copied"


class Encoding(NamedTuple):
    """How a kernel stores keys and values in the cache.

    Attributes:
        format: the cache's 8-bit float format, or "copied" if the cache has the values' dtype.
        native: whether the device converts 8-bit floats in hardware, see `Abilities`.
        k_scales, v_scales: number of scales of keys and of values; 0 for none.
        interpreted: whether kernels run in Triton's interpreter.
        steps: how often a quotient is corrected by its remainder, see `_encode_device.divide`.
    """

    format: str = COPIED
    native: bool = False
    k_scales: int = 0
    v_scales: int = 0
    interpreted: bool = False
    steps: int = 0


def encoding_for(values: Tensor, cache: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> Encoding:
    """Returns the encoding with which a kernel stores ``values`` in ``cache``, on the values' device."""
    form = cache_format(values.dtype, cache.dtype)
    if form == COPIED:
        return Encoding()
    able = abilities(values.device)
    k_scales, v_scales = (0 if scale is None else scale.numel() for scale in (k_scale, v_scale))
    return Encoding(form, able.native, k_scales, v_scales, able.interpreted, division_steps(values.dtype))


def cache_format(values: torch.dtype, cache: torch.dtype) -> str:
    """Returns the argument ``FORMAT`` of `as_stored` for values and a cache of these dtypes: "copied" if the dtypes are equal,
    otherwise the name of the cache's 8-bit float format."""
    return COPIED if values == cache else FP8_NAMES[cache]


def as_storable(x: Tensor) -> Tensor:
    """Views 8-bit floats as uint8, which every device can load and store. Returns other tensors unchanged."""
    return x.view(torch.uint8) if x.dtype in FP8_NAMES else x
