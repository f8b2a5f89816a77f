"""Quantisation to 8-bit floats with float32 or e8m0 scales, and dequantisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FP8, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.quantization.encodings import (
    FP8_MAX,
    SMALLEST_NORMAL,
    SOURCE_DTYPES,
    decode_fp8,
    divide,
    e8m0_of_fp8,
    e8m0_to_float,
    encode_fp8,
    expand_scale,
    over_e8m0,
    pack_e8m0,
    poison_packed,
    split_blocks,
    unpack_e8m0,
)
from tokenspeed_kernel_base.ops.quantization.formats import (
    E8M0,
    SOURCE_DTYPE_NAMES,
    blocks,
    fp8_format,
    scale_layout,
    scale_layouts,
)
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dtype_name, dtype_names, format_signature
from tokenspeed_kernel_base.variation import Variation, Want

GRANULARITIES = ("tensor", "token", "block", "block2d")
STATIC_GRANULARITIES = ("tensor", "token", "channel")  # for static scales
E8M0_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})  # dtypes that may have e8m0 scales
SCALE_DTYPES = (torch.float32, torch.uint8, torch.int32)


@operator(
    "quantization",
    "quantize_fp8",
    formats=("x",),
    traits={
        "k": int,
        "granularity": GRANULARITIES,
        "dtype": dtype_names(FP8),
        "scales_e8m0": bool,
        "scales_packed": bool,
        "block_size": int,
    },
    outs=("out", "scale_out"),
    exact=True,
    varying=("rows", "m"),
)
def quantize_fp8(
    x: Tensor,
    granularity: str = "token",
    block_size: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises x to an 8-bit float with dynamic scales, computed from x's largest magnitudes, such that ``x ~= q * scale``.

    The exact definition, with all operations in float32 and correctly rounded (a true division, no multiplication by a
    reciprocal)::

        scale = max(amax / largest, 2^-126)   # largest finite value of dtype: 448, 57344 or 240
        q     = dtype(x / scale)              # to nearest, ties to even, saturating

    where ``amax`` is the largest magnitude of a group. The lower bound is float32's smallest normal number: it keeps the scales
    of zeros and of tiny values usable as divisors. In a group with a NaN the scale and all of q are NaN. In a group with an
    infinity the scale is infinite, q is NaN at the infinities and 0 elsewhere. A NaN of q is ``0x7f`` (e4m3fnuz: ``0x80``). A
    group without elements has ``amax = 0``.

    Block scales (``"block"`` and ``"block2d"``) may be powers of two (e8m0, as `mm` reads them), the smallest at which nothing
    saturates::

        exponent = max(ceil(log2(amax / largest)), -127)
        scale    = exponent + 127
        q        = dtype(x / 2^exponent)

    With e8m0 scales, a group with a NaN or an infinity gets ``scale = 255``, which is NaN, and q = 0. A group of zeros gets the
    scale byte 0.

    Args:
        x: float16, bfloat16 or float32 ``[..., k]``.
        granularity: the group that shares a scale. ``"tensor"``: all of x; ``"token"``: a row; ``"block"``: ``block_size``
            consecutive elements of a row; ``"block2d"``: ``block_size`` rows by ``block_size`` columns of the last two axes, as
            for weights. The last block of an axis may be partial.
        block_size: elements of a block along an axis, >= 1; ignored for the other granularities.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        scale_dtype: float32; for block scales of float8_e4m3fn or float8_e5m2 also uint8 (e8m0) or int32. An int32 packs the e8m0
            scales of four consecutive blocks along the last axis, the first in the lowest byte, padded with zeros.
        out: receives q.
        scale_out: receives the scales.

    Returns:
        q: ``dtype [..., k]``; scale: ``scale_dtype [1]``, ``[..., 1]``, ``[..., ceil(k/block_size)]`` or
        ``[..., ceil(m/block_size), ceil(k/block_size)]`` for x ``[..., m, k]``; in int32 the last axis is a quarter as long,
        rounded up.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import quantize_fp8
        >>> q, scale = quantize_fp8(torch.tensor([[896.0, -2.0], [0.0, 112.0]]))
        >>> q.float(), scale
        (tensor([[448.,  -1.],
                [  0., 448.]]), tensor([[2.0000],
                [0.2500]]))

    Safe in CUDA graphs.
    """
    wide = x.float().contiguous()
    block_size = _within(block_size, x.shape)
    block_shape, amax = _block_shape(granularity, block_size), _largest(wide.abs(), granularity, block_size)
    if scale_dtype != torch.float32:
        exponents = e8m0_of_fp8(amax, dtype)
        stored = exponents.to(torch.uint8)
        scaled = over_e8m0(wide, expand_scale(exponents, block_shape, x.shape))
        return encode_fp8(scaled, dtype), pack_e8m0(stored) if scale_dtype == torch.int32 else stored
    scale = divide(amax, FP8_MAX[dtype]).clamp(min=SMALLEST_NORMAL)
    return encode_fp8(wide / expand_scale(scale, block_shape, x.shape), dtype), scale


def _within(block_size: int, shape: Sequence[int]) -> int:
    """Limits block_size to the longest of the last two axes. The groups stay the same, and padding takes less memory."""
    return min(block_size, max(1, *shape[-2:]))


def _block_shape(granularity: str, block_size: int) -> tuple[int, ...]:
    return {"block": (1, block_size), "block2d": (block_size, block_size)}.get(granularity, ())


def _largest(magnitude: Tensor, granularity: str, block_size: int) -> Tensor:
    """Returns the largest magnitude of each group that shares a scale; 0 for an empty group."""
    if not magnitude.numel():
        return magnitude.new_zeros(_scale_shape(tuple(magnitude.shape), granularity, block_size))
    if granularity == "tensor":
        return magnitude.amax().reshape(1)
    if granularity == "token":
        return magnitude.amax(-1, keepdim=True)
    columns = _largest_of_blocks(magnitude, block_size)
    return columns if granularity == "block" else _largest_of_blocks(columns.mT, block_size).mT.contiguous()


def _largest_of_blocks(magnitude: Tensor, block_size: int) -> Tensor:
    return split_blocks(functional.pad(magnitude, (0, -magnitude.shape[-1] % block_size)), block_size).amax(-1)


def _scale_shape(shape: tuple[int, ...], granularity: str, block_size: int) -> tuple[int, ...]:
    *lead, k = shape
    if granularity == "tensor":
        return (1,)
    if granularity == "token":
        return (*lead, 1)
    if granularity == "block":
        return (*lead, blocks(k, block_size))
    return (*lead[:-1], blocks(lead[-1], block_size), blocks(k, block_size))


def quantised_scale_shape(shape: tuple[int, ...], granularity: str, block_size: int, scale_dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the shape of the scales that `quantize_fp8` returns for a tensor of this shape."""
    *lead, columns = _scale_shape(shape, granularity, block_size)
    return (*lead, blocks(columns, 4) if scale_dtype == torch.int32 else columns)


@quantize_fp8.traits
def _(x: Tensor, granularity: str, block_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> dict[str, object]:
    traits: dict[str, object] = {
        "k": x.shape[-1],
        "granularity": granularity,
        "dtype": dtype_name(dtype),
        "scales_e8m0": scale_dtype != torch.float32,
        "scales_packed": scale_dtype == torch.int32,
    }
    if _block_shape(granularity, block_size):
        traits["block_size"] = block_size
    return traits


def check_scaling(check: Checker, granularity: str, block_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Raises ValueError for an invalid combination of these options."""
    check.one_of("granularity", granularity, GRANULARITIES)
    check.require(block_size >= 1, "block_size", "at least 1", block_size)
    check.one_of("dtype", dtype, sorted(FP8, key=str))
    check.one_of("scale_dtype", scale_dtype, SCALE_DTYPES)
    if scale_dtype != torch.float32:
        blocked = bool(_block_shape(granularity, block_size))
        check.require(blocked, "granularity", f"'block' or 'block2d' with scale_dtype={scale_dtype}", granularity)
        check.require(dtype in E8M0_DTYPES, "dtype", f"float8_e4m3fn or float8_e5m2 with scale_dtype={scale_dtype}", dtype)


@quantize_fp8.check
def _(check: Checker, x: Tensor, granularity: str, block_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    check_scaling(check, granularity, block_size, dtype, scale_dtype)
    check.tensor("x", x, "... m k" if granularity == "block2d" else "... k", SOURCE_DTYPES)


@quantize_fp8.fake
def _(x: Tensor, granularity: str, block_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = quantised_scale_shape(tuple(x.shape), granularity, block_size, scale_dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=scale_dtype)


def _uneven(draw: Draw, *shape: int, dtype: torch.dtype) -> Tensor:
    """Draws rows of very different magnitudes, one of them a row of zeros."""
    rows = draw.normal(*shape[:-1], 1, scale=3.0).exp()
    values = draw.normal(*shape) * rows
    if values.numel():
        values.reshape(-1, shape[-1])[0] = 0
    return values.to(dtype)


@recipe
def _inputs(
    *shape: int, dtype: torch.dtype = torch.bfloat16, to: torch.dtype = torch.float8_e4m3fn, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        return {"x": _uneven(draw, *shape, dtype=dtype), "dtype": to, **options}

    return make


def _extremes(draw: Draw, **options: Any) -> dict[str, Any]:
    rows = [
        [float("nan"), 1.0, -2.0, 0.0],
        [float("inf"), 1.0, -2.0, float("-inf")],
        [3.4e38, -3.4e38, 1.0, -0.0],
        [1e-45, -1e-40, 1e-38, 0.0],
        [-0.0, 0.0, -0.0, -0.0],
    ]
    return {"x": draw.tensor(rows, torch.float32), **options}


_PACKED: dict[str, Any] = {"granularity": "block", "scale_dtype": torch.int32}


@quantize_fp8.cases
def _() -> list[Case]:
    return [
        Case("per token, gpt-oss-120b decode 8", _inputs(8, 2880)),
        Case("per tensor, float16", _inputs(5, 96, dtype=torch.float16, granularity="tensor")),
        Case("per tensor of nothing", _inputs(0, 96, granularity="tensor")),
        Case("blocks of 128, short last block", _inputs(3, 4, 300, granularity="block")),
        Case("blocks of 32, float32", _inputs(7, 64, dtype=torch.float32, granularity="block", block_size=32)),
        Case("tiles of 128 x 128, short at both ends", _inputs(2, 200, 130, granularity="block2d")),
        Case("e5m2 per token", _inputs(4, 77, to=torch.float8_e5m2)),
        Case("e4m3fnuz per token", _inputs(4, 77, to=torch.float8_e4m3fnuz)),
        Case("one element", _inputs(1, 1)),
        Case("no tokens", _inputs(0, 2880, granularity="block")),
        Case("NaN, infinities, huge, tiny and zero rows", _extremes),
        Case("blocks of 128, e8m0", _inputs(3, 4, 300, granularity="block", scale_dtype=torch.uint8)),
        Case("blocks of 64, packed e8m0, e5m2", _inputs(9, 448, to=torch.float8_e5m2, block_size=64, **_PACKED)),
        Case("tiles of 32 x 32, e8m0", _inputs(2, 40, 70, granularity="block2d", block_size=32, scale_dtype=torch.uint8)),
        Case("tiles of 16 x 16, packed e8m0", _inputs(2, 20, 90, block_size=16, **{**_PACKED, "granularity": "block2d"})),
        Case("NaN, infinities and others, packed e8m0", lambda draw: _extremes(draw, block_size=2, **_PACKED)),
        Case("no tokens, packed e8m0", _inputs(0, 2880, **_PACKED)),
        Case("deepseek-v3 prefill 4096, blocks of 128", _inputs(4096, 7168, granularity="block"), large=True),
        Case("deepseek-v3.1 prefill 4096, blocks of 128, packed e8m0", _inputs(4096, 7168, **_PACKED), large=True),
        Case("deepseek-v3.1 decode 64, blocks of 128, packed e8m0", _inputs(64, 7168, **_PACKED), large=True),
        Case("llama-70b prefill 8192, per token", _inputs(8192, 8192), large=True),
        Case("llama-70b prefill 8192, per tensor", _inputs(8192, 8192, granularity="tensor"), large=True),
        Case("llama-70b weight 8192 x 8192, tiles of 128 x 128", _inputs(8192, 8192, granularity="block2d"), large=True),
        Case("gpt-oss-120b decode 64, per token", _inputs(64, 2880), large=True),
        Case("gpt-oss-120b decode 64, per tensor", _inputs(64, 2880, granularity="tensor"), large=True),
        Case("deepseek-v3 weight 7168 x 2048, tiles of 128 x 128", _inputs(7168, 2048, granularity="block2d"), large=True),
    ]


@quantize_fp8.cost
def _(x: Tensor, granularity: str, block_size: int, scale_dtype: torch.dtype) -> Cost:
    scales = math.prod(quantised_scale_shape(tuple(x.shape), granularity, block_size, scale_dtype))
    return Cost(flops=2.0 * x.numel(), bytes=nbytes(x) + x.numel() + scale_dtype.itemsize * scales)


@operator(
    "quantization",
    "quantize_fp8_with_scale",
    formats=("x",),
    traits={"k": int, "granularity": STATIC_GRANULARITIES, "dtype": dtype_names(FP8)},
    outs=("out",),
    exact=True,
    varying=("rows",),
    scales=("scale",),
)
def quantize_fp8_with_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, out: Tensor | None = None
) -> Tensor:
    """Quantises x to an 8-bit float with given (static) scales, such that ``x ~= q * scale``.

    ``q = dtype(x / scale)``: a correctly rounded float32 division, then rounding to nearest, ties to even, saturating. A NaN
    quotient (NaN in x or scale, 0/0, inf/inf) gives the NaN ``0x7f`` (e4m3fnuz: ``0x80``), an infinite quotient the largest
    finite value with its sign.

    Args:
        x: float16, bfloat16 or float32 ``[..., k]``.
        scale: float32; per tensor ``[]`` or ``[1]``, per token ``[..., 1]``, per channel ``[k]``. Values should be positive; this
            is not checked.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        out: receives the result.

    Returns:
        ``dtype [..., k]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import quantize_fp8_with_scale
        >>> quantize_fp8_with_scale(torch.tensor([1.0, 2.0, 1e6]), torch.tensor(0.5)).float()
        tensor([  2.,   4., 448.])

    Safe in CUDA graphs.
    """
    return encode_fp8(x.float().contiguous() / scale, dtype)


def _static_layouts(x: Tensor) -> dict[str, list[tuple[int, ...]]]:
    layouts = scale_layouts(x.shape, 1)
    return {name: layouts[name] for name in STATIC_GRANULARITIES}


@quantize_fp8_with_scale.traits
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> dict[str, object]:
    return {"k": x.shape[-1], "granularity": scale_layout(_static_layouts(x), scale.shape), "dtype": dtype_name(dtype)}


@quantize_fp8_with_scale.check
def _(check: Checker, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    check.tensor("x", x, "... k", SOURCE_DTYPES)
    check.dtype("scale", scale, torch.float32)
    _check_scale(check, scale, _static_layouts(x))
    check.one_of("dtype", dtype, sorted(FP8, key=str))


def _check_scale(check: Checker, scale: Tensor, layouts: dict[str, list[tuple[int, ...]]]) -> str:
    layout = scale_layout(layouts, scale.shape)
    if layout is None:
        shapes = [f"{list(shape)} ({name})" for name, shapes in layouts.items() for shape in shapes]
        check.fail("scale", "of shape " + " or ".join(shapes), scale)
    return layout


@quantize_fp8_with_scale.fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@recipe
def _static_inputs(
    *shape: int, scale_shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        return {"x": draw.normal(*shape, dtype=dtype, scale=4.0), "scale": draw.uniform(*scale_shape, low=0.005, high=0.1)}

    return make


def _static_extremes(draw: Draw) -> dict[str, Any]:
    row = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45, 464.0, -464.1]
    return {"x": draw.tensor([row] * 3, torch.float32), "scale": draw.tensor([[1.0], [0.0], [float("inf")]], torch.float32)}


@quantize_fp8_with_scale.cases
def _() -> list[Case]:
    return [
        Case("kv cache scale []", _static_inputs(9, 8, 64, scale_shape=())),
        Case("scale [1], float16", _static_inputs(9, 2880, scale_shape=(1,), dtype=torch.float16)),
        Case("scale per token", _static_inputs(2, 5, 96, scale_shape=(2, 5, 1))),
        Case("scale per channel, float32", _static_inputs(6, 77, scale_shape=(77,), dtype=torch.float32)),
        Case("no tokens", _static_inputs(0, 77, scale_shape=(1,))),
        Case("NaN, infinities, zero scales", _static_extremes),
        Case("llama-70b prefill 8192", _static_inputs(8192, 8192, scale_shape=(1,)), large=True),
        Case("gpt-oss-120b decode 64", _static_inputs(64, 2880, scale_shape=(1,)), large=True),
    ]


@quantize_fp8_with_scale.cost
def _(x: Tensor, scale: Tensor) -> Cost:
    return Cost(flops=1.0 * x.numel(), bytes=nbytes(x, scale) + x.numel())


@operator(
    "quantization",
    "dequantize_fp8",
    formats={"q": ("fp8",)},
    traits={"k": int, "out_dtype": SOURCE_DTYPE_NAMES},
    outs=("out",),
    exact=True,
    varying=("rows",),
    scales=("scale",),
)
def dequantize_fp8(
    q: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16, block_size: int = 128, out: Tensor | None = None
) -> Tensor:
    """Dequantises an 8-bit float: ``q * scale`` in float32, rounded to ``out_dtype``.

    This is the inverse of `quantize_fp8` and `quantize_fp8_with_scale`.

    Args:
        q: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz ``[..., k]``.
        scale: float32. Its shape selects the first match of: per tensor ``[]`` or ``[1]``; per token ``[..., 1]``; per block
            ``[..., ceil(k/block_size)]``; per channel ``[k]``; per 2-D block ``[..., ceil(m/block_size), ceil(k/block_size)]``
            for q ``[..., m, k]``. Scales of blocks and 2-D blocks of float8_e4m3fn and float8_e5m2 may be e8m0 (uint8 or
            float8_e8m0fnu), or four e8m0 packed in an int32, as `quantize_fp8` returns them.
        out_dtype: float16, bfloat16 or float32.
        block_size: elements of a block along an axis, >= 1.
        out: receives the result.

    Returns:
        ``out_dtype [..., k]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import dequantize_fp8
        >>> q = torch.tensor([[1.0, -448.0]]).to(torch.float8_e4m3fn)
        >>> dequantize_fp8(q, torch.tensor([[0.5]]))
        tensor([[   0.5000, -224.0000]], dtype=torch.bfloat16)

    Safe in CUDA graphs.
    """
    layout = scale_layout(scale_layouts(q.shape, block_size, scale.dtype), scale.shape) or ""
    return decode_fp8(
        q.contiguous(), _as_float(q, scale, block_size), _block_shape(layout, _within(block_size, q.shape)), out_dtype
    )


def _as_float(q: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """Returns the scales in float32, one for each group of elements that share a scale."""
    if scale.dtype == torch.float32:
        return scale
    exponents = scale.view(torch.uint8) if scale.dtype in E8M0 else unpack_e8m0(scale, blocks(q.shape[-1], block_size))
    return e8m0_to_float(exponents)


def decode_quantised(q: Tensor, scale: Tensor, granularity: str, block_size: int) -> tuple[Tensor, TensorFormat]:
    """Dequantises a result of `quantize_fp8` with block scales to float32; also returns its format."""
    stored = torch.uint8 if scale.dtype in E8M0 else scale.dtype
    values = decode_fp8(q, _as_float(q, scale, block_size), _block_shape(granularity, block_size), torch.float32)
    return values, fp8_format(q.dtype, "block", _block_shape(granularity, block_size), stored)


@dequantize_fp8.formats
def _(q: Tensor, scale: Tensor, block_size: int) -> FormatSignature:
    layout = scale_layout(scale_layouts(q.shape, block_size, scale.dtype), scale.shape) or ""
    block_shape = _block_shape(layout, block_size) or None
    stored = torch.uint8 if scale.dtype in E8M0 else scale.dtype
    return format_signature(q=fp8_format(q.dtype, "block" if block_shape else layout, block_shape, stored))


@dequantize_fp8.traits
def _(q: Tensor, out_dtype: torch.dtype) -> dict[str, object]:
    return {"k": q.shape[-1], "out_dtype": dtype_name(out_dtype)}


@dequantize_fp8.check
def _(check: Checker, q: Tensor, scale: Tensor, out_dtype: torch.dtype, block_size: int) -> None:
    check.tensor("q", q, "... k", FP8)
    check.require(block_size >= 1, "block_size", "at least 1", block_size)
    check.dtype("scale", scale, {torch.float32} | ((E8M0 | {torch.int32}) if q.dtype in E8M0_DTYPES else set()))
    _check_scale(check, scale, scale_layouts(q.shape, block_size, scale.dtype))
    check.one_of("out_dtype", out_dtype, sorted(SOURCE_DTYPES, key=str))


@dequantize_fp8.vary
def _(variation: Variation, q: Tensor, scale: Tensor, block_size: int) -> dict[str, Any]:
    if scale.dtype != torch.int32:
        return {}
    if variation.want is Want.CAPTURED:
        *lead, packed = scale.shape
        return {"scale": pack_e8m0(variation.draw.integers(118, 124, *lead, 4 * packed, dtype=torch.uint8))}
    return {"scale": poison_packed(scale, blocks(q.shape[-1], block_size))} if variation.want is Want.UNUSED else {}


@dequantize_fp8.fake
def _(q: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=out_dtype)


@recipe
def _encoded(
    *shape: int, scale_shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        scale = draw.uniform(*scale_shape, low=0.005, high=0.1)
        return {"q": encode_fp8(draw.normal(*shape, scale=100.0), dtype), "scale": scale, **options}

    return make


@recipe
def _powers(
    *shape: int,
    columns: int,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.int32,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments with e8m0 scales for blocks of 32: a byte for each scale, or four scales packed in an int32."""

    def make(draw: Draw) -> dict[str, Any]:
        each = 1 if scale_dtype == torch.uint8 else 4
        exponents = draw.integers(118, 124, *shape[:-1], each * columns, dtype=torch.uint8)
        scale = exponents if each == 1 else pack_e8m0(exponents)
        return {"q": encode_fp8(draw.normal(*shape, scale=100.0), dtype), "scale": scale, "block_size": 32, **options}

    return make


def _all_codes(draw: Draw) -> dict[str, Any]:
    codes = torch.arange(256, dtype=torch.uint8, device=draw.device).view(torch.float8_e4m3fn)
    return {"q": codes, "scale": draw.tensor([0.1], torch.float32), "out_dtype": torch.float32}


@dequantize_fp8.cases
def _() -> list[Case]:
    return [
        Case("scale []", _encoded(3, 64, scale_shape=())),
        Case("scale [1], all 256 codes", _all_codes),
        Case("per token to float16", _encoded(2, 5, 96, scale_shape=(2, 5, 1), out_dtype=torch.float16)),
        Case("per channel", _encoded(6, 77, scale_shape=(77,))),
        Case("blocks of 128, short last block", _encoded(3, 300, scale_shape=(3, 3))),
        Case("tiles of 128 x 128, short at both ends", _encoded(2, 200, 130, scale_shape=(2, 2, 2), out_dtype=torch.float32)),
        Case("e5m2", _encoded(6, 77, scale_shape=(6, 1), dtype=torch.float8_e5m2)),
        Case("e4m3fnuz, blocks of 16", _encoded(6, 64, scale_shape=(6, 4), dtype=torch.float8_e4m3fnuz, block_size=16)),
        Case("no tokens", _encoded(0, 77, scale_shape=(0, 1))),
        Case("blocks of 32, e8m0, to float32", _powers(5, 72, columns=3, scale_dtype=torch.uint8, out_dtype=torch.float32)),
        Case("blocks of 32, packed e8m0, e5m2", _powers(3, 2, 200, columns=2, dtype=torch.float8_e5m2)),
        Case("deepseek-v3 weight 7168 x 2048, tiles of 128 x 128", _encoded(7168, 2048, scale_shape=(56, 16)), large=True),
    ]


@dequantize_fp8.cost
def _(q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(flops=1.0 * q.numel(), bytes=nbytes(q, scale) + q.numel() * out_dtype.itemsize)
