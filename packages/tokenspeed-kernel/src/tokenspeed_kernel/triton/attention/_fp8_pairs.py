"""fp8 caches read as 16-bit numbers, each two neighbours of a row.

The operands of a product lie in registers by pairs along the summed axis. Where that is not the axis along which a row lies in
memory, as for values, 8-bit numbers must be gathered one by one: hardware transposes 16-bit numbers at least. So a row's even and
odd columns become two operands, whose products are added (keys) or lie side by side (values).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import for_architecture
from tokenspeed_kernel_base.checks import FP8

# Where PTX converts two e4m3 numbers at once, and bytes are permuted; elsewhere numbers are taken apart.
_PTX = {"sm_89": True, "sm_90": True, "sm_100": True, "sm_103": True, "sm_120": True, "any": False}
_LEAST_WIDTH = 32  # half of it is the least that a product sums over


def pairable(cache: Tensor) -> bool:
    """Whether a cache's rows can be read in pairs."""
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
    """The cache as int16 ``[..., width / 2]``, and the ``FP8`` of `even_and_odd` for it."""
    name = "e4m3" if cache.dtype == torch.float8_e4m3fn else "e5m2"
    return cache.view(torch.int16), name if for_architecture(_PTX, cache.device) else f"{name} in bits"
