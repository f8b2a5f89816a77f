"""GEMM of dense or scaled operands."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, nbytes
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.explanation import bucket
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
    "mm",
    formats=dict.fromkeys("ab", FORMAT_NAMES),
    traits={"m": int, "k": int, "n": int, "out_dtype": OUT_DTYPE_NAMES, "bias": bool, "wide_bias": bool},
    outs=("out",),
    varying=("m",),
    scales=("a_scale", "b_scale"),
)
def mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """GEMM: ``alpha * (a @ b) + bias`` for dense or quantised operands.

    A weight stored as ``[n, k]`` is passed as the view ``weight.t()``, and its scales likewise. Dtypes and the shapes of the
    scales determine the formats:

    - dense: a ``[m, k]`` and b ``[k, n]`` of the same dtype (float16, bfloat16, float32, float64), no scales.
    - fp8: both are 8-bit floats (float8_e4m3fn, float8_e5m2, float8_e4m3fnuz), value = element * scale, with float32 scales. Per
      tensor: ``[]`` or ``[1]``. Per token and channel: a_scale ``[m, 1]``, b_scale ``[1, n]``; either may be per tensor instead.
      Per block, for both operands: a_scale ``[m, ceil(k/s)]``, b_scale ``[ceil(k/s), ceil(n/s)]`` or ``[ceil(k/s), n]``, where s is
      128, 64 or 32, the same for both operands. The last block of an axis may be partial.
    - fp8 per block with e8m0 scales, for float8_e4m3fn and float8_e5m2: shapes as above, where s is 128 or 64. With s = 128,
      either scale may be packed into int32. An int32 holds the exponents of four consecutive blocks along k, the first in the
      lowest byte. The shapes are a_scale ``[m, ceil(k/512)]``, b_scale ``[ceil(k/512), ceil(n/128)]`` or ``[ceil(k/512), n]``, of
      any strides.
    - mxfp8: both float8_e4m3fn or float8_e5m2; mxfp4: both uint8, two e2m1 values in a byte along k, a ``[m, k/2]``, b
      ``[k/2, n]``, the lower index in the lower nibble. k is a multiple of 32, scales are e8m0: a_scale ``[m, k/32]``, b_scale
      ``[k/32, n]``. One operand may be mxfp8 and the other mxfp4.
    - nvfp4: both uint8 as in mxfp4, k a multiple of 16, scales float8_e4m3fn: a_scale ``[m, k/16]``, b_scale ``[k/16, n]``; alpha
      is the product of both global scales of `quantize_nvfp4`.
    - weight-only: a dense float16 or bfloat16 without a scale, b in any scaled format. With nvfp4, alpha is b's global scale.

    e8m0 scales are uint8 or float8_e8m0fnu. Scales of mxfp8, mxfp4 and nvfp4 may lie in 128x4 tiles, as written by
    `swizzle_scales` and by the quantising operators with ``scale_layout="128x4"``. The scale layouts of a and b are independent.
    With s = 32 (nvfp4: 16), a_scale is ``[ceil(m/128), ceil(k/(4*s)), 32, 4, 4]`` and b_scale ``[ceil(n/128), ceil(k/(4*s)), 32, 4,
    4]``, which is not transposed. The padding of the last tiles is ignored.

    A one-dimensional scale is per tensor. A two-dimensional scale is never per tensor: with ``m = 1``, a_scale ``[1]`` is per
    tensor and ``[1, 1]`` per token. If a scale's shape matches several of these formats, all of them have the same meaning. The
    call then counts as the first of them, in the order above, that is valid with the other operand's scale.

    Operands are dequantised to float32 and accumulated in float32. The accumulator is multiplied by alpha, bias is added, and the
    result is rounded once. With float64 operands all arithmetic is float64. With ``k = 0`` the dot products are 0. Kernels that
    call PyTorch functions obey PyTorch's settings for reduced precision (``torch.backends.cuda.matmul``).

    Args:
        a: ``[m, k]``, or ``[m, k/2]`` in mxfp4 and nvfp4.
        b: ``[k, n]``, or ``[k/2, n]`` in mxfp4 and nvfp4.
        a_scale: the scale of a, see above; None if a is dense.
        b_scale: the scale of b, see above; None if b is dense.
        bias: ``[n]``, of the result's dtype or float32.
        out_dtype: float16, bfloat16 or float32; for float64 operands float64. The default is a's dtype if a is dense, else
            bfloat16.
        alpha: float32 ``[]`` or ``[1]``, multiplies the result. Required if an operand is nvfp4, otherwise not allowed.
        out: receives the result; must not share memory with an input.

    Returns:
        ``out_dtype [m, n]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import mm, quantize_fp8
        >>> a, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, -1.0]])
        >>> mm(a, weight.t(), bias=torch.tensor([0.5, 0.5]))
        tensor([[11.5000, -1.5000]])
        >>> (a8, a_scale), (w8, w_scale) = quantize_fp8(a), quantize_fp8(weight)
        >>> mm(a8, w8.t(), a_scale, w_scale.t(), out_dtype=torch.float32).round()
        tensor([[11., -2.]])

    Safe in CUDA graphs.
    """
    wide_a, wide_b = decode_operands("mm", a, b, a_scale, b_scale)
    product = torch.mm(wide_a, wide_b)
    if alpha is not None:
        product = product * alpha
    if bias is not None:
        product = product + bias
    return product.to(out_dtype or default_out_dtype(a))


@mm.formats
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> FormatSignature:
    return recognise(Checker("mm"), a, b, a_scale, b_scale)


@mm.traits
def _(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> dict[str, object]:
    result = out_dtype or default_out_dtype(a)
    return {
        # Rounded up to a power of two, like all sizes that vary from call to call: calls of similar size share a tuned result.
        "m": bucket(a.shape[0]),
        "k": logical_k(a),
        "n": b.shape[1],
        "out_dtype": dtype_name(result),
        "bias": bias is not None,
        "wide_bias": bias is not None and bias.dtype != result,
    }


@mm.check
def _(
    check: Checker,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha: Tensor | None,
) -> None:
    check.require(a.ndim == 2, "a", "of shape [m, k]", a)
    check_alpha(check, recognise(check, a, b, a_scale, b_scale), alpha)
    check_out_dtype(check, a, out_dtype)
    result = out_dtype or default_out_dtype(a)
    check.tensor("bias", bias, "n", {result} if result == torch.float64 else {result, torch.float32})


@mm.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or default_out_dtype(a))


@mm.vary
def _(variation: Variation, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> dict[str, Tensor]:
    return vary_scales(variation, a, b, a_scale=a_scale, b_scale=b_scale)


@mm.cases
def _() -> list[Case]:
    half, single, double = torch.float16, torch.float32, torch.float64
    return [
        Case("dense, gpt-oss-120b router decode 4", dense(4, 2880, 128, bias=torch.bfloat16)),
        Case("dense, one token, float16", dense(1, 96, 80, dtype=half)),
        Case("dense, odd sizes, float32, bias", dense(5, 33, 7, dtype=single, bias=single)),
        Case("dense, float64", dense(5, 33, 7, dtype=double, bias=double)),
        Case("dense, bfloat16 to float32, float32 bias", dense(9, 64, 48, bias=single, out_dtype=single)),
        Case("dense, bfloat16 with float32 bias", dense(9, 64, 48, bias=single)),
        Case("dense, no tokens", dense(0, 64, 48, bias=torch.bfloat16)),
        Case("dense, k = 0", dense(3, 0, 8, bias=torch.bfloat16)),
        Case("fp8 per tensor", fp8(5, 96, 48, a_scale="tensor", b_scale="tensor")),
        Case("fp8 per token and channel, bias", fp8(7, 300, 40, a_scale="token", b_scale="channel", bias=torch.bfloat16)),
        Case("fp8 per token and tensor, one token", fp8(1, 64, 48, a_scale="token", b_scale="tensor", out_dtype=single)),
        Case("fp8 per block, short last blocks", fp8(5, 300, 200, a_scale="block", b_scale="block")),
        Case("fp8 per block, one block", fp8(3, 96, 48, a_scale="block", b_scale="block", out_dtype=half)),
        Case("fp8 e5m2 with e4m3fn", fp8(4, 64, 32, a_scale="tensor", b_scale="channel", a_dtype=torch.float8_e5m2)),
        Case("fp8, no tokens", fp8(0, 256, 128, a_scale="block", b_scale="block")),
        Case("fp8 per tensor, 130 tokens, bias", fp8(130, 96, 48, a_scale="tensor", b_scale="tensor", bias=torch.bfloat16)),
        Case("fp8 per tensor, 130 tokens, float32", fp8(130, 96, 48, a_scale="tensor", b_scale="tensor", out_dtype=single)),
        Case("fp8 per token and channel, 258 tokens", fp8(258, 96, 48, a_scale="token", b_scale="channel", bias=torch.bfloat16)),
        Case("fp8 per token, 258 tokens, float32", fp8(258, 96, 48, a_scale="token", b_scale="tensor", out_dtype=single)),
        Case("fp8 per block, 258 tokens", fp8(258, 512, 128, a_scale="block", b_scale="block")),
        Case("fp8 per block, 258 tokens, float32", fp8(258, 512, 128, a_scale="block", b_scale="block", out_dtype=single)),
        Case("fp8 weight only, per channel", fp8(3, 160, 48, a_scale="", b_scale="channel", a_dtype=torch.bfloat16)),
        Case("fp8 weight only, per channel, float16", fp8(2, 160, 48, a_scale="", b_scale="channel", a_dtype=half)),
        Case("fp8 weight only, per channel, 8 tokens", fp8(8, 160, 48, a_scale="", b_scale="channel", a_dtype=torch.bfloat16)),
        Case("fp8 weight only, per tensor, 9 tokens, float16", fp8(9, 160, 48, a_scale="", b_scale="tensor", a_dtype=half)),
        Case("fp8 weight only, per block", fp8(3, 160, 200, a_scale="", b_scale="block", a_dtype=half)),
        Case("fp8 weight only, per block, bfloat16", fp8(3, 160, 200, a_scale="", b_scale="block", a_dtype=torch.bfloat16)),
        Case(
            "fp8 weight only, per channel, 600 tokens",
            fp8(600, 96, 48, a_scale="", b_scale="channel", a_dtype=torch.bfloat16, bias=torch.bfloat16),
        ),
        Case("mxfp4 weight only, 600 tokens", micro(600, 96, 48, a="dense", b="mxfp4")),
        Case("fp8 weight only, per channel, 100 tokens", fp8(100, 96, 48, a_scale="", b_scale="channel", a_dtype=torch.bfloat16)),
        Case("mxfp4 weight only, 100 tokens", micro(100, 96, 48, a="dense", b="mxfp4")),
        Case("mxfp8", micro(5, 96, 40, a="mxfp8", b="mxfp8")),
        Case("mxfp4, bias", micro(5, 96, 40, a="mxfp4", b="mxfp4", bias=torch.bfloat16)),
        Case("mxfp8 with mxfp4", micro(3, 64, 33, a="mxfp8", b="mxfp4", out_dtype=single)),
        Case("mxfp4 weight only", micro(3, 2880, 48, a="dense", b="mxfp4")),
        Case("mxfp8 weight only", micro(3, 64, 48, a="dense", b="mxfp8")),
        Case("fp8 per block of 64", fp8(3, 160, 100, a_scale="block", b_scale="block", block=64)),
        Case("fp8 per block of 32 along k", fp8(3, 72, 20, a_scale="block", b_scale="block1d", block=32)),
        Case("fp8 per block, e8m0", fp8(5, 300, 200, a_scale="block", b_scale="block", scales="e8m0")),
        Case("fp8 per block, packed e8m0", fp8(5, 700, 40, a_scale="block", b_scale="block1d", scales="packed")),
        Case(
            "fp8 weight only per block, packed e8m0", fp8(3, 160, 200, a_scale="", b_scale="block", a_dtype=half, scales="packed")
        ),
        Case("nvfp4, bias", micro(5, 96, 40, a="nvfp4", b="nvfp4", bias=torch.bfloat16)),
        Case("nvfp4 in tiles of 128x4", micro(5, 80, 130, a="nvfp4", b="nvfp4", layout="128x4", out_dtype=single)),
        Case("nvfp4 weight only in tiles of 128x4", micro(3, 144, 40, a="dense", b="nvfp4", layout="128x4")),
        Case("mxfp8 with mxfp4 in tiles of 128x4", micro(35, 96, 20, a="mxfp8", b="mxfp4", layout="128x4")),
        Case("gpt-oss-120b qkv, decode 4", dense(4, 2880, 5120, bias=torch.bfloat16), large=True),
        Case("llama-3-8b qkv, float16, decode 16", dense(16, 4096, 6144, dtype=half), large=True),
        Case("gpt-oss-120b qkv, decode 64", dense(64, 2880, 5120, bias=torch.bfloat16), large=True),
        Case("20 rows of a long k, bias", dense(20, 3080, 2048, bias=torch.bfloat16), large=True),
        Case("20 rows of a long k, float16", dense(20, 3080, 2048, dtype=half), large=True),
        Case("gpt-oss-120b o, prefill 4096", dense(4096, 4096, 2880, bias=torch.bfloat16), large=True),
        Case("gpt-oss-120b lm head, decode 64", dense(64, 2880, 201088), large=True),
        Case("gpt-oss-120b lm head, decode 1", dense(1, 2880, 201088), large=True),
        Case("llama-3-8b lm head, float16, decode 4", dense(4, 4096, 128256, dtype=half), large=True),
        Case(
            "gpt-oss-120b lm head, fp8 weight only, decode 1",
            fp8(1, 2880, 201088, a_scale="", b_scale="channel", a_dtype=torch.bfloat16),
            large=True,
        ),
        Case("llama-70b down, prefill 8192", dense(8192, 28672, 8192), large=True),
        Case("llama-70b gate and up, fp8 per token", fp8(2048, 8192, 57344, a_scale="token", b_scale="channel"), large=True),
        Case("deepseek-v3 down, fp8 per block, prefill 4096", fp8(4096, 2048, 7168, a_scale="block", b_scale="block"), large=True),
        Case("deepseek-v3 up, fp8 per block, decode 128", fp8(128, 7168, 2048, a_scale="block", b_scale="block"), large=True),
        Case("fp8 per token, 8192 x 8192 x 8192", fp8(8192, 8192, 8192, a_scale="token", b_scale="channel"), large=True),
        Case("fp8 per block, 8192 x 8192 x 8192", fp8(8192, 8192, 8192, a_scale="block", b_scale="block"), large=True),
        Case("fp8 per token, decode 64", fp8(64, 7168, 4096, a_scale="token", b_scale="channel"), large=True),
        Case("fp8 per block, decode 64", fp8(64, 7168, 4096, a_scale="block", b_scale="block"), large=True),
        Case(
            "fp8 per token to float32, prefill 4096",
            fp8(4096, 2048, 4096, a_scale="token", b_scale="tensor", out_dtype=single),
            large=True,
        ),
        Case("fp8 per token, 256 tokens", fp8(256, 7168, 2048, a_scale="token", b_scale="channel"), large=True),
        *(
            Case(
                f"fp8, {name}, {m} tokens",
                fp8(m, 7168, n, a_scale="block", b_scale=b_scale, block=block, scales=scales),
                large=True,
            )
            for name, b_scale, block, scales in (
                ("e8m0 scales of blocks", "block", 128, "e8m0"),
                ("scales of columns", "block1d", 128, "float32"),
                ("e8m0 scales of columns", "block1d", 128, "e8m0"),
                ("blocks of 64", "block", 64, "float32"),
            )
            for m, n in ((512, 4096), (1024, 2048))
        ),
        Case("fp8 per token, k of 2048, prefill 4096", fp8(4096, 2048, 7168, a_scale="token", b_scale="channel"), large=True),
        Case("dense to float32, prefill 4096", dense(4096, 2048, 4096, out_dtype=single), large=True),
        Case("mxfp4 weight only, 512 tokens", micro(512, 2880, 5760, a="dense", b="mxfp4"), large=True),
        Case(
            "gpt-oss-120b qkv, fp8 weight only, prefill 1024",
            fp8(1024, 2880, 5120, a_scale="", b_scale="channel", a_dtype=torch.bfloat16, bias=torch.bfloat16),
            large=True,
        ),
        Case(
            "gpt-oss-120b qkv, fp8 weight only, decode 256",
            fp8(256, 2880, 5120, a_scale="", b_scale="channel", a_dtype=torch.bfloat16, bias=torch.bfloat16),
            large=True,
        ),
        Case("gpt-oss-120b o, mxfp4 weight only, prefill 1024", micro(1024, 4096, 2880, a="dense", b="mxfp4"), large=True),
        Case(
            "fp8 weight only per block, prefill 1024", fp8(1024, 2048, 7168, a_scale="", b_scale="block", a_dtype=half), large=True
        ),
        Case("llama-70b o, mxfp8, prefill 4096", micro(4096, 8192, 8192, a="mxfp8", b="mxfp8"), large=True),
        Case("llama-70b o, mxfp4, prefill 4096", micro(4096, 8192, 8192, a="mxfp4", b="mxfp4"), large=True),
        Case(
            "llama-70b o, nvfp4 in tiles, prefill 4096", micro(4096, 8192, 8192, a="nvfp4", b="nvfp4", layout="128x4"), large=True
        ),
        Case("llama-70b o, nvfp4 in tiles, decode 64", micro(64, 8192, 8192, a="nvfp4", b="nvfp4", layout="128x4"), large=True),
        Case("llama-70b o, nvfp4 weight only, decode 16", micro(16, 8192, 8192, a="dense", b="nvfp4"), large=True),
        Case(
            "deepseek-v3 down, fp8 per block, packed e8m0, prefill 4096",
            fp8(4096, 2048, 7168, a_scale="block", b_scale="block1d", scales="packed"),
            large=True,
        ),
        Case("gpt-oss-120b expert, mxfp4 weight only, decode 16", micro(16, 2880, 5760, a="dense", b="mxfp4"), large=True),
    ]


@mm.cost
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha: Tensor | None,
) -> Cost:
    m, k, n = a.shape[0], logical_k(a), b.shape[1]
    written = m * n * (out_dtype or default_out_dtype(a)).itemsize
    return Cost(flops=2.0 * m * n * k, bytes=nbytes(a, b, a_scale, b_scale, bias, alpha) + written)
