"""Root-mean-square normalisation, with an optional residual add in front of it, and quantisation of its result: what comes in front
of a product that reads narrow numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Draw, recipe
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.ops.quantization.composed import Quantised, draw_given
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4

_IN_PLACE = {"residual_out": ("x", "residual")}


@operator(
    "norm",
    "rmsnorm_quantize_fp8",
    formats=("x",),
    outs=("out", "scale_out", "residual_out"),
    in_place=_IN_PLACE,
    varying=("rows",),
    composed=True,
)
def rmsnorm_quantize_fp8(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    granularity: str = "token",
    block_size: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`quantize_fp8` of `rmsnorm`: 8-bit floats with scales made from the largest magnitudes.

    The normalised row is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., hidden]``.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``.
        eps: added to the mean square, > 0.
        residual: x's dtype, or float32 beside float16 and bfloat16; like x else. Added to it before the normalisation.
        granularity: what shares a scale, as in `quantize_fp8`: ``"tensor"``, ``"token"``, ``"block"`` or ``"block2d"``.
        block_size: elements of a block along an axis, >= 1; without meaning for the first two.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        scale_dtype: float32; or for blocks uint8 (e8m0) or int32 (four e8m0 in a number), as in `quantize_fp8`.
        out: receives q.
        scale_out: receives the scales.
        residual_out: receives the sum; may be the residual or x. Only with a residual.

    Returns:
        q and scale as `quantize_fp8` gives them; with a residual, also the sum, like x and contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import rmsnorm_quantize_fp8
        >>> q, scale = rmsnorm_quantize_fp8(torch.tensor([[3.0, 6.0]]), torch.ones(2))
        >>> q.float()
        tensor([[224., 448.]])

    Safe in CUDA graphs.
    """
    normed: Any
    total: Any
    if residual is None:
        normed, total = rmsnorm(x, weight, eps), None
    else:
        normed, total = rmsnorm(x, weight, eps, residual=residual, residual_out=residual_out)
    q, scale = quantize_fp8(normed, granularity, block_size, dtype, scale_dtype, out=out, scale_out=scale_out)
    return (q, scale) if total is None else (q, scale, total)


@operator(
    "norm",
    "rmsnorm_quantize_fp8_with_scale",
    formats=("x",),
    outs=("out", "residual_out"),
    in_place=_IN_PLACE,
    varying=("rows",),
    scales=("scale",),
    composed=True,
)
def rmsnorm_quantize_fp8_with_scale(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`quantize_fp8_with_scale` of `rmsnorm`: 8-bit floats with scales that are known beforehand.

    The normalised row is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., hidden]``.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``.
        scale: float32; for all of x ``[]`` or ``[1]``, per token ``[..., 1]``, per channel ``[hidden]``. Values should be positive;
            that is not checked.
        eps: added to the mean square, > 0.
        residual: x's dtype, or float32 beside float16 and bfloat16; like x else. Added to it before the normalisation.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        out: receives q.
        residual_out: receives the sum; may be the residual or x. Only with a residual.

    Returns:
        q: ``dtype [..., hidden]``; with a residual, also the sum, like x and contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import rmsnorm_quantize_fp8_with_scale
        >>> rmsnorm_quantize_fp8_with_scale(torch.tensor([[3.0, 3.0]]), torch.ones(2), torch.tensor(0.01)).float()
        tensor([[96., 96.]])

    Safe in CUDA graphs.
    """
    normed: Any
    total: Any
    if residual is None:
        normed, total = rmsnorm(x, weight, eps), None
    else:
        normed, total = rmsnorm(x, weight, eps, residual=residual, residual_out=residual_out)
    q = quantize_fp8_with_scale(normed, scale, dtype, out=out)
    return q if total is None else (q, total)


@operator(
    "norm",
    "rmsnorm_quantize_mxfp8",
    formats=("x",),
    outs=("out", "scale_out", "residual_out"),
    in_place=_IN_PLACE,
    varying=("rows",),
    composed=True,
)
def rmsnorm_quantize_mxfp8(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    scale_rounding: str = "down",
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`quantize_mxfp8` of `rmsnorm`: e4m3 elements, 32 of which share a power of two.

    The normalised row is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., hidden]``, hidden a multiple of 32.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``.
        eps: added to the mean square, > 0.
        residual: x's dtype, or float32 beside float16 and bfloat16; like x else. Added to it before the normalisation.
        scale_rounding: ``"down"``, as the OCP says, or ``"up"``; see `quantize_mxfp8`.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in tiles, as `swizzle_scales` puts them; x has two axes at least then.
        out: receives q.
        scale_out: receives the scales.
        residual_out: receives the sum; may be the residual or x. Only with a residual.

    Returns:
        q: float8_e4m3fn ``[..., hidden]``; scale: uint8 (e8m0) ``[..., hidden/32]``; with a residual, also the sum, like x and
        contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import rmsnorm_quantize_mxfp8
        >>> q, scale = rmsnorm_quantize_mxfp8(torch.full((1, 32), 3.0), torch.full((32,), 1.5))
        >>> q[0, 0].item(), scale.item()  # 384 * 2^(119 - 127)
        (384.0, 119)

    Safe in CUDA graphs.
    """
    normed: Any
    total: Any
    if residual is None:
        normed, total = rmsnorm(x, weight, eps), None
    else:
        normed, total = rmsnorm(x, weight, eps, residual=residual, residual_out=residual_out)
    q, scale = quantize_mxfp8(normed, scale_rounding, scale_layout, out=out, scale_out=scale_out)
    return (q, scale) if total is None else (q, scale, total)


@operator(
    "norm",
    "rmsnorm_quantize_nvfp4",
    formats=("x",),
    outs=("out", "scale_out", "residual_out"),
    in_place=_IN_PLACE,
    varying=("rows",),
    scales=("global_scale",),
    composed=True,
)
def rmsnorm_quantize_nvfp4(
    x: Tensor,
    weight: Tensor,
    global_scale: Tensor,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`quantize_nvfp4` of `rmsnorm`: e2m1 elements, 16 of which share an e4m3 scale.

    The normalised row is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., hidden]``, hidden a multiple of 16.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``.
        global_scale: float32 ``[]`` or ``[1]``, a factor of the decoded value. Should be positive and finite; that is not checked.
        eps: added to the mean square, > 0.
        residual: x's dtype, or float32 beside float16 and bfloat16; like x else. Added to it before the normalisation.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in tiles, as `swizzle_scales` puts them; x has two axes at least then.
        out: receives q.
        scale_out: receives the scales.
        residual_out: receives the sum; may be the residual or x. Only with a residual.

    Returns:
        q: uint8 ``[..., hidden/2]`` and scale: float8_e4m3fn ``[..., hidden/16]`` as `quantize_nvfp4` gives them; with a residual,
        also the sum, like x and contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import dequantize_nvfp4, rmsnorm_quantize_nvfp4
        >>> global_scale = torch.tensor(1 / 448)
        >>> q, scale = rmsnorm_quantize_nvfp4(torch.full((1, 16), 3.0), torch.full((16,), 6.0), global_scale)
        >>> scale.item(), dequantize_nvfp4(q, scale, global_scale)[0, 0].item()
        (448.0, 6.0)

    Safe in CUDA graphs.
    """
    normed: Any
    total: Any
    if residual is None:
        normed, total = rmsnorm(x, weight, eps), None
    else:
        normed, total = rmsnorm(x, weight, eps, residual=residual, residual_out=residual_out)
    q, scale = quantize_nvfp4(normed, global_scale, scale_layout, out=out, scale_out=scale_out)
    return (q, scale) if total is None else (q, scale, total)


for _function, _hooks in (
    (rmsnorm_quantize_fp8, Quantised(rmsnorm, quantize_fp8)),
    (rmsnorm_quantize_fp8_with_scale, Quantised(rmsnorm, quantize_fp8_with_scale)),
    (rmsnorm_quantize_mxfp8, Quantised(rmsnorm, quantize_mxfp8)),
    (rmsnorm_quantize_nvfp4, Quantised(rmsnorm, quantize_nvfp4)),
):
    _function.traits(_hooks.traits)
    _function.intermediates(_hooks.intermediates)
    _function.check(_hooks.check)
    _function.fake(_hooks.fake)
    _function.cost(_hooks.cost)
    if _hooks.coded:
        _function.decoded(_hooks.decoded)


@recipe
def _inputs(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    residual: bool = True,
    residual_dtype: torch.dtype | None = None,
    scale_shape: tuple[int, ...] | None = None,
    global_scale: float | None = None,
    to: torch.dtype | None = None,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """``to``: the dtype that is quantised to; ``scale_shape``, ``global_scale``: of scales that are given."""

    def make(draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(*shape, dtype=dtype),
            "weight": 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype),
            "residual": draw.normal(*shape, dtype=residual_dtype or dtype) if residual else None,
            **options,
            **draw_given(draw, scale_shape, global_scale, to, high=0.02),
        }

    return make


_PACKED: dict[str, Any] = {"granularity": "block", "scale_dtype": torch.int32}
_TILES: dict[str, Any] = {"scale_layout": "128x4"}


@rmsnorm_quantize_fp8.cases
def _() -> list[Case]:
    return [
        Case("per token, float32", _inputs(3, 33, dtype=torch.float32)),
        Case("blocks of 128, short last block, without residual", _inputs(3, 300, residual=False, granularity="block")),
        Case("per tensor, e5m2", _inputs(2, 3, 40, granularity="tensor", dtype=torch.float16, to=torch.float8_e5m2)),
        Case("no rows", _inputs(0, 64)),
        Case("blocks of 32, float16", _inputs(5, 96, dtype=torch.float16, granularity="block", block_size=32)),
        Case(
            "blocks of 128, e8m0, without residual", _inputs(3, 300, residual=False, granularity="block", scale_dtype=torch.uint8)
        ),
        Case("float32 residual, blocks of 128", _inputs(3, 200, residual_dtype=torch.float32, granularity="block")),
        Case("blocks of 32, packed e8m0", _inputs(2, 3, 200, block_size=32, **_PACKED)),
        Case("one block of 128, packed e8m0, e5m2", _inputs(9, 72, to=torch.float8_e5m2, **_PACKED)),
        Case("qwen3-8b decode 64, per token", _inputs(64, 4096), large=True),
        Case("llama-3-70b decode 64, per token", _inputs(64, 8192), large=True),
        Case("llama-3-8b prefill 8192, per token", _inputs(8192, 4096), large=True),
        Case("deepseek-v3 decode 128, blocks of 128", _inputs(128, 7168, granularity="block"), large=True),
        Case("deepseek-v3 prefill 4096, blocks of 128", _inputs(4096, 7168, granularity="block"), large=True),
        Case("deepseek-v3.1 decode 128, blocks of 128, packed e8m0", _inputs(128, 7168, **_PACKED), large=True),
        Case("deepseek-v3.1 prefill 4096, blocks of 128, packed e8m0", _inputs(4096, 7168, **_PACKED), large=True),
    ]


@rmsnorm_quantize_fp8_with_scale.cases
def _() -> list[Case]:
    return [
        Case("scale [], float32", _inputs(3, 33, dtype=torch.float32, scale_shape=())),
        Case("scale [1], without residual", _inputs(2, 3, 200, residual=False, scale_shape=(1,))),
        Case("scale per channel, float16", _inputs(3, 40, dtype=torch.float16, scale_shape=(40,))),
        Case("no rows", _inputs(0, 64, scale_shape=(1,))),
        Case("e5m2, float16", _inputs(5, 96, dtype=torch.float16, scale_shape=(1,), to=torch.float8_e5m2)),
        Case("llama-3-70b decode 64", _inputs(64, 8192, scale_shape=(1,)), large=True),
        Case("llama-3-70b prefill 8192", _inputs(8192, 8192, scale_shape=(1,)), large=True),
    ]


@rmsnorm_quantize_mxfp8.cases
def _() -> list[Case]:
    return [
        Case("one block, float32", _inputs(1, 32, dtype=torch.float32)),
        Case("without residual, scales rounded up", _inputs(3, 96, residual=False, scale_rounding="up")),
        Case("no rows", _inputs(0, 64)),
        Case("three axes, float16", _inputs(2, 3, 160, dtype=torch.float16)),
        Case("scales in tiles", _inputs(130, 96, **_TILES)),
        Case(
            "scales in tiles, two matrices, without residual, rounded up",
            _inputs(2, 3, 160, residual=False, scale_rounding="up", **_TILES),
        ),
        Case("qwen3-32b decode 64, scales in tiles", _inputs(64, 5120, **_TILES), large=True),
        Case("qwen3-32b prefill 8192, scales in tiles", _inputs(8192, 5120, **_TILES), large=True),
        Case("qwen3-32b decode 64", _inputs(64, 5120), large=True),
        Case("qwen3-32b prefill 8192", _inputs(8192, 5120), large=True),
    ]


@rmsnorm_quantize_nvfp4.cases
def _() -> list[Case]:
    return [
        Case("one block, float32", _inputs(1, 16, dtype=torch.float32, global_scale=0.002)),
        Case("without residual", _inputs(3, 96, residual=False, global_scale=0.001)),
        Case("no rows", _inputs(0, 64, global_scale=0.001)),
        Case("three axes, float16", _inputs(2, 3, 160, dtype=torch.float16, global_scale=0.001)),
        Case("scales in tiles, two matrices", _inputs(2, 130, 48, global_scale=0.001, **_TILES)),
        Case("qwen3-235b decode 64, scales in tiles", _inputs(64, 4096, global_scale=0.001, **_TILES), large=True),
        Case("qwen3-235b prefill 8192, scales in tiles", _inputs(8192, 4096, global_scale=0.001, **_TILES), large=True),
        Case("qwen3-235b decode 64", _inputs(64, 4096, global_scale=0.001), large=True),
        Case("qwen3-235b prefill 8192", _inputs(8192, 4096, global_scale=0.001), large=True),
    ]
