"""Greedy sampling within one shard of a vocabulary: the token with the largest logit, and this logit."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel.triton.sampling._best import write_best
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most


@register_kernel(
    "sampling",
    "argmax_with_value",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", FLOATS),
    traits={"vocab": at_most(2**31 - 2**15)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def argmax_with_value(
    logits: Tensor, first_token: int, values_out: Tensor | None, tokens_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.argmax_with_value`, which documents the arguments."""
    rows = logits.shape[0]
    if values_out is None:
        values_out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if tokens_out is None:
        tokens_out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    write_best(logits, tokens_out, values_out, first_token)
    return values_out, tokens_out
