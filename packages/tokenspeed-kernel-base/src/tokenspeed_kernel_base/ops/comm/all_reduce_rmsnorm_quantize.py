"""All-reduce, residual add, RMSNorm and quantisation in one call, before a GEMM that reads a quantised format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case, Draw, recipe
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.comm._inputs import own_values
from tokenspeed_kernel_base.ops.comm.all_reduce_rmsnorm import all_reduce_rmsnorm
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.quantization.composed import Quantised, traits_with_quantize
from tokenspeed_kernel_base.ops.quantization.quantize import draw_quantization, quantize
from tokenspeed_kernel_base.ops.quantization.value import Quantization


@operator(
    "comm",
    "all_reduce_rmsnorm_quantize",
    formats=("x", "weight"),
    traits=traits_with_quantize(all_reduce_rmsnorm),
    outs=("out", "scale_out", "residual_out"),
    in_place={"residual_out": ("x", "residual")},
    varying=("rows",),
    parts=(all_reduce_rmsnorm, quantize),
)
def all_reduce_rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    quantization: Quantization,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Applies `all_reduce_rmsnorm`, then `quantize`: returns the normalised sum over all ranks in the format that ``quantization``
    names.

    The normalised sum is rounded to x's dtype, and then quantised. Ranks must agree as for `all_reduce_rmsnorm`, and get bitwise
    equal results. A given scale must have the same values on all ranks.

    Args:
        x: float16, bfloat16 or float32 ``[..., hidden]``; hidden a multiple of 32 for mxfp8, of 16 for nvfp4.
        weight: any float dtype ``[hidden]``.
        group: the ranks that take part. Made by `ProcessGroup.of`, or by `ProcessGroup.with_peer_memory` for kernels that fuse all
            steps in one launch.
        quantization: the format, its scales and their layout; made by `Quantization.fp8` or another constructor of `Quantization`.
        eps: added to the mean square, > 0.
        residual: x's shape ``[..., hidden]`` and dtype, or float32 if x is float16 or bfloat16. Added to the sum before the
            normalisation.
        out: receives q.
        scale_out: receives the scales; must be None if ``quantization`` has an fp8 scale.
        residual_out: receives the sum with the residual; may be the residual or x. Allowed only with a residual.

    Returns:
        q and scale as `quantize` returns them, or q alone if ``quantization`` has an fp8 scale. With a residual also the sum,
        contiguous, in the residual's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit. Also raised if the group was
            destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, Quantization, all_reduce_rmsnorm_quantize
        >>> x, weight, group = torch.tensor([[3.0, 6.0]]), torch.ones(2), ProcessGroup.of()
        >>> q, scale = all_reduce_rmsnorm_quantize(x, weight, group, Quantization.fp8())
        >>> q.float()
        tensor([[224., 448.]])

    Not safe in CUDA graphs with gloo, which waits for the device. Safe with other backends after a first call outside of a graph.
    """
    normed, *total = lowering.as_list(all_reduce_rmsnorm(x, weight, group, eps, residual=residual, residual_out=residual_out))
    quantised = quantize(normed, quantization, out=out, scale_out=scale_out)
    result: Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] = lowering.from_list(
        [*lowering.as_list(quantised), *total]
    )
    return result


for _hook in Quantised.hooks:
    getattr(all_reduce_rmsnorm_quantize, _hook)(getattr(Quantised(all_reduce_rmsnorm), _hook))


@recipe
def _inputs(
    kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16, residual: bool = True, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments. `draw_quantization` explains ``options``."""

    def make(draw: Draw) -> dict[str, Any]:
        group = ProcessGroup.with_peer_memory()
        return {
            "x": own_values(draw, group, *shape, dtype=dtype),
            "weight": 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype),
            "group": group,
            "quantization": draw_quantization(draw, kind, high=0.02, **options),
            "residual": draw.normal(*shape, dtype=dtype) if residual else None,
        }

    return make


def _case(kind: str, name: str, *shape: int, large: bool = False, world_size: int = 1, **options: Any) -> Case:
    return Case(f"{kind}: {name}", _inputs(kind, *shape, **options), large, world_size=world_size)


@all_reduce_rmsnorm_quantize.cases
def _() -> list[Case]:
    return [
        _case("fp8_with_scale", "one rank, scale []", 3, 40, scale_shape=()),
        _case("mxfp8", "one rank, without residual, scales rounded up", 3, 96, residual=False, scale_rounding="up"),
        _case("nvfp4", "one rank, scales in tiles", 130, 48, scale_layout="128x4"),
        _case("fp8", "one rank, float32, per tensor", 3, 5, 7, dtype=torch.float32, granularity="tensor"),
        _case("fp8", "one rank, without residual, blocks of 128", 3, 300, residual=False, granularity="block"),
        _case("fp8", "one rank, no rows", 0, 64),
        _case("fp8", "2 ranks, per token, float16", 4, 2880, dtype=torch.float16, world_size=2),
        _case("fp8", "2 ranks, blocks of 128, short last block", 3, 200, dtype=torch.float16, granularity="block", world_size=2),
        _case(
            "fp8",
            "2 ranks, e5m2, blocks of 32, float32, without residual",
            5,
            264,
            dtype=torch.float32,
            to=torch.float8_e5m2,
            residual=False,
            granularity="block",
            block_size=32,
            world_size=2,
        ),
        _case("fp8", "2 ranks, odd hidden 65, float16", 3, 65, dtype=torch.float16, world_size=2),
        _case("fp8", "gpt-oss-120b decode 64, 2 ranks", 64, 2880, large=True, world_size=2),
        _case("fp8", "gpt-oss-120b prefill 8192, 2 ranks", 8192, 2880, large=True, world_size=2),
        _case("fp8", "deepseek-v3 prefill 1024, blocks of 128, 2 ranks", 1024, 7168, granularity="block", large=True, world_size=2),
        _case("fp8", "gpt-oss-120b decode 64, 4 ranks", 64, 2880, large=True, world_size=4),
    ]
