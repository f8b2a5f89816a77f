"""The gated activation of GPT-OSS and quantisation of its result, in front of the second product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.activation.silu_and_mul_quantize import PACKED, TILES, gated_inputs
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
from tokenspeed_kernel_base.ops.quantization.composed import Quantised, kinds_of_both
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4


@operator(
    "activation",
    "swiglu_quantize_fp8",
    formats=("x",),
    traits=kinds_of_both(swiglu, quantize_fp8),
    outs=("out", "scale_out"),
    varying=("rows",),
    composed=True,
)
def swiglu_quantize_fp8(
    x: Tensor,
    alpha: float = 1.702,
    limit: float | None = None,
    beta: float = 1.0,
    interleaved: bool = False,
    granularity: str = "token",
    block_size: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8` of `swiglu`: 8-bit floats with scales made from the largest magnitudes.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``: gate and up, see ``interleaved``.
        alpha: slope of the sigmoid, finite.
        limit: bound of the clamp, > 0; None clamps nothing.
        beta: added to the clamped up, finite.
        interleaved: how gate and up share the last axis: in halves, or gate at the even indices and up at the odd ones.
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
        >>> from tokenspeed_kernel import swiglu_quantize_fp8
        >>> q, scale = swiglu_quantize_fp8(torch.tensor([[0.0, 2.0, 5.0, 3.0]]))
        >>> q.float()
        tensor([[  0., 448.]])

    Safe in CUDA graphs.
    """
    activated = swiglu(x, alpha, limit, beta, interleaved)
    return quantize_fp8(activated, granularity, block_size, dtype, scale_dtype, out=out, scale_out=scale_out)


@operator(
    "activation",
    "swiglu_quantize_fp8_with_scale",
    formats=("x",),
    traits=kinds_of_both(swiglu, quantize_fp8_with_scale),
    varying=("rows",),
    scales=("scale",),
    composed=True,
)
def swiglu_quantize_fp8_with_scale(
    x: Tensor,
    scale: Tensor,
    alpha: float = 1.702,
    limit: float | None = None,
    beta: float = 1.0,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
) -> Tensor:
    """`quantize_fp8_with_scale` of `swiglu`: 8-bit floats with scales that are known beforehand.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``: gate and up, see ``interleaved``.
        scale: float32; for all of the result ``[]`` or ``[1]``, per token ``[..., 1]``, per channel ``[d]``. Values should be
            positive; that is not checked.
        alpha: slope of the sigmoid, finite.
        limit: bound of the clamp, > 0; None clamps nothing.
        beta: added to the clamped up, finite.
        interleaved: how gate and up share the last axis: in halves, or gate at the even indices and up at the odd ones.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        out: receives q; must not overlap x.

    Returns:
        ``dtype [..., d]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import swiglu_quantize_fp8_with_scale
        >>> swiglu_quantize_fp8_with_scale(torch.tensor([[0.0, 2.0, 5.0, 3.0]]), torch.tensor(0.1)).float()
        tensor([[ 0., 80.]])

    Safe in CUDA graphs.
    """
    return quantize_fp8_with_scale(swiglu(x, alpha, limit, beta, interleaved), scale, dtype, out=out)


@operator(
    "activation",
    "swiglu_quantize_mxfp8",
    formats=("x",),
    traits=kinds_of_both(swiglu, quantize_mxfp8),
    outs=("out", "scale_out"),
    varying=("rows",),
    composed=True,
)
def swiglu_quantize_mxfp8(
    x: Tensor,
    alpha: float = 1.702,
    limit: float | None = None,
    beta: float = 1.0,
    interleaved: bool = False,
    scale_rounding: str = "down",
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_mxfp8` of `swiglu`: e4m3 elements, 32 of which share a power of two.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``, d a multiple of 32: gate and up, see ``interleaved``.
        alpha: slope of the sigmoid, finite.
        limit: bound of the clamp, > 0; None clamps nothing.
        beta: added to the clamped up, finite.
        interleaved: how gate and up share the last axis: in halves, or gate at the even indices and up at the odd ones.
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
        >>> from tokenspeed_kernel import swiglu_quantize_mxfp8
        >>> q, scale = swiglu_quantize_mxfp8(torch.full((1, 64), 8.0))
        >>> q[0, 0].item(), scale.item()  # 288 * 2^(125 - 127)
        (288.0, 125)

    Safe in CUDA graphs.
    """
    return quantize_mxfp8(swiglu(x, alpha, limit, beta, interleaved), scale_rounding, scale_layout, out=out, scale_out=scale_out)


@operator(
    "activation",
    "swiglu_quantize_nvfp4",
    formats=("x",),
    traits=kinds_of_both(swiglu, quantize_nvfp4),
    outs=("out", "scale_out"),
    varying=("rows",),
    scales=("global_scale",),
    composed=True,
)
def swiglu_quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor,
    alpha: float = 1.702,
    limit: float | None = None,
    beta: float = 1.0,
    interleaved: bool = False,
    scale_layout: str = "linear",
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_nvfp4` of `swiglu`: e2m1 elements, 16 of which share an e4m3 scale.

    The activation's result is rounded to x's dtype first, and that is what is quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``, d a multiple of 16: gate and up, see ``interleaved``.
        global_scale: float32 ``[]`` or ``[1]``, a factor of the decoded value. Should be positive and finite; that is not checked.
        alpha: slope of the sigmoid, finite.
        limit: bound of the clamp, > 0; None clamps nothing.
        beta: added to the clamped up, finite.
        interleaved: how gate and up share the last axis: in halves, or gate at the even indices and up at the odd ones.
        scale_layout: ``"linear"``, or ``"128x4"`` for scales in tiles, as `swizzle_scales` puts them; x has two axes at least then.
        out: receives q; must not overlap x.
        scale_out: receives the scales.

    Returns:
        q: uint8 ``[..., d/2]``; scale: float8_e4m3fn ``[..., d/16]``, as `quantize_nvfp4` gives them.

    Raises:
        TypeError, ValueError: an argument is not as stated above; nothing has been launched then.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import swiglu_quantize_nvfp4
        >>> q, scale = swiglu_quantize_nvfp4(torch.full((1, 32), 8.0), torch.tensor(0.1))
        >>> q[0, 0].item(), scale.item()  # two codes of 6, and 72 / 6 / 0.1
        (119, 120.0)

    Safe in CUDA graphs.
    """
    return quantize_nvfp4(swiglu(x, alpha, limit, beta, interleaved), global_scale, scale_layout, out=out, scale_out=scale_out)


for _function, _hooks in (
    (swiglu_quantize_fp8, Quantised(swiglu, quantize_fp8)),
    (swiglu_quantize_fp8_with_scale, Quantised(swiglu, quantize_fp8_with_scale)),
    (swiglu_quantize_mxfp8, Quantised(swiglu, quantize_mxfp8, BLOCK_MX)),
    (swiglu_quantize_nvfp4, Quantised(swiglu, quantize_nvfp4, BLOCK_NVFP4)),
):
    _function.traits(_hooks.traits)
    _function.intermediates(_hooks.intermediates)
    _function.check(_hooks.check)
    _function.fake(_hooks.fake)
    _function.cost(_hooks.cost)
    if _hooks.coded:
        _function.decoded(_hooks.decoded)


# As in GPT-OSS.
_GPT_OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "beta": 1.0, "interleaved": True}


@swiglu_quantize_fp8.cases
def _() -> list[Case]:
    return [
        Case("per token, float32", gated_inputs(3, 2 * 33, dtype=torch.float32, limit=7.0)),
        Case("gpt-oss, narrow, blocks of 128", gated_inputs(3, 2 * 180, granularity="block", **_GPT_OSS)),
        Case("no rows", gated_inputs(0, 2 * 64)),
        Case("gpt-oss, narrow, blocks of 32, packed e8m0", gated_inputs(5, 2 * 180, block_size=32, **PACKED, **_GPT_OSS)),
        Case("interleaved, longer rows than are held", gated_inputs(1, 2 * 17000, interleaved=True)),
        Case("gpt-oss-120b decode 64, top-4, per token", gated_inputs(64 * 4, 2 * 2880, **_GPT_OSS), large=True),
        Case("gpt-oss-120b prefill 4096, top-4, per token", gated_inputs(4096 * 4, 2 * 2880, **_GPT_OSS), large=True),
    ]


@swiglu_quantize_fp8_with_scale.cases
def _() -> list[Case]:
    return [
        Case("scale [], float32", gated_inputs(3, 2 * 33, dtype=torch.float32, limit=7.0, scale_shape=())),
        Case("gpt-oss, narrow, scale [1]", gated_inputs(3, 2 * 180, scale_shape=(1,), **_GPT_OSS)),
        Case("no rows", gated_inputs(0, 2 * 64, scale_shape=(1,))),
        Case("gpt-oss-120b decode 64, top-4", gated_inputs(64 * 4, 2 * 2880, scale_shape=(1,), **_GPT_OSS), large=True),
    ]


@swiglu_quantize_mxfp8.cases
def _() -> list[Case]:
    return [
        Case("one block, float32", gated_inputs(1, 2 * 32, dtype=torch.float32, limit=7.0)),
        Case("gpt-oss, narrow", gated_inputs(3, 2 * 160, **_GPT_OSS)),
        Case("scales in tiles", gated_inputs(130, 2 * 96, scale_layout="128x4", **_GPT_OSS)),
        Case("gpt-oss-120b decode 64, top-4, scales in tiles", gated_inputs(256, 2 * 2880, **TILES, **_GPT_OSS), large=True),
        Case("gpt-oss-120b prefill 4096, top-4, scales in tiles", gated_inputs(16384, 2 * 2880, **TILES, **_GPT_OSS), large=True),
        Case("no rows", gated_inputs(0, 2 * 64)),
        Case("gpt-oss-120b decode 64, top-4", gated_inputs(64 * 4, 2 * 2880, **_GPT_OSS), large=True),
        Case("gpt-oss-120b prefill 4096, top-4", gated_inputs(4096 * 4, 2 * 2880, **_GPT_OSS), large=True),
    ]


@swiglu_quantize_nvfp4.cases
def _() -> list[Case]:
    return [
        Case("one block, float32", gated_inputs(1, 2 * 16, dtype=torch.float32, limit=7.0, global_scale=0.002)),
        Case("gpt-oss, narrow", gated_inputs(3, 2 * 160, global_scale=0.002, **_GPT_OSS)),
        Case("two matrices, scales in tiles", gated_inputs(2, 20, 2 * 80, global_scale=0.002, **TILES, **_GPT_OSS)),
        Case("no rows", gated_inputs(0, 2 * 64, global_scale=0.002)),
        Case("gpt-oss-120b decode 64, top-4", gated_inputs(64 * 4, 2 * 2880, global_scale=0.002, **_GPT_OSS), large=True),
        Case(
            "gpt-oss-120b decode 64, top-4, scales in tiles",
            gated_inputs(64 * 4, 2 * 2880, global_scale=0.002, **TILES, **_GPT_OSS),
            large=True,
        ),
    ]
