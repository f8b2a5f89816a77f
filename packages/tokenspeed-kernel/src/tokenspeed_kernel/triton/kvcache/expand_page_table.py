"""Expands a page table to smaller pages. A program writes a block of one sequence's entries of the new table."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

_BLOCK = 1024


@register_kernel(
    "kvcache",
    "expand_page_table",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("page_table", "dense", (torch.int32,)),
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def expand_page_table(page_table: Tensor, factor: int, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.expand_page_table`, which documents the arguments."""
    batch, pages = page_table.shape
    expanded = torch.empty(batch, pages * factor, dtype=torch.int32, device=page_table.device) if out is None else out
    if expanded.numel():
        device_code.expand_page_table_kernel[(batch * cdiv(pages * factor, _BLOCK),)](
            page_table, expanded, *page_table.stride(), *expanded.stride(), pages * factor, FACTOR=factor, BLOCK=_BLOCK
        )
    return expanded
