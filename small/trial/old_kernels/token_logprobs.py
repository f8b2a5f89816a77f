"""Log-probabilities after one reading of the logits: every span gives the sum of its exponentials and the largest logits of its
groups, then a program a row adds up, and looks for the most probable tokens in the few groups that can hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, dense, next_power_of_2
from tokenspeed_kernel.triton.sampling._rows import groups_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# Groups' maxima are merged into so many before the search. Those that remain above its result are as many as top_k, so this also
# bounds what a row may have to list: the tokens of _LANES-th parts of all groups.
_LANES = 2048
_SPAN_WARPS, _ROW_WARPS = 8, 8


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    top_k: int = 0,
    temperature: Tensor | None = None,
    first_token: int = 0,
    normalize: bool = True,
    token_out: Tensor | None = None,
    top_out: Tensor | None = None,
    top_tokens_out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`tokenspeed_kernel.token_logprobs`: two launches."""
    rows, vocab = logits.shape
    device = logits.device
    if token_out is None:
        token_out = torch.empty(rows, dtype=torch.float32, device=device)
    if top_out is None:
        top_out = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    if top_tokens_out is None:
        top_tokens_out = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    if lse_out is None:
        lse_out = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return token_out, top_out, top_tokens_out, lse_out
    groups = groups_of(logits)
    temperature = dense(temperature)
    parts = torch.empty(rows, groups.spans, 2, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, groups.count, dtype=torch.int64, device=device) if top_k else None
    # The groups that may hold the most probable tokens, and these groups' tokens.
    reaching = min(groups.count, top_k * cdiv(groups.count, _LANES))
    capacity = reaching + min(vocab, reaching * groups.size)
    scratch = torch.empty(rows, capacity, dtype=torch.int64, device=device) if top_k else None
    row = (logits, *logits.stride(), vocab)
    cut = {"BLOCK": groups.block, "BLOCKS": groups.blocks, "RUN": groups.run, "TOP": top_k > 0}
    device_code.logit_parts_kernel[(rows * groups.spans,)](
        *row, temperature, parts, maxima, groups.spans, groups.length, num_warps=_SPAN_WARPS, **cut
    )
    device_code.token_logprobs_kernel[(rows,)](
        *row,
        tokens,
        tokens.stride(0),
        temperature,
        parts,
        maxima,
        scratch,
        capacity,
        token_out,
        token_out.stride(0),
        top_out,
        *top_out.stride(),
        top_tokens_out,
        *top_tokens_out.stride(),
        lse_out,
        lse_out.stride(0),
        top_k,
        first_token,
        groups.spans,
        groups.length,
        groups.count,
        reaching,
        NORMALIZE=normalize,
        SPANS=next_power_of_2(groups.spans),
        LANES=_LANES,
        num_warps=_ROW_WARPS if top_k else 1,
        **cut,
    )
    return token_out, top_out, top_tokens_out, lse_out
