"""Page table lookup. A program maps a block of one token's positions to slots."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, dense, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

_BLOCK = 1024
_SEQUENCES_AT_ONCE = 256


@register_kernel(
    "kvcache",
    "positions_to_slots",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("positions", "dense", (torch.int32,)),
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def positions_to_slots(
    positions: Tensor, page_table: Tensor, page_size: int, cu_seqlens_q: Tensor | None, out: Tensor | None
) -> Tensor:
    """See `tokenspeed_kernel.positions_to_slots`."""
    (tokens, top_k), (batch, max_pages) = positions.shape, page_table.shape
    slots = torch.empty(tokens, top_k, dtype=torch.int32, device=positions.device) if out is None else out
    if slots.numel():
        device_code.positions_to_slots_kernel[(tokens, cdiv(top_k, _BLOCK))](
            positions,
            page_table,
            dense(cu_seqlens_q),
            slots,
            *positions.stride(),
            *page_table.stride(),
            *slots.stride(),
            batch,
            max(1, tokens // max(batch, 1)),
            max_pages,
            top_k,
            PAGE_SIZE=page_size,
            BLOCK=_BLOCK,
            AT_ONCE=min(_SEQUENCES_AT_ONCE, max(16, next_power_of_2(batch))),
        )
    return slots
