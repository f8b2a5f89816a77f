"""`moe_combine` over peer memory. One launch sends the experts' results back and sums them per token."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.comm._rows import combine
from tokenspeed_kernel.triton.comm.moe_dispatch import LONGEST_ROW
from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most


@register_kernel(
    "comm",
    "moe_combine",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"protocol": ONE_SHOT, "hidden": at_most(LONGEST_ROW)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def moe_combine(x: Tensor, ids: Tensor, group: ProcessGroup, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.moe_combine`, which documents the arguments."""
    total = out if out is not None and out.is_contiguous() else x.new_empty(x.shape[0] // group.world_size, x.shape[1])
    if x.shape[0]:
        combine(x.contiguous(), ids.contiguous(), group, total)
    return total if out is None or out is total else out.copy_(total)
