"""Merges the shards' results of `token_logprobs` to log-probabilities over the whole vocabulary, with one program per row."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, launch_options, may_overlap, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# Entries per warp, and the most warps of a program. Threads of a warp exchange entries without barriers when they sort, and a
# thread holds a few entries. On an H200, 256 rows with the top 64 of 1024 entries take 14.3 us with 128 entries per warp, 21.0 us
# with 256, and 23.8 us with 512.
_ENTRIES_A_WARP, _MOST_WARPS = 128, 8


@register_kernel(
    "sampling",
    "merge_token_logprobs",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("token_logits", "dense", (torch.float32,)),
    # A program sorts all of a row's entries in registers.
    traits={"entries": at_most(4096)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def merge_token_logprobs(
    token_logits: Tensor,
    top_logits: Tensor,
    top_tokens: Tensor,
    lse: Tensor,
    token_out: Tensor | None,
    top_out: Tensor | None,
    top_tokens_out: Tensor | None,
    lse_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.merge_token_logprobs`, which documents the arguments."""
    parts, rows, top_k = top_logits.shape
    device = lse.device
    if token_out is None:
        token_out = torch.empty(rows, dtype=torch.float32, device=device)
    if top_out is None:
        top_out = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    if top_tokens_out is None:
        top_tokens_out = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    if lse_out is None:
        lse_out = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        entries, early = next_power_of_2(max(parts * top_k, 2)), may_overlap(lse.device)
        device_code.merge_token_logprobs_kernel[(rows,)](
            token_logits,
            *token_logits.stride(),
            top_logits,
            *top_logits.stride(),
            top_tokens,
            *top_tokens.stride(),
            lse,
            *lse.stride(),
            token_out,
            token_out.stride(0),
            top_out,
            *top_out.stride(),
            top_tokens_out,
            *top_tokens_out.stride(),
            lse_out,
            lse_out.stride(0),
            parts,
            top_k,
            PARTS=next_power_of_2(parts),
            ENTRIES=entries,
            TOP_K_PADDED=next_power_of_2(max(top_k, 2)),
            EARLY=early,
            num_warps=max(1, min(_MOST_WARPS, entries // _ENTRIES_A_WARP)),
            **launch_options(early),
        )
    return token_out, top_out, top_tokens_out, lse_out
