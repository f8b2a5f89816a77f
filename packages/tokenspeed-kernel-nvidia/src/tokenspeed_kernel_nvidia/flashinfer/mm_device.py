"""mm by ``flashinfer.gemm.mm_fp4``, ``flashinfer.gemm.mm_mxfp8`` and ``flashinfer.gemm.mm_bf16_fp4``."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.flashinfer._memory import to_write
from tokenspeed_kernel_nvidia.flashinfer.package import load

_mm_bf16_fp4 = load("flashinfer.gemm", "mm_bf16_fp4")
_mm_fp4 = load("flashinfer.gemm", "mm_fp4")
_mm_mxfp8 = load("flashinfer.gemm", "mm_mxfp8")


def mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_nvidia.mm`. Supports block scales in tiles of 128x4, and no bias. With a bfloat16
    ``a``, the module ``mm`` declares the layout of b_scale.

    The call never waits for the device. Operands that are not contiguous (weights: along k) are copied. Make the first call before
    a graph is captured. That call loads the kernel, which takes minutes if nvcc compiles it, and allocates a workspace.
    """
    dtype = out_dtype or torch.bfloat16
    written = to_write(out, a.new_empty((), dtype=dtype), (a.shape[0], b.shape[1]))
    if not written.numel():
        return deliver(written, out)
    a, b = aligned(a).contiguous(), aligned(b.mT).contiguous().mT
    factor = None if alpha is None else alpha.reshape(1)
    if a_scale is None:
        tiles = b_scale.ndim > 2
        _mm_bf16_fp4(
            a,
            b.mT,
            _rows(b_scale) if tiles else b_scale.mT.contiguous(),
            factor,
            backend="cute-dsl-native" if tiles else "blackwell-native",
            out_dtype=dtype,
            out=written,
        )
    elif a.dtype == torch.uint8:
        nvfp4 = a_scale.dtype == torch.float8_e4m3fn
        _mm_fp4(
            a,
            b,
            _rows(a_scale),
            _rows(b_scale).mT,
            alpha=factor,
            out_dtype=dtype,
            out=written,
            block_size=16 if nvfp4 else 32,
            backend="cutlass" if nvfp4 else "cudnn",
            use_nvfp4=nvfp4,
        )
    else:
        _mm_mxfp8(a, b, _rows(a_scale).flatten(), _rows(b_scale).flatten(), out=written, out_dtype=dtype, backend="cutlass")
    return deliver(written, out)


def _rows(scale: Tensor) -> Tensor:
    """Views block scales in 128x4 tiles, ``[down, across, 32, 4, 4]``, as the two-axis tensor that FlashInfer expects, ``[128 *
    down, 4 * across]``; e8m0 as uint8."""
    scale = scale.contiguous() if scale.dtype == torch.float8_e4m3fn else scale.contiguous().view(torch.uint8)
    return scale.view(128 * scale.shape[0], 4 * scale.shape[1])
