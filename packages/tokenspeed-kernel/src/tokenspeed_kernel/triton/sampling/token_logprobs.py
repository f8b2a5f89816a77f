"""Log-probabilities of tokens in one pass over the logits.

The first kernel computes the sum of exponentials of each span and the largest logit of each group. In the second kernel, one
program per row merges the spans' sums. The program also searches for the most probable tokens, in the few groups that can contain
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    FLOATS,
    TRITON,
    cdiv,
    dense,
    launch_options,
    may_overlap,
    next_power_of_2,
    sm_count_of,
)
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# The number of keys into which the group maxima are folded before the threshold search; at least four times top_k. Fewer than
# top_k of these keys exceed the threshold. This bounds the number of groups that a row lists.
_LANES = 256
# Groups per loop step; at least four times the largest top_k.
_CHUNK = 2048
# Warps per program of the first and the second kernel. On an H200, 1024 rows of 128256 bfloat16 logits with 5 top tokens take 113.3
# us with 4 and 4 warps, 122.9 us with 8 and 4, and 130.4 us with 8 and 8.
_SPAN_WARPS, _ROW_WARPS = 4, 4
# Tokens of the listed groups that are sorted per step.
_TILE = 1024
# Tokens per span, and programs per SM/CU below which spans get shorter.
_LONGEST_SPAN, _SHORTEST_SPAN = 8192, 2048
_PROGRAMS = 8
# Tokens per group, unless a row would have more than _MOST_GROUPS groups.
_GROUP, _MOST_GROUPS = 32, 8192


@dataclass(frozen=True)
class Split:
    """The split of each row into spans, and of each span into groups.

    Attributes:
        span: tokens per program; a row's last span may be shorter.
        group: size of a group of neighbouring tokens of a span. A group's maximum decides whether its tokens are read again.
    """

    span: int
    group: int


def split_of(rows: int, vocab: int, programs: int) -> Split:
    """Returns the split for logits ``[rows, vocab]``; its sizes are powers of two. ``programs``: how many programs fill the
    device.
    """
    span = _LONGEST_SPAN
    while span > _SHORTEST_SPAN and rows * cdiv(vocab, span) < programs:
        span //= 2
    return Split(span, min(span, _GROUP * next_power_of_2(cdiv(vocab, _GROUP * _MOST_GROUPS))))


@register_kernel(
    "sampling",
    "token_logprobs",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", FLOATS),
    traits={"vocab": at_most(2**24), "top_k": at_most(256)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    top_k: int,
    temperature: Tensor | None,
    first_token: int,
    normalize: bool,
    token_out: Tensor | None,
    top_out: Tensor | None,
    top_tokens_out: Tensor | None,
    lse_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.token_logprobs`. Takes two launches."""
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
    split = split_of(rows, vocab, _PROGRAMS * sm_count_of(device))
    spans, groups = cdiv(vocab, split.span), cdiv(vocab, split.group)
    temperature = dense(temperature)
    parts = torch.empty(rows, spans, 2, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, spans, split.span // split.group, dtype=torch.int32, device=device) if top_k else None
    lanes = max(_LANES, 4 * next_power_of_2(top_k))
    most_groups = min(groups, top_k * cdiv(groups, lanes))
    scratch = torch.empty(rows, most_groups + top_k, dtype=torch.int32, device=device) if top_k else None
    row = (logits, *logits.stride(), vocab)
    early = may_overlap(device)
    shared = {"SPAN": split.span, "GROUP": split.group, "TOP": top_k > 0, "EARLY": early, **launch_options(early)}
    device_code.logit_parts_kernel[(rows * spans,)](*row, temperature, parts, maxima, spans, num_warps=_SPAN_WARPS, **shared)
    device_code.token_logprobs_kernel[(rows,)](
        *row,
        tokens,
        tokens.stride(0),
        temperature,
        parts,
        maxima,
        scratch,
        most_groups,
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
        spans,
        groups,
        NORMALIZE=normalize,
        SPANS=next_power_of_2(spans),
        LANES=lanes,
        CHUNK=_CHUNK,
        TILE=min(_TILE, max(next_power_of_2(top_k), 2) * split.group),
        K=max(next_power_of_2(top_k), 2),
        num_warps=_ROW_WARPS if top_k else 1,
        **shared,
    )
    return token_out, top_out, top_tokens_out, lse_out
