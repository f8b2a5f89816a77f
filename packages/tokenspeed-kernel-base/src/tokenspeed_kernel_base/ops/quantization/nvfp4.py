"""Quantisation to nvfp4 (4-bit floats with e4m3 block scales and a float32 global scale), and dequantisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_NVFP4, SOURCE_DTYPES, decode_nvfp4, encode_nvfp4, in_layout
from tokenspeed_kernel_base.ops.quantization.formats import (
    SOURCE_DTYPE_NAMES,
    block_scales_shape,
    check_scalar,
    check_scale_layout,
    nvfp4_format,
)
from tokenspeed_kernel_base.signature import FormatSignature, dtype_name, format_signature


@operator(
    "quantization",
    "quantize_nvfp4",
    formats=("x",),
    traits={"k": int, "scales_in_tiles": bool},
    outs=("out", "scale_out"),
    exact=True,
    varying=("rows",),
    scales=("global_scale",),
)
def quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor,
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises to nvfp4: e2m1 elements in blocks of 16 that share one e4m3 scale, such that ``x ~= q * scale * global_scale``.

    ``global_scale`` is a factor of the dequantised value. (Some libraries pass its reciprocal.) With ``global_scale = max(|x|) /
    (448 * 6)`` the block scales use their whole range. The exact definition, for each 16 consecutive elements of the last axis with
    largest magnitude ``amax``, with all operations in float32 and correctly rounded::

        scale = e4m3fn((amax / 6) / global_scale)        # to nearest, ties to even, saturating at 448
        step  = float32(scale) * global_scale
        q     = e2m1(x / step)                           # to nearest, ties to even, saturating at 6

    If ``amax / 6`` is 0, scale is 0. If step is 0, q is 0. A block with a NaN or an infinity gets the scale NaN (``0x7f``) and q
    = 0. Other zeros, and values that round to zero, keep their sign.

    Args:
        x: float16, bfloat16 or float32 ``[..., k]``, k a multiple of 16.
        global_scale: float32 ``[]`` or ``[1]``. Should be finite and at least 0; this is not checked. With global_scale 0, which
            ``max(|x|) / (448 * 6)`` gives for a tensor of zeros, everything dequantises to 0.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in 128x4 tiles, as `swizzle_scales` writes them; x must then be
            ``[..., m, k]``.
        out: receives q.
        scale_out: receives the block scales.

    Returns:
        q: uint8 ``[..., k/2]``, two e2m1 values in a byte, the lower index in the lower nibble; scale: float8_e4m3fn
        ``[..., k/16]``, in 128x4 tiles ``[..., ceil(m/128), ceil(k/64), 32, 4, 4]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import dequantize_nvfp4, quantize_nvfp4
        >>> x = torch.arange(16.0).reshape(1, 16)
        >>> global_scale = x.abs().amax() / (448 * 6)
        >>> q, scale = quantize_nvfp4(x, global_scale)
        >>> scale.item(), dequantize_nvfp4(q, scale, global_scale)[0, -4:]
        (448.0, tensor([10., 15., 15., 15.], dtype=torch.bfloat16))

    Safe in CUDA graphs.
    """
    q, scale = encode_nvfp4(x, global_scale)
    return q, in_layout(scale, scale_layout)


@quantize_nvfp4.traits
def _(x: Tensor, scale_layout: str) -> dict[str, object]:
    return {"k": x.shape[-1], "scales_in_tiles": scale_layout == "128x4"}


@quantize_nvfp4.check
def _(check: Checker, x: Tensor, global_scale: Tensor, scale_layout: str) -> None:
    check.tensor("x", x, "... k", SOURCE_DTYPES)
    check_scale_layout(check, x, scale_layout)
    check.require(check["k"] % BLOCK_NVFP4 == 0, "x", f"of shape [..., k] where k is a multiple of {BLOCK_NVFP4}", x)
    check_scalar(check, "global_scale", global_scale)


@quantize_nvfp4.fake
def _(x: Tensor, scale_layout: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(block_scales_shape(x, BLOCK_NVFP4, scale_layout), dtype=torch.float8_e4m3fn)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8), scale


@recipe
def _inputs(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    global_scale: float = 0.01,
    scale_shape: tuple[int, ...] = (1,),
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        rows = draw.normal(*shape[:-1], 1).exp()
        scale = torch.full(scale_shape, global_scale, device=draw.device)
        return {"x": (draw.normal(*shape) * rows).to(dtype), "global_scale": scale, **options}

    return make


def _extremes(draw: Draw) -> dict[str, Any]:
    filled = draw.normal(7, BLOCK_NVFP4)
    filled[0, 3] = float("nan")
    filled[1, 15] = float("-inf")
    filled[2] = 0.0
    filled[3] = -0.0
    filled[4] *= 1e38  # saturates the block scale
    filled[5] *= 1e-6  # its block scale rounds to 0
    filled[6] = draw.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2, torch.float32)  # ties of e2m1
    return {"x": filled, "global_scale": draw.tensor([1.0], torch.float32)}


def _zeros(draw: Draw) -> dict[str, Any]:
    x = draw.tensor([[0.0, -0.0] * BLOCK_NVFP4] * 3, torch.bfloat16)
    return {"x": x, "global_scale": (x.abs().amax() / (448 * 6)).float()}


@quantize_nvfp4.cases
def _() -> list[Case]:
    return [
        Case("one block, float32", _inputs(16, dtype=torch.float32, scale_shape=())),
        Case("gpt-oss-120b decode 8", _inputs(8, 2880)),
        Case("float16, three axes", _inputs(3, 5, 48, dtype=torch.float16)),
        Case("no tokens", _inputs(0, 2880)),
        Case("NaN, infinity, zero, huge, tiny and tied blocks", _extremes),
        Case("all zeros, whose global scale is 0", _zeros),
        Case("global scale so small that block scales saturate", _inputs(4, 64, global_scale=1e-8)),
        Case("scales in tiles, three rows, float16", _inputs(3, 48, dtype=torch.float16, scale_layout="128x4")),
        Case("scales in tiles, two matrices", _inputs(2, 130, 48, scale_layout="128x4")),
        Case("gpt-oss-120b decode 64", _inputs(64, 2880), large=True),
        Case("llama-70b prefill 8192", _inputs(8192, 8192), large=True),
        Case("llama-70b decode 64, scales in tiles", _inputs(64, 8192, scale_layout="128x4"), large=True),
        Case("llama-70b prefill 8192, scales in tiles", _inputs(8192, 8192, scale_layout="128x4"), large=True),
    ]


@quantize_nvfp4.cost
def _(x: Tensor, scale_layout: str) -> Cost:
    scales = math.prod(block_scales_shape(x, BLOCK_NVFP4, scale_layout))
    return Cost(flops=2.0 * x.numel(), bytes=nbytes(x) + x.numel() // 2 + scales)


@operator(
    "quantization",
    "dequantize_nvfp4",
    formats={"q": ("nvfp4",)},
    traits={"k": int, "out_dtype": SOURCE_DTYPE_NAMES},
    outs=("out",),
    exact=True,
    varying=("rows",),
    scales=("scale", "global_scale"),
)
def dequantize_nvfp4(
    q: Tensor, scale: Tensor, global_scale: Tensor, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Dequantises nvfp4: ``q * (scale * global_scale)``, both multiplications in float32, rounded to ``out_dtype``.

    This is the inverse of `quantize_nvfp4`.

    Args:
        q: uint8 ``[..., k/2]``, two e2m1 values in a byte, the lower index in the lower nibble; k a multiple of 16.
        scale: float8_e4m3fn ``[..., k/16]``.
        global_scale: float32 ``[]`` or ``[1]``, a factor of the dequantised value.
        out_dtype: float16, bfloat16 or float32.
        out: receives the result.

    Returns:
        ``out_dtype [..., k]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import dequantize_nvfp4
        >>> q = torch.full((1, 8), 0xF1, dtype=torch.uint8)
        >>> scale = torch.tensor([[4.0]]).to(torch.float8_e4m3fn)
        >>> dequantize_nvfp4(q, scale, torch.tensor(0.5))[0, :4]
        tensor([  1., -12.,   1., -12.], dtype=torch.bfloat16)

    Safe in CUDA graphs.
    """
    return decode_nvfp4(q, scale, global_scale, out_dtype)


@dequantize_nvfp4.formats
def _() -> FormatSignature:
    return format_signature(q=nvfp4_format())


@dequantize_nvfp4.traits
def _(q: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {"k": 2 * q.shape[-1], "out_dtype": dtype_name(out_dtype)}


@dequantize_nvfp4.check
def _(check: Checker, q: Tensor, scale: Tensor, global_scale: Tensor, out_dtype: torch.dtype) -> None:
    check.tensor("q", q, "... half_k", torch.uint8)
    block = BLOCK_NVFP4 // 2
    check.require(check["half_k"] % block == 0, "q", f"of shape [..., n] where n is a multiple of {block}", q)
    check.dtype("scale", scale, torch.float8_e4m3fn)
    shape = [*q.shape[:-1], q.shape[-1] // block]
    check.require(list(scale.shape) == shape, "scale", f"of shape {shape}, one for {BLOCK_NVFP4} elements of q", scale)
    check_scalar(check, "global_scale", global_scale)
    check.one_of("out_dtype", out_dtype, sorted(SOURCE_DTYPES, key=str))


@dequantize_nvfp4.fake
def _(q: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty((*q.shape[:-1], 2 * q.shape[-1]), dtype=out_dtype)


@recipe
def _codes(*shape: int, to: torch.dtype = torch.bfloat16) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "q": draw.integers(0, 256, *shape[:-1], shape[-1] // 2, dtype=torch.uint8),
            "scale": draw.uniform(*shape[:-1], shape[-1] // BLOCK_NVFP4, low=0.0, high=448.0).to(torch.float8_e4m3fn),
            "global_scale": draw.tensor([0.0123], torch.float32),
            "out_dtype": to,
        }

    return make


@dequantize_nvfp4.cases
def _() -> list[Case]:
    return [
        Case("one block to float32", _codes(16, to=torch.float32)),
        Case("gpt-oss-120b decode 8", _codes(8, 2880)),
        Case("float16, three axes", _codes(3, 5, 48, to=torch.float16)),
        Case("no tokens", _codes(0, 2880)),
        Case("llama-70b weight 28672 x 8192", _codes(28672, 8192), large=True),
    ]


@dequantize_nvfp4.cost
def _(q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(flops=2.0 * q.numel(), bytes=nbytes(q, scale) + 2 * q.numel() * out_dtype.itemsize)
