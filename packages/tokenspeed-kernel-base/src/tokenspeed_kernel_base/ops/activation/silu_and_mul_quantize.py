"""The gated activation of Llama-like feed-forward layers and quantisation of its result, in front of the second product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Draw, recipe
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel_base.ops.quantization.composed import Quantised, draw_given, kinds_of_both
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4


@operator(
    "activation",
    "silu_and_mul_quantize_fp8",
    formats=("x",),
    traits=kinds_of_both(silu_and_mul, quantize_fp8),
    outs=("out", "scale_out"),
    varying=("rows",),
    composed=True,
)
def silu_and_mul_quantize_fp8(
    x: Tensor,
    granularity: str = "token",
    block_size: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8` of `silu_and_mul`: 8-bit floats with scales made from the largest magnitudes.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``: gate, then up.
        granularity: what shares a scale, as in `quantize_fp8`: ``"tensor"``, ``"token"``, ``"block"`` or ``"block2d"``.
        block_size: elements of a block along an axis, >= 1; without meaning for the first two.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        scale_dtype: float32; or for blocks uint8 (e8m0) or int32 (four e8m0 in a number), as in `quantize_fp8`.
        out: receives q; must not overlap x.
        scale_out: receives the scales.

    Returns:
        q and scale as `quantize_fp8` gives them for ``[..., d]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import silu_and_mul_quantize_fp8
        >>> q, scale = silu_and_mul_quantize_fp8(torch.tensor([[0.0, 2.0, 5.0, 3.0]]))
        >>> q.float()
        tensor([[  0., 448.]])

    Safe in CUDA graphs.
    """
    return quantize_fp8(silu_and_mul(x), granularity, block_size, dtype, scale_dtype, out=out, scale_out=scale_out)


@operator(
    "activation",
    "silu_and_mul_quantize_fp8_with_scale",
    formats=("x",),
    traits=kinds_of_both(silu_and_mul, quantize_fp8_with_scale),
    varying=("rows",),
    scales=("scale",),
    composed=True,
)
def silu_and_mul_quantize_fp8_with_scale(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
) -> Tensor:
    """`quantize_fp8_with_scale` of `silu_and_mul`: 8-bit floats with scales that are known beforehand.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``: gate, then up.
        scale: float32; for all of the result ``[]`` or ``[1]``, per token ``[..., 1]``, per channel ``[d]``. Values should be
            positive; that is not checked.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        out: receives q; must not overlap x.

    Returns:
        ``dtype [..., d]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import silu_and_mul_quantize_fp8_with_scale
        >>> silu_and_mul_quantize_fp8_with_scale(torch.tensor([[0.0, 2.0, 5.0, 3.0]]), torch.tensor(0.1)).float()
        tensor([[ 0., 52.]])

    Safe in CUDA graphs.
    """
    return quantize_fp8_with_scale(silu_and_mul(x), scale, dtype, out=out)


@operator(
    "activation",
    "silu_and_mul_quantize_mxfp8",
    formats=("x",),
    traits=kinds_of_both(silu_and_mul, quantize_mxfp8),
    outs=("out", "scale_out"),
    varying=("rows",),
    composed=True,
)
def silu_and_mul_quantize_mxfp8(
    x: Tensor,
    scale_rounding: str = "down",
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_mxfp8` of `silu_and_mul`: e4m3 elements, 32 of which share a power of two.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``, d a multiple of 32: gate, then up.
        scale_rounding: ``"down"``, as the OCP says, or ``"up"``; see `quantize_mxfp8`.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in tiles, as `swizzle_scales` puts them; x has two axes at least then.
        out: receives q; must not overlap x.
        scale_out: receives the scales.

    Returns:
        q: float8_e4m3fn ``[..., d]``; scale: uint8 (e8m0) ``[..., d/32]``, or in tiles, as `quantize_mxfp8` gives them.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import silu_and_mul_quantize_mxfp8
        >>> q, scale = silu_and_mul_quantize_mxfp8(torch.full((1, 64), 7.0))
        >>> q[0, 0].item(), scale.item()  # 384 * 2^(124 - 127)
        (384.0, 124)

    Safe in CUDA graphs.
    """
    return quantize_mxfp8(silu_and_mul(x), scale_rounding, scale_layout, out=out, scale_out=scale_out)


@operator(
    "activation",
    "silu_and_mul_quantize_nvfp4",
    formats=("x",),
    traits=kinds_of_both(silu_and_mul, quantize_nvfp4),
    outs=("out", "scale_out"),
    varying=("rows",),
    scales=("global_scale",),
    composed=True,
)
def silu_and_mul_quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor,
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_nvfp4` of `silu_and_mul`: e2m1 elements, 16 of which share an e4m3 scale.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``, d a multiple of 16: gate, then up.
        global_scale: float32 ``[]`` or ``[1]``, a factor of the decoded value. Should be positive and finite; that is not checked.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in tiles, as `swizzle_scales` puts them; x has two axes at least then.
        out: receives q; must not overlap x.
        scale_out: receives the scales.

    Returns:
        q: uint8 ``[..., d/2]``; scale: float8_e4m3fn ``[..., d/16]``, as `quantize_nvfp4` gives them.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import silu_and_mul_quantize_nvfp4
        >>> q, scale = silu_and_mul_quantize_nvfp4(torch.full((1, 32), 8.0), torch.tensor(0.1))
        >>> q[0, 0].item(), scale.item()  # two codes of 6, and 63.98 / 6 / 0.1
        (119, 104.0)

    Safe in CUDA graphs.
    """
    return quantize_nvfp4(silu_and_mul(x), global_scale, scale_layout, out=out, scale_out=scale_out)


for _function, _hooks in (
    (silu_and_mul_quantize_fp8, Quantised(silu_and_mul, quantize_fp8)),
    (silu_and_mul_quantize_fp8_with_scale, Quantised(silu_and_mul, quantize_fp8_with_scale)),
    (silu_and_mul_quantize_mxfp8, Quantised(silu_and_mul, quantize_mxfp8, BLOCK_MX)),
    (silu_and_mul_quantize_nvfp4, Quantised(silu_and_mul, quantize_nvfp4, BLOCK_NVFP4)),
):
    _function.traits(_hooks.traits)
    _function.intermediates(_hooks.intermediates)
    _function.check(_hooks.check)
    _function.fake(_hooks.fake)
    _function.cost(_hooks.cost)
    if _hooks.coded:
        _function.decoded(_hooks.decoded)


PACKED: dict[str, Any] = {"granularity": "block", "scale_dtype": torch.int32}
TILES: dict[str, Any] = {"scale_layout": "128x4"}


@recipe
def gated_inputs(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    scale_shape: tuple[int, ...] | None = None,
    global_scale: float | None = None,
    to: torch.dtype | None = None,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """``to``: the dtype that is quantised to; ``scale_shape``, ``global_scale``: of scales that are given."""

    def make(draw: Draw) -> dict[str, Any]:
        x = draw.normal(*shape, dtype=dtype, scale=4.0)  # so that a clamp at 7 matters
        return {"x": x, **options, **draw_given(draw, scale_shape, global_scale, to, high=0.05)}

    return make


@silu_and_mul_quantize_fp8.cases
def _() -> list[Case]:
    return [
        Case("per token, float32", gated_inputs(3, 2 * 33, dtype=torch.float32)),
        Case("blocks of 128, short last block", gated_inputs(3, 2 * 300, granularity="block")),
        Case("per tensor, e5m2", gated_inputs(2, 3, 2 * 40, granularity="tensor", dtype=torch.float16, to=torch.float8_e5m2)),
        Case("no rows", gated_inputs(0, 2 * 64)),
        Case("blocks of 32, float16", gated_inputs(5, 2 * 96, dtype=torch.float16, granularity="block", block_size=32)),
        Case("longer rows than are held", gated_inputs(1, 2 * 17000)),
        Case("blocks of 128, e8m0", gated_inputs(3, 2 * 300, granularity="block", scale_dtype=torch.uint8)),
        Case("blocks of 128, packed e8m0", gated_inputs(2, 3, 2 * 1300, **PACKED)),
        Case("tiles of 32 x 32, e8m0", gated_inputs(40, 2 * 80, granularity="block2d", block_size=32, scale_dtype=torch.uint8)),
        Case("deepseek-v3.1 expert, 512 rows, blocks of 128, packed e8m0", gated_inputs(512, 2 * 2048, **PACKED), large=True),
        Case("deepseek-v3.1 prefill 4096, blocks of 128, packed e8m0", gated_inputs(4096, 2 * 18432, **PACKED), large=True),
        Case("qwen3-8b decode 64, per token", gated_inputs(64, 2 * 12288), large=True),
        Case("qwen3-32b decode 64, per token", gated_inputs(64, 2 * 25600), large=True),
        Case("llama-3-8b prefill 8192, per token", gated_inputs(8192, 2 * 14336), large=True),
        Case("llama-3-70b decode 64, one of 8 ranks, per token", gated_inputs(64, 2 * 3584), large=True),
        Case("deepseek-v3 expert, 512 rows, blocks of 128", gated_inputs(512, 2 * 2048, granularity="block"), large=True),
        Case("deepseek-v3 prefill 4096, blocks of 128", gated_inputs(4096, 2 * 18432, granularity="block"), large=True),
    ]


@silu_and_mul_quantize_fp8_with_scale.cases
def _() -> list[Case]:
    return [
        Case("scale [], float32", gated_inputs(3, 2 * 33, dtype=torch.float32, scale_shape=())),
        Case("scale per token", gated_inputs(2, 3, 2 * 40, scale_shape=(2, 3, 1))),
        Case("no rows", gated_inputs(0, 2 * 64, scale_shape=(1,))),
        Case("scale [1], e5m2, float16", gated_inputs(5, 2 * 1100, dtype=torch.float16, scale_shape=(1,), to=torch.float8_e5m2)),
        Case("llama-3-70b decode 64, one of 8 ranks", gated_inputs(64, 2 * 3584, scale_shape=(1,)), large=True),
        Case("llama-3-8b prefill 8192", gated_inputs(8192, 2 * 14336, scale_shape=(1,)), large=True),
    ]


@silu_and_mul_quantize_mxfp8.cases
def _() -> list[Case]:
    return [
        Case("one block, float32", gated_inputs(1, 2 * 32, dtype=torch.float32)),
        Case("scales rounded up", gated_inputs(3, 2 * 96, scale_rounding="up")),
        Case("no rows", gated_inputs(0, 2 * 64)),
        Case("three axes, float16", gated_inputs(2, 3, 2 * 160, dtype=torch.float16)),
        Case("scales in tiles, two matrices", gated_inputs(2, 20, 2 * 32, **TILES)),
        Case("scales in tiles, rounded up, wide", gated_inputs(3, 2 * 1184, scale_rounding="up", **TILES)),
        Case("qwen3-32b decode 64, scales in tiles", gated_inputs(64, 2 * 25600, **TILES), large=True),
        Case("qwen3-32b prefill 8192, scales in tiles", gated_inputs(8192, 2 * 25600, **TILES), large=True),
        Case("qwen3-32b decode 64", gated_inputs(64, 2 * 25600), large=True),
        Case("qwen3-32b prefill 8192", gated_inputs(8192, 2 * 25600), large=True),
    ]


@silu_and_mul_quantize_nvfp4.cases
def _() -> list[Case]:
    return [
        Case("one block, float32", gated_inputs(1, 2 * 16, dtype=torch.float32, global_scale=0.002)),
        Case("three axes, float16", gated_inputs(2, 3, 2 * 160, dtype=torch.float16, global_scale=0.002)),
        Case("no rows", gated_inputs(0, 2 * 64, global_scale=0.002)),
        Case("three rows", gated_inputs(3, 2 * 96, global_scale=0.002)),
        Case("scales in tiles", gated_inputs(130, 2 * 48, global_scale=0.002, **TILES)),
        Case("qwen3-235b expert, 512 rows, scales in tiles", gated_inputs(512, 2 * 1536, global_scale=0.002, **TILES), large=True),
        Case("qwen3-32b prefill 8192, scales in tiles", gated_inputs(8192, 2 * 25600, global_scale=0.002, **TILES), large=True),
        Case("qwen3-235b expert, 512 rows", gated_inputs(512, 2 * 1536, global_scale=0.002), large=True),
        Case("qwen3-32b prefill 8192", gated_inputs(8192, 2 * 25600, global_scale=0.002), large=True),
    ]
