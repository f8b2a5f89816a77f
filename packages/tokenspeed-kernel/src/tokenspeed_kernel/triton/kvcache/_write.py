"""Device code that writes to the paged cache, for every kernel that does."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES

COPIED = "copied"


def cache_format(values: torch.dtype, cache: torch.dtype) -> str:
    """The ``FORMAT`` of `as_stored` for values and a cache of these dtypes."""
    return COPIED if values == cache else FP8_NAMES[cache]


def as_storable(x: Tensor) -> Tensor:
    """8-bit floats as bytes, which every device can load and store; others as they are."""
    return x.view(torch.uint8) if x.dtype in FP8_NAMES else x
