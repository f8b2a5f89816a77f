"""The end of a layer's part under tensor parallelism, in front of a product that reads 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.comm._inputs import own_values
from tokenspeed_kernel_base.ops.comm.all_reduce_rmsnorm import all_reduce_rmsnorm
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.quantization.composed import Quantised
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "comm",
    "all_reduce_rmsnorm_quantize_fp8",
    formats=("x", "weight"),
    outs=("out", "scale_out", "residual_out"),
    in_place={"residual_out": ("x", "residual")},
    varying=("rows",),
    composed=True,
)
def all_reduce_rmsnorm_quantize_fp8(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    granularity: str = "token",
    block_size: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`quantize_fp8` of `all_reduce_rmsnorm`: the sum over all ranks, with the residual added, normalised, in 8 bits.

    The normalised sum is rounded to x's dtype first, and that is what is quantised. Ranks must agree as for `all_reduce_rmsnorm`,
    and get the same bits.

    Args:
        x: float16, bfloat16 or float32 ``[..., hidden]``.
        weight: any float dtype ``[hidden]``.
        group: the ranks: `ProcessGroup.of`, or `ProcessGroup.with_peer_memory` for kernels that do all of it in one launch.
        eps: added to the mean square, > 0.
        residual: x's dtype, or float32 beside float16 and bfloat16; like x else. Added to the sum before the normalisation.
        granularity: what shares a scale, as in `quantize_fp8`: ``"tensor"``, ``"token"``, ``"block"`` or ``"block2d"``.
        block_size: elements of a block along an axis, >= 1; without meaning for the first two.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        out: receives the 8-bit floats.
        scale_out: receives the scales.
        residual_out: receives the sum with the residual; may be the residual or x. Only with a residual.

    Returns:
        q and scale as `quantize_fp8` gives them; with a residual, also the sum, like x and contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank calls something else.
        RuntimeError: at the first call, not every rank called in time; or the group was destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, all_reduce_rmsnorm_quantize_fp8
        >>> q, scale = all_reduce_rmsnorm_quantize_fp8(torch.tensor([[3.0, 6.0]]), torch.ones(2), ProcessGroup.of())
        >>> q.float()
        tensor([[224., 448.]])

    Not safe in CUDA graphs on gloo, which waits for the device; elsewhere it is once there was a call outside of a graph.
    """
    normed: Any
    total: Any
    if residual is None:
        normed, total = all_reduce_rmsnorm(x, weight, group, eps), None
    else:
        normed, total = all_reduce_rmsnorm(x, weight, group, eps, residual=residual, residual_out=residual_out)
    q, scale = quantize_fp8(normed, granularity, block_size, dtype, out=out, scale_out=scale_out)
    return (q, scale) if total is None else (q, scale, total)


_hooks = Quantised(all_reduce_rmsnorm, quantize_fp8)
all_reduce_rmsnorm_quantize_fp8.traits(_hooks.traits)
all_reduce_rmsnorm_quantize_fp8.intermediates(_hooks.intermediates)
all_reduce_rmsnorm_quantize_fp8.check(_hooks.check)
all_reduce_rmsnorm_quantize_fp8.fake(_hooks.fake)


@recipe
def _inputs(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    to: torch.dtype = torch.float8_e4m3fn,
    residual: bool = True,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        group = ProcessGroup.with_peer_memory()
        return {
            "x": own_values(draw, group, *shape, dtype=dtype),
            "weight": 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype),
            "group": group,
            "residual": draw.normal(*shape, dtype=dtype) if residual else None,
            "dtype": to,
            **options,
        }

    return make


@all_reduce_rmsnorm_quantize_fp8.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32, per tensor", _inputs(3, 5, 7, dtype=torch.float32, granularity="tensor")),
        Case("one rank, without residual, blocks of 128", _inputs(3, 300, residual=False, granularity="block")),
        Case("one rank, no rows", _inputs(0, 64)),
        Case("2 ranks, per token, float16", _inputs(4, 2880, dtype=torch.float16), world_size=2),
        Case("2 ranks, blocks of 128, short last block", _inputs(3, 200, dtype=torch.float16, granularity="block"), world_size=2),
        Case(
            "2 ranks, e5m2, blocks of 32, float32, without residual",
            _inputs(5, 264, dtype=torch.float32, to=torch.float8_e5m2, residual=False, granularity="block", block_size=32),
            world_size=2,
        ),
        Case("2 ranks, odd hidden 65, float16", _inputs(3, 65, dtype=torch.float16), world_size=2),
        Case("gpt-oss-120b decode 64, 2 ranks", _inputs(64, 2880), large=True, world_size=2),
        Case("gpt-oss-120b prefill 8192, 2 ranks", _inputs(8192, 2880), large=True, world_size=2),
        Case(
            "deepseek-v3 prefill 1024, blocks of 128, 2 ranks", _inputs(1024, 7168, granularity="block"), large=True, world_size=2
        ),
        Case("gpt-oss-120b decode 64, 4 ranks", _inputs(64, 2880), large=True, world_size=4),
    ]


@all_reduce_rmsnorm_quantize_fp8.vary
def _(variation: Variation) -> dict[str, Any]:
    return {"group": ProcessGroup.with_peer_memory()} if variation.want is Want.CAPTURED else {}


@all_reduce_rmsnorm_quantize_fp8.cost
def _(x: Tensor, weight: Tensor, group: ProcessGroup, residual: Tensor | None) -> Cost:
    streams = 1 if residual is None else 3
    return Cost(flops=(5.0 + group.world_size) * x.numel(), bytes=streams * nbytes(x) + x.numel() + nbytes(weight))
