"""Batched GEMM of dense or scaled operands."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, nbytes
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.gemm._inputs import dense, fp8, micro
from tokenspeed_kernel_base.ops.gemm.operands import (
    FORMAT_NAMES,
    OUT_DTYPE_NAMES,
    check_alpha,
    check_out_dtype,
    decode_operands,
    default_out_dtype,
    logical_k,
    recognise,
    vary_scales,
)
from tokenspeed_kernel_base.signature import FormatSignature, dtype_name
from tokenspeed_kernel_base.variation import Variation


@operator(
    "gemm",
    "bmm",
    formats=dict.fromkeys("ab", FORMAT_NAMES),
    traits={"k_multiple": int, "n_multiple": int, "out_dtype": OUT_DTYPE_NAMES},
    outs=("out",),
    varying=("batch", "m"),
    scales=("a_scale", "b_scale"),
)
def bmm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Batched GEMM: ``alpha * (a[i] @ b[i])`` for every i of the batch, for dense or quantised operands.

    Formats, scales, rounding and errors are those of `mm`, with a leading batch axis in every shape: a ``[batch, m, k]``, b
    ``[batch, k, n]``, a_scale ``[batch, m, 1]``, b_scale ``[batch, 1, n]``, and so on. Per-tensor scales, ``[]`` or ``[1]``, and
    alpha apply to the whole batch.

    Args:
        a: ``[batch, m, k]``, or ``[batch, m, k/2]`` in mxfp4 and nvfp4.
        b: ``[batch, k, n]``, or ``[batch, k/2, n]`` in mxfp4 and nvfp4.
        a_scale: the scale of a, see above; None if a is dense.
        b_scale: the scale of b, see above; None if b is dense.
        out_dtype: float16, bfloat16 or float32; for float64 operands float64. The default is a's dtype if a is dense, else
            bfloat16.
        alpha: float32 ``[]`` or ``[1]``, multiplies the result. Required if an operand is nvfp4, otherwise not allowed.
        out: receives the result; must not share memory with an input.

    Returns:
        ``out_dtype [batch, m, n]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import bmm
        >>> bmm(torch.ones(2, 1, 3), torch.arange(12.0).reshape(2, 3, 2))
        tensor([[[ 6.,  9.]],
        <BLANKLINE>
                [[24., 27.]]])

    Safe in CUDA graphs.
    """
    wide_a, wide_b = decode_operands("bmm", a, b, a_scale, b_scale)
    products = torch.bmm(wide_a, wide_b)
    return (products if alpha is None else products * alpha).to(out_dtype or default_out_dtype(a))


@bmm.formats
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> FormatSignature:
    return recognise(Checker("bmm"), a, b, a_scale, b_scale)


@bmm.traits
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> dict[str, object]:
    # k and n may be token counts here, so the traits state only their largest power-of-two divisor, up to 128.
    return {
        "k_multiple": math.gcd(logical_k(a), 128),
        "n_multiple": math.gcd(b.shape[2], 128),
        "out_dtype": dtype_name(out_dtype or default_out_dtype(a)),
    }


@bmm.check
def _(
    check: Checker,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha: Tensor | None,
) -> None:
    check.require(a.ndim == 3, "a", "of shape [batch, m, k]", a)
    check_alpha(check, recognise(check, a, b, a_scale, b_scale), alpha)
    check_out_dtype(check, a, out_dtype)


@bmm.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=out_dtype or default_out_dtype(a))


@bmm.vary
def _(variation: Variation, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> dict[str, Tensor]:
    return vary_scales(variation, a, b, a_scale=a_scale, b_scale=b_scale)


@bmm.cases
def _() -> list[Case]:
    half, single, double = torch.float16, torch.float32, torch.float64
    four = (4,)
    return [
        Case("dense", dense(5, 48, 33, batch=four)),
        Case("dense, float16, one token", dense(1, 64, 24, dtype=half, batch=four)),
        Case("dense, float32", dense(3, 17, 9, dtype=single, batch=(2,))),
        Case("dense, float64", dense(3, 17, 9, dtype=double, batch=(2,))),
        Case("dense, bfloat16 to float32", dense(3, 32, 9, out_dtype=single, batch=four)),
        Case("dense, empty batch", dense(3, 32, 9, batch=(0,))),
        Case("dense, no tokens", dense(0, 32, 9, batch=four)),
        Case("dense, k = 0", dense(3, 0, 9, batch=four)),
        Case("fp8 per tensor", fp8(3, 64, 48, a_scale="tensor", b_scale="tensor", batch=four)),
        Case("fp8 per token and channel", fp8(3, 64, 48, a_scale="token", b_scale="channel", batch=four)),
        Case("fp8 per block, short last blocks", fp8(3, 200, 150, a_scale="block", b_scale="block", batch=(2,))),
        Case("mxfp8", micro(3, 96, 40, a="mxfp8", b="mxfp8", batch=four)),
        Case("mxfp4", micro(3, 96, 40, a="mxfp4", b="mxfp4", batch=four)),
        Case("mxfp4 weight only", micro(3, 96, 40, a="dense", b="mxfp4", batch=four)),
        Case("fp8 per block, e8m0", fp8(3, 200, 150, a_scale="block", b_scale="block", scales="e8m0", batch=(2,))),
        Case("nvfp4 in tiles of 128x4", micro(3, 80, 40, a="nvfp4", b="nvfp4", layout="128x4", batch=(2,))),
        Case("deepseek-v3 absorbed q, decode 128", dense(128, 128, 512, batch=(128,)), large=True),
        Case(
            "deepseek-v3 absorbed v, fp8, decode 128",
            fp8(128, 512, 128, a_scale="token", b_scale="tensor", batch=(128,)),
            large=True,
        ),
    ]


@bmm.cost
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out_dtype: torch.dtype | None) -> Cost:
    batch, m, k, n = a.shape[0], a.shape[1], logical_k(a), b.shape[2]
    written = batch * m * n * (out_dtype or default_out_dtype(a)).itemsize
    return Cost(flops=2.0 * batch * m * n * k, bytes=nbytes(a, b, a_scale, b_scale) + written)
