"""All-reduce, residual add and RMSNorm in one call: the end of an attention or MLP block under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.comm._inputs import own_values
from tokenspeed_kernel_base.ops.comm.all_reduce import all_reduce
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.norm.rmsnorm import RESIDUAL_KINDS, check_residual, residual_traits, rmsnorm
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "comm",
    "all_reduce_rmsnorm",
    formats=("x", "weight"),
    traits={**ProcessGroup.trait_kinds, "protocol": str, "hidden": int, **RESIDUAL_KINDS},
    outs=("out", "residual_out"),
    in_place={"out": ("x", "residual"), "residual_out": ("x", "residual")},
    varying=("rows",),
    parts=(all_reduce, rmsnorm),
)
def all_reduce_rmsnorm(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sums x over all ranks, adds the residual and normalises the result, on every rank: `rmsnorm` of `all_reduce`.

    All ranks of the group must make the same collective calls in the same order, with x of the same shape and dtype, and with the
    same weight, eps and residual. With gloo or peer memory, the ranks compare their calls at the first call of each shape and
    dtype. This comparison waits for other ranks at most ``group.time_limit_s``.

    The sum over ranks is rounded to x's dtype. Its sum with the residual is rounded to the residual's dtype. The rounded sum is
    normalised in float32. All ranks get bitwise equal results. A kernel that uses peer memory waits at most
    ``group.peer_time_limit_s`` seconds for the other ranks. Then its launch fails.

    Args:
        x: float16, bfloat16, float32 or float64 ``[..., hidden]``.
        weight: any float dtype ``[hidden]``.
        group: the ranks that take part. Made by `ProcessGroup.of`, or by `ProcessGroup.with_peer_memory` for kernels that fuse all
            steps in one launch.
        eps: added to the mean square, > 0.
        residual: x's shape ``[..., hidden]`` and dtype, or float32 if x is float16 or bfloat16. Added to the sum before the
            normalisation.
        out: receives the result. May be x. May be the residual unless residual_out is the residual.
        residual_out: receives the sum with the residual. May be the residual. May be x unless out is x. Allowed only with a
            residual.

    Returns:
        The normalised sum, like x and contiguous; with a residual, ``(normalised, sum)``.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit. Also raised if the group was
            destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, all_reduce_rmsnorm
        >>> all_reduce_rmsnorm(torch.tensor([[3.0, 4.0]]), torch.ones(2), ProcessGroup.of(), eps=1e-9)
        tensor([[0.8485, 1.1314]])

    Not safe in CUDA graphs with gloo, which waits for the device. Safe with other backends after a first call outside of a graph.
    Graphs of one group may be replayed in any order that is the same on every rank.
    """
    total = all_reduce(x, group)
    if residual is None:
        return rmsnorm(total, weight, eps, out=out)
    return rmsnorm(total, weight, eps, residual=residual, out=out, residual_out=residual_out)


@all_reduce_rmsnorm.traits
def _(x: Tensor, group: ProcessGroup, residual: Tensor | None) -> dict[str, object]:
    hidden = x.shape[-1]
    return {
        **group.traits,
        "protocol": group.protocol(nbytes(x), hidden * x.element_size()) if x.numel() else "none: there are no rows",
        "hidden": hidden,
        **residual_traits(x, residual),
    }


@all_reduce_rmsnorm.intermediates
def _(x: Tensor) -> tuple[TensorFormat, ...]:
    return (dense_tensor_format(x.dtype),)  # the sum over ranks is rounded to x's dtype


@all_reduce_rmsnorm.check
def _(check: Checker, x: Tensor, weight: Tensor, group: ProcessGroup, eps: float, residual: Tensor | None) -> None:
    check.tensor("x", x, "... hidden", FLOATS)
    check.tensor("weight", weight, "hidden", FLOATS)
    check.require(eps > 0, "eps", "positive", eps)
    check_residual(check, residual, x)
    check.bind("world_size", group.world_size, "group")


@all_reduce_rmsnorm.fake
def _(x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    return normed if residual is None else (normed, torch.empty_like(normed, dtype=residual.dtype))


@recipe
def _inputs(
    *shape: int, dtype: torch.dtype = torch.bfloat16, residual: bool = True, residual_dtype: torch.dtype | None = None
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        group = ProcessGroup.with_peer_memory()
        return {
            "x": own_values(draw, group, *shape, dtype=dtype),
            "weight": 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype),
            "group": group,
            "residual": draw.normal(*shape, dtype=residual_dtype or dtype) if residual else None,
        }

    return make


@all_reduce_rmsnorm.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32", _inputs(3, 5, 7, dtype=torch.float32)),
        Case("one rank, float32 residual", _inputs(3, 96, residual_dtype=torch.float32)),
        Case("one rank, without residual", _inputs(3, 2880, residual=False)),
        Case("one rank, no rows", _inputs(0, 64)),
        Case("2 ranks, odd hidden 65, float16", _inputs(3, 65, dtype=torch.float16), world_size=2),
        Case("gpt-oss-120b decode 4, 2 ranks", _inputs(4, 2880), world_size=2),
        Case("2 ranks, float32, without residual", _inputs(5, 264, dtype=torch.float32, residual=False), world_size=2),
        *(Case(f"gpt-oss-120b decode {m}, 2 ranks", _inputs(m, 2880), large=True, world_size=2) for m in (1, 16, 64)),
        *(Case(f"gpt-oss-120b prefill {m}, 2 ranks", _inputs(m, 2880), large=True, world_size=2) for m in (256, 1024, 8192)),
        *(Case(f"gpt-oss-120b decode {m}, 4 ranks", _inputs(m, 2880), large=True, world_size=4) for m in (1, 64)),
        Case("gpt-oss-120b prefill 8192, 4 ranks", _inputs(8192, 2880), large=True, world_size=4),
    ]


@all_reduce_rmsnorm.vary
def _(variation: Variation) -> dict[str, Any]:
    return {"group": ProcessGroup.with_peer_memory()} if variation.want is Want.CAPTURED else {}


@all_reduce_rmsnorm.cost
def _(x: Tensor, weight: Tensor, group: ProcessGroup, residual: Tensor | None) -> Cost:
    streams = 2 if residual is None else 4
    return Cost(flops=(3.0 + group.world_size) * x.numel(), bytes=streams * nbytes(x) + nbytes(weight))
