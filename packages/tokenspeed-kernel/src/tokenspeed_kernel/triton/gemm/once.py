"""Products of many rows with weights in narrow formats: the weights are decoded to memory, a slice at a time, and multiplied there.

Decoding in registers would decode every weight once for each 128 rows of a.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv
from tokenspeed_kernel.triton.gemm import direct
from tokenspeed_kernel.triton.gemm._operands import BLOCK, E4M3, LINE, MICRO, WHOLE, Operand, operand
from tokenspeed_kernel.triton.quantization.dequantize import dequantize_fp8, dequantize_mxfp4, dequantize_mxfp8, dequantize_nvfp4
from tokenspeed_kernel.triton.quantization.swizzle import unswizzle_scales
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8
from tokenspeed_kernel_base.platform import platform_of

# Bytes of a decoded slice of the weights: as many tiles as a large device computes at a time, several times, and most of it
# stays in the cache.
_SLICE_BYTES = 64 << 20

# Rows of a from which on decoding to memory pays. One H200, 8192 x 8192 weights: 4096 rows take 694 us (mxfp4) and 708 us (8-bit),
# decoded in registers 1704 and 1177; in registers 512 rows take 208 and 146.
_FEWEST_MICRO, _FEWEST_FP8 = 512, 1024


def serves(x: Operand, w: Operand) -> bool:
    """Whether decoding to memory pays, and bfloat16 (weight-only: a's dtype) holds the decoded values exactly."""
    if x.tensor.ndim != 2 or platform_of(x.tensor.device).is_cpu or x.k % 16:
        return False
    if x.lines < (_FEWEST_MICRO if w.scaling == MICRO else _FEWEST_FP8):
        return False
    if w.scaling == MICRO:
        return x.scaling == MICRO or w.scale_format == E4M3 or x.tensor.dtype == torch.bfloat16
    return x.format == "dense" and w.format != "dense" and (w.scaling != BLOCK or w.block == BLOCK_FP8)


def multiply(x: Operand, w: Operand, bias: Tensor | None, out: Tensor, alpha: Tensor | None = None) -> None:
    scales = w.scale
    assert scales is not None  # `serves` has seen to it
    a = x.tensor if x.scale is None else _values(x.tensor, _scales_in_rows(x, x.scale), x, torch.bfloat16)
    if w.scaling == MICRO:
        scales = _scales_in_rows(w, scales if w.swizzled else scales.mT)
    # Slices of whole blocks of 128 columns, which may have scales in common.
    step = max(_SLICE_BYTES // (a.element_size() * max(w.k, 1)) // 128 * 128, 128)
    one = None if w.scaling == MICRO else torch.ones(1, device=a.device)
    for first in range(0, w.lines, step):
        last = min(first + step, w.lines)
        lines = w.tensor[:, first:last].mT
        if one is None:
            values = operand(_values(lines, scales[first:last], w, a.dtype).mT, None, -1)
            if alpha is not None:
                values = values._replace(scale=alpha, scaling=WHOLE)
        else:
            values = operand(dequantize_fp8(lines, one, a.dtype, 1, None).mT, None, -1)
            # Scales of lines and blocks stay, as they lie.
            stays = {name: getattr(w, name) for name in ("scaling", "scale_strides", "scale_format", "block", "lines_each")}
            values = values._replace(scale=_scales_of(scales, w, first, last), **stays)
        direct.multiply(operand(a, None, -2), values, None if bias is None else bias[first:last], out[:, first:last])


def _scales_of(scales: Tensor, w: Operand, first: int, last: int) -> Tensor:
    return scales[:, first // w.lines_each : cdiv(last, w.lines_each)] if w.scaling in (LINE, BLOCK) else scales


def _scales_in_rows(x: Operand, scale: Tensor) -> Tensor:
    """Scales of one byte, ``[lines, blocks]``; ``scale`` is the operand's, along its lines."""
    return unswizzle_scales(scale, x.lines, x.k // x.block, None) if x.swizzled else scale


def _values(codes: Tensor, scale: Tensor, x: Operand, dtype: torch.dtype) -> Tensor:
    """Lines ``[lines, k]`` of an operand, exactly: those of mx in bfloat16, those of nvfp4 without alpha in either half."""
    if x.scale_format == E4M3:
        return dequantize_nvfp4(codes, scale, torch.ones(1, device=codes.device), dtype, None)
    return (dequantize_mxfp4 if x.format == "e2m1" else dequantize_mxfp8)(codes, scale, dtype, None)
