"""The launchers of `mm` and `bmm`, which choose among the GEMM kernels of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, dense
from tokenspeed_kernel.triton.gemm import decoded, direct, once, words
from tokenspeed_kernel.triton.gemm._formats import DENSE, SCALED
from tokenspeed_kernel.triton.gemm._operands import operand
from tokenspeed_kernel_base.ops.gemm.operands import default_out_dtype
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "gemm",
    "mm",
    solution="triton",
    capability=TRITON,
    signatures=SCALED,
    traits={"bias": any, "wide_bias": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
@register_kernel(
    "gemm",
    "mm",
    name="triton_mm_dense",
    solution="triton",
    capability=TRITON,
    signatures=DENSE,
    traits={"bias": any, "wide_bias": any},
    priority=Priority.PORTABLE - 1,
    tags={"determinism"},
)
def mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or default_out_dtype(a))
    _multiply(a, b, a_scale, b_scale, bias, alpha, out)
    return out


@register_kernel(
    "gemm",
    "bmm",
    solution="triton",
    capability=TRITON,
    signatures=SCALED,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
@register_kernel(
    "gemm",
    "bmm",
    name="triton_bmm_dense",
    solution="triton",
    capability=TRITON,
    signatures=DENSE,
    priority=Priority.PORTABLE - 1,
    tags={"determinism"},
)
def bmm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if out is None:
        out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=out_dtype or default_out_dtype(a))
    _multiply(a, b, a_scale, b_scale, None, alpha, out)
    return out


def _multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    out: Tensor,
) -> None:
    # Computes a GEMM, or a batch of them, with the first eligible of four kernels:
    #
    # 1. `direct`: the tensor cores support both operands as stored.
    # 2. `words`: few rows of a, and e2m1 weights.
    # 3. `once`: many rows of a; b is dequantised in a launch of its own.
    # 4. `decoded`: everything else; each program dequantises what it reads.
    if not out.numel():
        return
    # If a has one-byte scales, it is dequantised once, instead of in every program that reads it.
    x, w, bias = once.dense_rows(operand(a, a_scale, -2)), operand(b, b_scale, -1), dense(bias)
    if direct.is_eligible(x, w):
        direct.multiply(x, w, bias, out)
    elif words.is_eligible(x, w):
        words.multiply(x, w, bias, out, alpha)
    elif once.is_eligible(x, w):
        once.multiply(x, w, bias, out, alpha)
    else:
        decoded.multiply(x, w, bias, out, alpha=alpha)
