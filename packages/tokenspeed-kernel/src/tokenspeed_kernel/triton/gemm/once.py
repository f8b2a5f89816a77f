"""Products of many rows with weights in narrow formats: the weights are decoded to memory, a slice at a time, and multiplied there.

Decoding in registers would decode every weight once for each 128 rows of a.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv
from tokenspeed_kernel.triton.gemm import direct
from tokenspeed_kernel.triton.gemm._operands import BLOCK, LINE, MX, Operand, operand
from tokenspeed_kernel.triton.quantization.dequantize import dequantize_fp8, dequantize_mxfp4, dequantize_mxfp8
from tokenspeed_kernel_base.platform import platform_of

# Bytes of a decoded slice of the weights: as many tiles as a large device computes at a time, several times, and most of it
# stays in the cache.
_SLICE_BYTES = 64 << 20

# Rows of a from which on decoding to memory pays. One H200, 8192 x 8192 weights: 4096 rows take 694 us (mxfp4) and 708 us (8-bit),
# decoded in registers 1704 and 1177; in registers 512 rows take 208 and 146.
_FEWEST_MX, _FEWEST_FP8 = 512, 1024


def serves(x: Operand, w: Operand) -> bool:
    """Whether decoding to memory pays, and bfloat16 (weight-only: a's dtype) holds the decoded values exactly."""
    if x.tensor.ndim != 2 or platform_of(x.tensor.device).is_cpu or x.k % 16:
        return False
    if x.lines < (_FEWEST_MX if w.scaling == MX else _FEWEST_FP8):
        return False
    if w.scaling == MX:
        return x.scaling == MX or x.tensor.dtype == torch.bfloat16
    return x.format == "dense" and w.format != "dense"


def multiply(x: Operand, w: Operand, bias: Tensor | None, out: Tensor) -> None:
    a = x.tensor if x.scale is None else _values(x.tensor, x.scale)
    scales = w.scale
    assert scales is not None  # `serves` has seen to it
    # Slices of whole blocks of 128 columns, which may have scales in common.
    step = max(_SLICE_BYTES // (a.element_size() * max(w.k, 1)) // 128 * 128, 128)
    one = None if w.scaling == MX else torch.ones(1, device=a.device)
    for first in range(0, w.lines, step):
        last = min(first + step, w.lines)
        lines = w.tensor[:, first:last].mT
        if one is None:
            values = operand(_values(lines, scales[:, first:last].mT).mT, None, -1)
        else:
            values = operand(dequantize_fp8(lines, one, a.dtype, 1, None).mT, None, -1)
            scale = _scales_of(scales, w.scaling, first, last)
            strides = (0, scale.stride(1), scale.stride(0)) if scale.ndim == 2 else (0, 0, 0)
            values = values._replace(scale=scale, scaling=w.scaling, scale_strides=strides)
        direct.multiply(operand(a, None, -2), values, None if bias is None else bias[first:last], out[:, first:last])


def _scales_of(scales: Tensor, scaling: str, first: int, last: int) -> Tensor:
    if scaling == LINE:
        return scales[:, first:last]
    return scales[:, first // 128 : cdiv(last, 128)] if scaling == BLOCK else scales


def _values(q: Tensor, scale: Tensor) -> Tensor:
    """mx ``[lines, k]`` in bfloat16, exactly."""
    dequantize = dequantize_mxfp4 if q.dtype == torch.uint8 else dequantize_mxfp8
    return dequantize(q, scale, torch.bfloat16, None)
