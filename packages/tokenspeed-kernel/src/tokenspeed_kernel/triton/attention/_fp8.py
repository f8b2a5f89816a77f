"""How fp8 operands become operands of wider products, on hardware that knows their format and on hardware that does not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.common import for_architecture

# Whether the compiler converts e4m3: not in the interpreter, not before sm_89; gfx942 has another e4m3, and emulates this one at
# some cost.
_CONVERTS_E4M3 = {"cpu": False, "sm_80": False, "sm_86": False, "gfx942": False, "any": True}


def fp8_operand(x: Tensor) -> tuple[Tensor, str | None]:
    """What to pass to a kernel for ``x``, and the ``FP8`` of `widened` for it: None where x is not fp8."""
    if x.dtype == torch.float8_e5m2:
        return x.view(torch.uint8), "e5m2 in bits"
    if x.dtype == torch.float8_e4m3fn:
        return (x, "e4m3") if for_architecture(_CONVERTS_E4M3, x.device) else (x.view(torch.uint8), "e4m3 in bits")
    return x, None


@triton.jit
def widened(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Elements in the dtype of the products, to which every fp8 number is exact (float16, bfloat16 or float32)."""
    if FP8 == "e4m3 in bits":  # exponent and mantissa, moved, are those of a float16 that is 2^-8 times the number
        bits = x.to(tl.uint16)
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    elif FP8 == "e5m2 in bits":  # the upper half of a float16
        value = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FP8 == "e4m3":  # straight to bfloat16 would take a slow instruction; the detour costs the others nothing
        value = x.to(tl.float16).to(tl.float32)
    else:
        value = x
    return value.to(DTYPE)
