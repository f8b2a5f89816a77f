"""GEMMs with many rows of a and weights b in narrow formats: each slice of the weights is dequantised to memory, then multiplied by
`direct`.

Dequantising in registers would dequantise every weight once for each 128 rows of a.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv
from tokenspeed_kernel.triton.gemm import direct
from tokenspeed_kernel.triton.gemm._operands import BLOCK, E4M3, LINE, MICRO, WHOLE, Operand, operand
from tokenspeed_kernel.triton.quantization.dequantize import decode_blocks, dequantize_fp8
from tokenspeed_kernel_base.platform import platform_of

# Bytes of a dequantised slice of weights. The slice has several waves of tiles on a large device, and most of it stays in L2.
_SLICE_BYTES = 64 << 20

# Dequantising to memory is faster if a has at least this many rows. One H200, 8192 x 8192 weights, 4096 rows: 694 us (mxfp4) and
# 708 us (8-bit), against 1704 us and 1177 us dequantised in registers. 512 rows take 208 us and 146 us dequantised in registers.
_FEWEST_MICRO, _FEWEST_FP8 = 512, 1024


def is_eligible(x: Operand, w: Operand) -> bool:
    """Whether a GEMM is faster if the weights are first dequantised to memory. Dequantisation to bfloat16 (for weight-only formats,
    to a's dtype) must also be exact."""
    if x.tensor.ndim != 2 or platform_of(x.tensor.device).is_cpu or x.k % 16:
        return False
    if x.lines < (_FEWEST_MICRO if w.scaling == MICRO else _FEWEST_FP8):
        return False
    if w.scaling == MICRO:
        return w.scale_format == E4M3 or x.tensor.dtype == torch.bfloat16
    return x.format == "dense" and w.format != "dense"


def dense_rows(x: Operand) -> Operand:
    """Returns operand ``a``, dequantised to bfloat16 (exactly) if it has one-byte scales; otherwise unchanged.

    A batch of matrices with swizzled scales is returned unchanged, too, because no kernel dequantises such a batch to memory.
    """
    if x.scale is None or x.scaling != MICRO or (x.swizzled and x.tensor.ndim > 2):
        return x
    return operand(decode_blocks(x.tensor, x.scale, None, x.block, torch.bfloat16), None, -2)


def multiply(x: Operand, w: Operand, bias: Tensor | None, out: Tensor, alpha: Tensor | None = None) -> None:
    """Computes ``out[...] = alpha * (a @ b) + bias`` for operands that `is_eligible` accepts. out must not be empty."""
    scales = w.scale
    assert scales is not None  # `is_eligible` checks this
    a = x.tensor
    if w.scaling == MICRO and not w.swizzled:
        scales = scales.mT
    # Slices have a multiple of 128 columns, because up to 128 columns can share scales or a tile of scales.
    step = max(_SLICE_BYTES // (a.element_size() * max(w.k, 1)) // 128 * 128, 128)
    one = None if w.scaling == MICRO else torch.ones(1, device=a.device)
    for first in range(0, w.lines, step):
        last = min(first + step, w.lines)
        lines = w.tensor[:, first:last].mT
        if one is None:
            own = scales[first // 128 : cdiv(last, 128)] if w.swizzled else scales[first:last]
            values = operand(decode_blocks(lines, own, None, w.block, a.dtype).mT, None, -1)
            if alpha is not None:
                values = values._replace(scale=alpha, scaling=WHOLE)
        else:
            values = operand(dequantize_fp8(lines, one, a.dtype, 1, None).mT, None, -1)
            # Line and block scales keep their layout, and `direct` applies them.
            stays = {name: getattr(w, name) for name in ("scaling", "scale_strides", "scale_format", "block", "lines_each")}
            values = values._replace(scale=_scales_of(scales, w, first, last), **stays)
        direct.multiply(operand(a, None, -2), values, None if bias is None else bias[first:last], out[:, first:last])


def _scales_of(scales: Tensor, w: Operand, first: int, last: int) -> Tensor:
    return scales[:, first // w.lines_each : cdiv(last, w.lines_each)] if w.scaling in (LINE, BLOCK) else scales
