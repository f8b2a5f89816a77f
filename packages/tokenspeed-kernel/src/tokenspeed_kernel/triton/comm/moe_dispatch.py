"""`moe_dispatch` over peer memory. One launch sends tokens to the ranks of their experts, without a communication library."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.comm._rows import dispatch
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.moe_dispatch import row_bytes
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

LONGEST_ROW = 8192
"""The longest row, in elements: a program holds a row in registers."""


@register_kernel(
    "comm",
    "moe_dispatch",
    solution="triton",
    capability=TRITON,
    # A word equal to the sentinel cannot be sent. In these dtypes it holds two negative zeros, and is sent as two positive zeros.
    # In other dtypes the value would change.
    signatures=format_signatures("x", "dense", (torch.float16, torch.bfloat16)),
    traits={"protocol": ONE_SHOT, "hidden": at_most(LONGEST_ROW)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def moe_dispatch(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    group: ProcessGroup,
    out: Tensor | None,
    weights_out: Tensor | None,
    ids_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.moe_dispatch`, which documents the arguments."""
    (tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    rows = group.world_size * tokens
    given = out, weights_out, ids_out
    made = x.new_empty(rows, hidden), x.new_empty(rows, top_k, dtype=torch.float32), x.new_empty(rows, top_k, dtype=torch.int32)
    received, weights, ids = (g if g is not None and g.is_contiguous() else m for g, m in zip(given, made, strict=True))
    if tokens:
        row = row_bytes(hidden, top_k, x.element_size())
        sources = x.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()
        dispatch(*sources, num_experts, group, received, weights, ids, row)
    for provided, written in zip(given, (received, weights, ids), strict=True):
        if provided is not None and provided is not written:
            provided.copy_(written)
    return (
        received if out is None else out,
        weights if weights_out is None else weights_out,
        ids if ids_out is None else ids_out,
    )
