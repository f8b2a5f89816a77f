"""`reduce_scatter` over peer memory. In one launch each rank gets its slice of the sum over all ranks."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.comm._rows import scatter_sum
from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "comm",
    "reduce_scatter",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"protocol": ONE_SHOT},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def reduce_scatter(x: Tensor, group: ProcessGroup, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.reduce_scatter`, which documents the arguments."""
    source = x.contiguous()
    total = out if out is not None and out.is_contiguous() else x.new_empty(x.shape[0] // group.world_size, *x.shape[1:])
    if x.numel():
        scatter_sum(source, group, total)
    return total if out is None or out is total else out.copy_(total)
