"""Merges the shards' results of `argmax_with_value` to one token per row, with one thread per row."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

_BLOCK = 64


@register_kernel(
    "sampling",
    "merge_argmax",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("values", "dense", (torch.float32,)),
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def merge_argmax(values: Tensor, tokens: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.merge_argmax`, which documents the arguments."""
    parts, rows = values.shape
    if out is None:
        out = torch.empty(rows, dtype=out_dtype, device=values.device)
    if rows:
        device_code.merge_argmax_kernel[(cdiv(rows, _BLOCK),)](
            values, *values.stride(), tokens, *tokens.stride(), out, out.stride(0), parts, rows, BLOCK=_BLOCK, num_warps=2
        )
    return out
