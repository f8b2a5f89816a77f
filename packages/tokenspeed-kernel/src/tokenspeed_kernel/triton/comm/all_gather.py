"""`all_gather` over peer memory: one launch, without a communication library."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.comm._rows import gather
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "comm",
    "all_gather",
    solution="triton",
    capability=TRITON,
    # A word equal to the sentinel cannot be sent. In these dtypes it holds two negative zeros, and is sent as two positive zeros.
    # In other dtypes the value would change.
    signatures=format_signatures("x", "dense", (torch.float16, torch.bfloat16)),
    traits={"protocol": ONE_SHOT},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def all_gather(x: Tensor, group: ProcessGroup, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.all_gather`, which documents the arguments."""
    source = x.contiguous()
    gathered = out if out is not None and out.is_contiguous() else x.new_empty(group.world_size * x.shape[0], *x.shape[1:])
    if x.numel():
        gather(source, group, gathered)
    return gathered if out is None or out is gathered else out.copy_(gathered)
