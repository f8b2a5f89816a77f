"""Greedy sampling: the token with the largest logit of each row."""

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
    "argmax",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", FLOATS),
    traits={"vocab": at_most(2**31 - 2**15)},
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def argmax(logits: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.argmax`, which documents the arguments."""
    if out is None:
        out = torch.empty(logits.shape[0], dtype=out_dtype, device=logits.device)
    write_best(logits, out)
    return out
