"""Quantisation to the OCP Microscaling formats mxfp8 and mxfp4, and dequantisation.

"OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.2 and 6.3. The specification leaves the treatment of NaN,
infinities and zeros open. `tokenspeed_kernel_base.ops.quantization.encodings` defines this treatment, and the operators' docstrings
state it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.quantization.encodings import (
    BLOCK_MX,
    SOURCE_DTYPES,
    decode_mxfp4,
    decode_mxfp8,
    encode_mxfp4,
    encode_mxfp8,
    in_layout,
)
from tokenspeed_kernel_base.ops.quantization.formats import (
    SOURCE_DTYPE_NAMES,
    block_scales_shape,
    check_scale_layout,
    mxfp4_format,
    mxfp8_format,
)
from tokenspeed_kernel_base.signature import FormatSignature, dtype_name, format_signature

SCALE_ROUNDINGS = ("down", "up")
MXFP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


@operator(
    "quantization",
    "quantize_mxfp8",
    formats=("x",),
    traits={"k": int, "scales_in_tiles": bool, "scales_rounded_up": bool},
    outs=("out", "scale_out"),
    exact=True,
    varying=("rows",),
)
def quantize_mxfp8(
    x: Tensor,
    scale_rounding: str = "down",
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises to mxfp8: e4m3 elements in blocks of 32 that share one e8m0 scale, such that ``x ~= q * 2^(scale - 127)``.

    The exact definition, for each 32 consecutive elements of the last axis with largest magnitude ``amax`` (OCP MX v1.0, section
    6.3)::

        exponent = max(floor(log2(amax)) - 8, -127)      # 8: e4m3's largest power of two is 2^8; amax = 0 gives -127
        scale    = exponent + 127                        # e8m0
        q        = e4m3fn(x / 2^exponent)                # to nearest, ties to even, saturating at 448

    Magnitudes from 448 to 512 times ``2^exponent`` saturate. With ``scale_rounding="up"`` the exponent is the smallest one without
    saturation, ``max(ceil(log2(amax / 448)), -127)``.

    Subnormal numbers are not flushed to zero. A block with a NaN or an infinity gets ``scale = 255``, which is NaN, and q = 0.
    Zeros keep their sign.

    Args:
        x: float16, bfloat16 or float32 ``[..., k]``, k a multiple of 32.
        scale_rounding: ``"down"``, as in the OCP specification, or ``"up"``, see above.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in 128x4 tiles, as `swizzle_scales` writes them; x must then be
            ``[..., m, k]``.
        out: receives q.
        scale_out: receives the scales.

    Returns:
        q: float8_e4m3fn ``[..., k]``; scale: uint8 (e8m0) ``[..., k/32]``, in 128x4 tiles
            ``[..., ceil(m/128), ceil(k/128), 32, 4, 4]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import quantize_mxfp8
        >>> q, scale = quantize_mxfp8(torch.full((1, 32), 3.0))
        >>> q[0, 0].item(), scale.item()  # 384 * 2^(120 - 127)
        (384.0, 120)

    Safe in CUDA graphs.
    """
    q, scale = encode_mxfp8(x, round_up=scale_rounding == "up")
    return q, in_layout(scale, scale_layout)


@operator(
    "quantization",
    "quantize_mxfp4",
    formats=("x",),
    traits={"k": int, "scales_in_tiles": bool},
    outs=("out", "scale_out"),
    exact=True,
    varying=("rows",),
)
def quantize_mxfp4(
    x: Tensor, scale_layout: str = "linear", out: Tensor | None = None, scale_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantises to mxfp4: e2m1 elements in blocks of 32 that share one e8m0 scale, such that ``x ~= q * 2^(scale - 127)``.

    The exact definition, for each 32 consecutive elements of the last axis with largest magnitude ``amax`` (OCP MX v1.0, section
    6.3)::

        exponent = max(floor(log2(amax)) - 2, -127)      # 2: e2m1's largest power of two is 2^2; amax = 0 gives -127
        scale    = exponent + 127                        # e8m0
        q        = e2m1(x / 2^exponent)                  # to nearest, ties to even, saturating at 6

    Subnormal numbers are not flushed to zero. A block with a NaN or an infinity gets ``scale = 255``, which is NaN, and q = 0.
    Zeros, and values that round to zero, keep their sign.

    Args:
        x: float16, bfloat16 or float32 ``[..., k]``, k a multiple of 32.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in 128x4 tiles, as `swizzle_scales` writes them; x must then be
            ``[..., m, k]``.
        out: receives q.
        scale_out: receives the scales.

    Returns:
        q: uint8 ``[..., k/2]``, two e2m1 values in a byte, the lower index in the lower nibble; scale: uint8 (e8m0)
        ``[..., k/32]``, in 128x4 tiles ``[..., ceil(m/128), ceil(k/128), 32, 4, 4]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import dequantize_mxfp4, quantize_mxfp4
        >>> q, scale = quantize_mxfp4(torch.arange(32.0).reshape(1, 32))
        >>> dequantize_mxfp4(q, scale)[0, 16:24]
        tensor([16., 16., 16., 16., 16., 24., 24., 24.], dtype=torch.bfloat16)

    Safe in CUDA graphs.
    """
    q, scale = encode_mxfp4(x)
    return q, in_layout(scale, scale_layout)


def _check_source(check: Checker, x: Tensor, scale_layout: str) -> None:
    check.tensor("x", x, "... k", SOURCE_DTYPES)
    check_scale_layout(check, x, scale_layout)
    check.require(check["k"] % BLOCK_MX == 0, "x", f"of shape [..., k] where k is a multiple of {BLOCK_MX}", x)


def _source_traits(x: Tensor, scale_layout: str) -> dict[str, object]:
    return {"k": x.shape[-1], "scales_in_tiles": scale_layout == "128x4"}


def _packed(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


quantize_mxfp4.traits(_source_traits)
quantize_mxfp4.check(_check_source)


@quantize_mxfp8.traits
def _(x: Tensor, scale_rounding: str, scale_layout: str) -> dict[str, object]:
    return {**_source_traits(x, scale_layout), "scales_rounded_up": scale_rounding == "up"}


@quantize_mxfp8.check
def _(check: Checker, x: Tensor, scale_rounding: str, scale_layout: str) -> None:
    _check_source(check, x, scale_layout)
    check.one_of("scale_rounding", scale_rounding, SCALE_ROUNDINGS)


@quantize_mxfp8.fake
def _(x: Tensor, scale_layout: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(block_scales_shape(x, BLOCK_MX, scale_layout), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


@quantize_mxfp4.fake
def _(x: Tensor, scale_layout: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(block_scales_shape(x, BLOCK_MX, scale_layout), dtype=torch.uint8)
    return x.new_empty(_packed(x), dtype=torch.uint8), scale


@recipe
def _inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        rows = draw.normal(*shape[:-1], 1, scale=3.0).exp()
        return {"x": (draw.normal(*shape) * rows).to(dtype), **options}

    return make


def _extremes(draw: Draw) -> dict[str, Any]:
    filled = draw.normal(8, BLOCK_MX)
    filled[0, 3] = float("nan")
    filled[1, 31] = float("-inf")
    filled[2] = 0.0
    filled[3] = -0.0
    filled[4] *= 1e38
    filled[5] *= 2.0**-120
    filled[6] *= 2.0**-140
    filled[7] = draw.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 4, torch.float32)  # ties of e2m1
    return {"x": filled}


def _quantisation_cases() -> list[Case]:
    return [
        Case("one block, float32", _inputs(32, dtype=torch.float32)),
        Case("gpt-oss-120b decode 8", _inputs(8, 2880)),
        Case("float16, three axes", _inputs(3, 5, 96, dtype=torch.float16)),
        Case("no tokens", _inputs(0, 2880)),
        Case("no columns", _inputs(4, 0)),
        Case("NaN, infinity, zero, huge, subnormal and tied blocks", _extremes),
        Case("scales in tiles, three rows, float16", _inputs(3, 96, dtype=torch.float16, scale_layout="128x4")),
        Case("scales in tiles, two matrices", _inputs(2, 130, 96, scale_layout="128x4")),
        Case("gpt-oss-120b decode 64", _inputs(64, 2880), large=True),
        Case("gpt-oss-120b prefill 16384, scales in tiles", _inputs(16384, 2880, scale_layout="128x4"), large=True),
        Case("gpt-oss-120b prefill 16384", _inputs(16384, 2880), large=True),
        Case("llama-70b weight 28672 x 8192", _inputs(28672, 8192), large=True),
    ]


def _about_the_largest(draw: Draw) -> dict[str, Any]:
    """Draws blocks in ascending order of their largest magnitude. These magnitudes are the values at which a rounded-up scale
    changes, and the neighbouring float32 values.
    """
    edges = 448.0 * 2.0 ** torch.arange(-140.0, 120.0, 7.0)  # the first ones are subnormal in float32
    wanted = torch.stack((edges.nextafter(edges * 0), edges, edges.nextafter(edges * 2))).flatten().to(draw.device)
    rows = draw.uniform(len(wanted), BLOCK_MX, low=-1.0, high=1.0) * wanted.unsqueeze(1)
    rows[:, 5] = -wanted
    return {"x": rows, "scale_rounding": "up"}


@quantize_mxfp8.cases
def _() -> list[Case]:
    return [
        *_quantisation_cases(),
        Case("scales rounded up, gpt-oss-120b decode 8", _inputs(8, 2880, scale_rounding="up")),
        Case("scales rounded up, float16", _inputs(5, 96, dtype=torch.float16, scale_rounding="up")),
        Case("scales rounded up, NaN and others", lambda draw: {**_extremes(draw), "scale_rounding": "up"}),
        Case("scales rounded up, about the largest number", _about_the_largest),
        Case("scales rounded up, gpt-oss-120b prefill 16384", _inputs(16384, 2880, scale_rounding="up"), large=True),
    ]


quantize_mxfp4.cases(_quantisation_cases)


@quantize_mxfp8.cost
def _(x: Tensor) -> Cost:
    return Cost(flops=2.0 * x.numel(), bytes=nbytes(x) + x.numel() + x.numel() // BLOCK_MX)


@quantize_mxfp4.cost
def _(x: Tensor) -> Cost:
    return Cost(flops=2.0 * x.numel(), bytes=nbytes(x) + x.numel() // 2 + x.numel() // BLOCK_MX)


@operator(
    "quantization",
    "dequantize_mxfp8",
    formats={"q": ("mxfp8",)},
    traits={"k": int, "out_dtype": SOURCE_DTYPE_NAMES},
    outs=("out",),
    exact=True,
    varying=("rows",),
    scales=("scale",),
)
def dequantize_mxfp8(q: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """Dequantises mxfp8: ``q * 2^(scale - 127)``, rounded to ``out_dtype`` once; the inverse of `quantize_mxfp8`.

    Results beyond the range of float32 are infinite; a block with scale 255 becomes NaN.

    Args:
        q: float8_e4m3fn or float8_e5m2 ``[..., k]``, k a multiple of 32.
        scale: uint8 (e8m0) ``[..., k/32]``.
        out_dtype: float16, bfloat16 or float32.
        out: receives the result.

    Returns:
        ``out_dtype [..., k]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import dequantize_mxfp8
        >>> q = torch.ones(1, 32).to(torch.float8_e4m3fn)
        >>> dequantize_mxfp8(q, torch.tensor([[130]], dtype=torch.uint8))[0, 0].item()
        8.0

    Safe in CUDA graphs.
    """
    return decode_mxfp8(q, scale, out_dtype)


@operator(
    "quantization",
    "dequantize_mxfp4",
    formats={"q": ("mxfp4",)},
    traits={"k": int, "out_dtype": SOURCE_DTYPE_NAMES},
    outs=("out",),
    exact=True,
    varying=("rows",),
    scales=("scale",),
)
def dequantize_mxfp4(q: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """Dequantises mxfp4: ``q * 2^(scale - 127)``, rounded to ``out_dtype`` once; the inverse of `quantize_mxfp4`.

    Results beyond the range of float32 are infinite; a block with scale 255 becomes NaN.

    Args:
        q: uint8 ``[..., k/2]``, two e2m1 values in a byte, the lower index in the lower nibble; k a multiple of 32.
        scale: uint8 (e8m0) ``[..., k/32]``.
        out_dtype: float16, bfloat16 or float32.
        out: receives the result.

    Returns:
        ``out_dtype [..., k]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import dequantize_mxfp4
        >>> q = torch.full((1, 16), 0xF1, dtype=torch.uint8)
        >>> dequantize_mxfp4(q, torch.tensor([[128]], dtype=torch.uint8))[0, :4]
        tensor([  1., -12.,   1., -12.], dtype=torch.bfloat16)

    Safe in CUDA graphs.
    """
    return decode_mxfp4(q, scale, out_dtype)


@dequantize_mxfp8.formats
def _(q: Tensor) -> FormatSignature:
    return format_signature(q=mxfp8_format(q.dtype))


@dequantize_mxfp4.formats
def _() -> FormatSignature:
    return format_signature(q=mxfp4_format())


@dequantize_mxfp8.traits
def _(q: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {"k": q.shape[-1], "out_dtype": dtype_name(out_dtype)}


@dequantize_mxfp4.traits
def _(q: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {"k": 2 * q.shape[-1], "out_dtype": dtype_name(out_dtype)}


def _check_scale(check: Checker, q: Tensor, scale: Tensor, out_dtype: torch.dtype, block: int) -> None:
    check.require(q.shape[-1] % block == 0, "q", f"of shape [..., n] where n is a multiple of {block}", q)
    check.dtype("scale", scale, torch.uint8)
    shape = [*q.shape[:-1], q.shape[-1] // block]
    check.require(list(scale.shape) == shape, "scale", f"of shape {shape}, one for {BLOCK_MX} elements of q", scale)
    check.one_of("out_dtype", out_dtype, sorted(SOURCE_DTYPES, key=str))


@dequantize_mxfp8.check
def _(check: Checker, q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> None:
    check.tensor("q", q, "... k", MXFP8_DTYPES)
    _check_scale(check, q, scale, out_dtype, BLOCK_MX)


@dequantize_mxfp4.check
def _(check: Checker, q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> None:
    check.tensor("q", q, "... half_k", torch.uint8)
    _check_scale(check, q, scale, out_dtype, BLOCK_MX // 2)


@dequantize_mxfp8.fake
def _(q: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=out_dtype)


@dequantize_mxfp4.fake
def _(q: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty((*q.shape[:-1], 2 * q.shape[-1]), dtype=out_dtype)


@recipe
def _fp8_codes(*shape: int, to: torch.dtype = torch.bfloat16, low: int = 100, high: int = 150) -> Callable[[Draw], dict[str, Any]]:
    """Draws random bytes as q, so that all 256 fp8 bit patterns occur, NaN included."""

    def make(draw: Draw) -> dict[str, Any]:
        q = draw.integers(0, 256, *shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = draw.integers(low, high, *shape[:-1], shape[-1] // BLOCK_MX, dtype=torch.uint8)
        return {"q": q, "scale": scale, "out_dtype": to}

    return make


@recipe
def _fp4_codes(*shape: int, to: torch.dtype = torch.bfloat16, low: int = 100, high: int = 150) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        q = draw.integers(0, 256, *shape[:-1], shape[-1] // 2, dtype=torch.uint8)
        scale = draw.integers(low, high, *shape[:-1], shape[-1] // BLOCK_MX, dtype=torch.uint8)
        return {"q": q, "scale": scale, "out_dtype": to}

    return make


def _dequantisation_cases(codes: Callable[..., Callable[[Draw], dict[str, Any]]]) -> list[Case]:
    return [
        Case("one block to float32", codes(32, to=torch.float32)),
        Case("gpt-oss-120b decode 8", codes(8, 2880)),
        Case("float16, overflowing, three axes", codes(3, 5, 96, to=torch.float16)),
        Case("all scales, NaN too, to float32", codes(64, 320, to=torch.float32, low=0, high=256)),
        Case("no tokens", codes(0, 2880)),
        Case("gpt-oss-120b expert 5760 x 2880", codes(5760, 2880), large=True),
    ]


@dequantize_mxfp8.cases
def _() -> list[Case]:
    return _dequantisation_cases(_fp8_codes)


@dequantize_mxfp4.cases
def _() -> list[Case]:
    return _dequantisation_cases(_fp4_codes)


@dequantize_mxfp8.cost
def _(q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(flops=1.0 * q.numel(), bytes=nbytes(q, scale) + q.numel() * out_dtype.itemsize)


@dequantize_mxfp4.cost
def _(q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(flops=2.0 * q.numel(), bytes=nbytes(q, scale) + 2 * q.numel() * out_dtype.itemsize)
