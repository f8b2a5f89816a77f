"""fp8 caches read as 16-bit numbers, each two neighbours of a row.

The operands of a product lie in registers by pairs along the summed axis. Where that is not the axis along which a row lies in
memory, as for values, 8-bit numbers must be gathered one by one: hardware transposes 16-bit numbers at least. So a row's even and
odd columns become two operands, whose products are added (keys) or lie side by side (values).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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


@triton.jit
def _from_bits(bits, E4M3: tl.constexpr):
    """fp8 numbers, given as the bits of uint16 [...], in float16."""
    if E4M3:  # exponent and mantissa, moved, are a float16 that is 2^-8 times too small
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    else:  # the upper half of a float16
        value = (bits << 8).to(tl.float16, bitcast=True)
    return value


@triton.jit
def even_and_odd(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """int16 [M, N], two fp8 numbers each, as the even and the odd columns of [M, 2 N], in the dtype of the products."""
    if FP8 == "e4m3":
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            .reg .b16 low, high;
            prmt.b32 both, $2, $2, 0x3120;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif FP8 == "e5m2":
        even, odd = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, 0, 0x2404;
            prmt.b32 $1, $2, 0, 0x3414;
            """,
            "=&r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = x.to(tl.uint16, bitcast=True)
        even = _from_bits(bits & 0xFF, FP8 == "e4m3 in bits")
        odd = _from_bits(bits >> 8, FP8 == "e4m3 in bits")
    return even.to(DTYPE), odd.to(DTYPE)
