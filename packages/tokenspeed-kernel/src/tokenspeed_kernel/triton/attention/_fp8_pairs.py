"""fp8 caches that are read as int16 elements, each of which packs two neighbouring columns of a row.

A register of an MMA operand holds neighbours along k, the reduced axis. For values, k is not the contiguous axis in memory. Then
8-bit elements would have to be gathered one by one, because the hardware transposes only elements of at least 16 bits. So the cache
is loaded as 16-bit elements, and a row's even and odd columns become two MMA operands. The results of the two MMAs are added (keys)
or interleaved (values).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import for_architecture
from tokenspeed_kernel_base.checks import FP8

# Architectures with PTX that converts two e4m3 values at once and permutes bytes. Other architectures unpack values by integer
# operations.
_PTX = {"sm_89": True, "sm_90": True, "sm_100": True, "sm_103": True, "sm_120": True, "any": False}
_LEAST_WIDTH = 32  # columns of a row: twice the least k of a `tl.dot`


def pairable(cache: Tensor) -> bool:
    """Whether a cache's rows can be read as int16 pairs of fp8 values. This requires an fp8 dtype, contiguous rows of at least
    _LEAST_WIDTH columns, and an even width, even strides and an even offset.
    """
    *apart, last = cache.stride()
    return (
        cache.dtype in FP8
        and last == 1
        and cache.shape[-1] % 2 == 0
        and cache.shape[-1] >= _LEAST_WIDTH
        and not any(stride % 2 for stride in apart)
        and cache.storage_offset() % 2 == 0
    )


def paired(cache: Tensor) -> tuple[Tensor, str]:
    """Returns the cache viewed as int16 ``[..., width / 2]``, and the ``FP8`` argument of `even_and_odd`."""
    name = "e4m3" if cache.dtype == torch.float8_e4m3fn else "e5m2"
    return cache.view(torch.int16), name if for_architecture(_PTX, cache.device) else f"{name} in bits"
