"""All-reduce, residual add and RMSNorm fused into one launch over peer memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.comm._exchange import exchange
from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT, TWO_SHOT
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

LONGEST_ROW = 8192
"""The longest row, in elements: a program holds a row in registers."""

SIGNATURES = [format_signature(x=dense_tensor_format(dtype), weight=dense_tensor_format(dtype)) for dtype in FLOATS]


def _all_reduce_rmsnorm(
    protocol: str,
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    # Implements both kernels of `all_reduce_rmsnorm`. ``protocol``: ONE_SHOT or TWO_SHOT.
    source = x.contiguous()
    normed = out if out is not None and out.is_contiguous() else torch.empty_like(source)
    total = None
    if residual is not None:
        total = residual_out if residual_out is not None and residual_out.is_contiguous() else torch.empty_like(source)
    if x.numel():
        added = None if residual is None else residual.contiguous()
        exchange("all_reduce_rmsnorm", protocol, source, group, normed, x.shape[-1], weight.contiguous(), eps, added, total)
    if out is not None and out is not normed:
        normed = out.copy_(normed)
    if total is None:
        return normed
    return normed, total if residual_out is None or residual_out is total else residual_out.copy_(total)


@register_kernel(
    "comm",
    "all_reduce_rmsnorm",
    name="triton_one_shot_all_reduce_rmsnorm",
    solution="triton",
    capability=TRITON,
    signatures=SIGNATURES,
    traits={"protocol": ONE_SHOT, "hidden": at_most(LONGEST_ROW), "residual": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def one_shot_all_reduce_rmsnorm(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.all_reduce_rmsnorm`, which documents the arguments."""
    return _all_reduce_rmsnorm(ONE_SHOT, x, weight, group, eps, residual, out, residual_out)


@register_kernel(
    "comm",
    "all_reduce_rmsnorm",
    name="triton_two_shot_all_reduce_rmsnorm",
    solution="triton",
    capability=TRITON,
    signatures=SIGNATURES,
    traits={"protocol": TWO_SHOT, "hidden": at_most(LONGEST_ROW), "residual": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def two_shot_all_reduce_rmsnorm(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.all_reduce_rmsnorm`, which documents the arguments."""
    return _all_reduce_rmsnorm(TWO_SHOT, x, weight, group, eps, residual, out, residual_out)
