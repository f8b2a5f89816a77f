"""Converts fp8 operands for MMAs in a wider dtype, on hardware with or without support for fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import for_architecture

# Whether Triton's compiler converts e4m3 to wider dtypes. The interpreter does not, nor do architectures before sm_89. gfx942 has
# another e4m3 (e4m3fnuz), and emulates e4m3fn at some cost.
_CONVERTS_E4M3 = {"cpu": False, "sm_80": False, "sm_86": False, "gfx942": False, "any": True}


def fp8_operand(x: Tensor) -> tuple[Tensor, str | None]:
    """Returns the tensor to pass to a kernel for ``x`` (x itself, or its bits as uint8), and the ``FP8`` argument of `widened`,
    which tells the kernel how to convert elements: None if x is not fp8."""
    if x.dtype == torch.float8_e5m2:
        return x.view(torch.uint8), "e5m2 in bits"
    if x.dtype == torch.float8_e4m3fn:
        return (x, "e4m3") if for_architecture(_CONVERTS_E4M3, x.device) else (x.view(torch.uint8), "e4m3 in bits")
    return x, None
