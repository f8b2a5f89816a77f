"""Merges two partial attention outputs, computed over different keys, by their LSEs."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


# Elements per program. With 16-bit outputs, a thread makes two 16-byte accesses per tensor. _ELEMENTS_ODD applies to widths that do
# not allow 16-byte accesses, where each element has its own address.
_ELEMENTS = 2048
_ELEMENTS_ODD = 512


@register_kernel(
    "attention",
    "attn_merge_state",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("out_a", "out_b"), "dense", FLOATS),
    traits={"v_head_dim": at_most(4096)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def attn_merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.attn_merge_state`, which documents the arguments."""
    if out is None:
        out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    if lse is None:
        lse = torch.empty(lse_a.shape, dtype=torch.float32, device=lse_a.device)
    tokens, heads, width = out_a.shape
    rows = tokens * heads
    if rows:
        block_w = next_power_of_2(max(1, width))
        at_once = max(1, (_ELEMENTS_ODD if width % 8 else _ELEMENTS) // block_w)
        device_code.merge_kernel[(cdiv(rows, at_once),)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            *out_a.stride(),
            *lse_a.stride(),
            *out_b.stride(),
            *lse_b.stride(),
            *out.stride(),
            *lse.stride(),
            rows,
            heads,
            WIDTH=width,
            ROWS=at_once,
            BLOCK_W=block_w,
            num_warps=4,
        )
    return out, lse
