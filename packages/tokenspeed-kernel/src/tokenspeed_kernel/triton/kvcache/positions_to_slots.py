"""Page table lookup: maps positions in sequences to cache slots. A program maps a block of one token's positions, or a block of
tokens with one position each.
"""

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
# Tokens per program, one per thread; and sequences per step of the search. The search holds a comparison of each token with each
# sequence of a step in registers.
_TOKENS, _SEQUENCES_A_TOKEN = 128, 32


@register_kernel(
    "kvcache",
    "positions_to_slots",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("positions", "dense", (torch.int32, torch.int64)),
    traits={"one_position": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def positions_to_slots(
    positions: Tensor, page_table: Tensor, page_size: int, cu_seqlens_q: Tensor | None, out: Tensor | None
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.positions_to_slots`, which documents the arguments."""
    tokens, (batch, max_pages) = len(positions), page_table.shape
    slots = torch.empty(positions.shape, dtype=positions.dtype, device=positions.device) if out is None else out
    if not slots.numel():
        return slots
    tensors = (positions, page_table, dense(cu_seqlens_q), slots, *positions.stride(), *page_table.stride(), *slots.stride())
    sequences = (batch, max(1, tokens // max(batch, 1)), max_pages)
    at_once = 16 if cu_seqlens_q is None else max(16, next_power_of_2(batch))  # without cu_seqlens_q, nothing is searched
    if positions.dim() == 1:
        device_code.one_position_kernel[(cdiv(tokens, _TOKENS),)](
            *tensors, *sequences, tokens, PAGE_SIZE=page_size, BLOCK=_TOKENS, AT_ONCE=min(_SEQUENCES_A_TOKEN, at_once)
        )
    else:
        top_k = positions.shape[1]
        device_code.positions_to_slots_kernel[(tokens, cdiv(top_k, _BLOCK))](
            *tensors, *sequences, top_k, PAGE_SIZE=page_size, BLOCK=_BLOCK, AT_ONCE=min(_SEQUENCES_AT_ONCE, at_once)
        )
    return slots
