"""mha_prefill by ``aiter.flash_attn_varlen_func``. Not run on hardware."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import deliver, rows_to_write
from tokenspeed_kernel_amd.aiter.package import load

_attend = load("aiter").flash_attn_varlen_func


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mha_prefill`; ``v_head_dim`` is ``head_dim``, and ``logit_cap`` is 0.

    The first call of a configuration takes minutes, because AITER compiles its kernel. Later calls do not synchronise with the
    device.
    """
    written = rows_to_write(out, q, *q.shape[:2], v.shape[2])
    if not q.numel() or cu_seqlens.shape[0] < 2:  # AITER rejects an empty batch
        out = deliver(written, out)
        return (out, q.new_empty(q.shape[:2], dtype=torch.float32)) if return_lse else out
    longest = _longest(q, cu_seqlens_cpu, max_seqlen)
    offsets = cu_seqlens.contiguous()
    with torch.no_grad():  # otherwise AITER also computes the LSE, for a backward pass
        result = _attend(
            q,
            k,
            v,
            offsets,
            offsets,
            longest,
            longest,
            softmax_scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=True,
            # The numbers of visible tokens to the left and to the right of the query's own token, and the number of first tokens
            # that are always visible. The second number stays 0, although AITER without its compiled kernels raises an error for
            # it. With None instead, AITER would ignore a left window of 0.
            window_size=(window_left, 0 if window_left >= 0 else -1, 0),
            return_lse=return_lse,
            out=written,
            sink_ptr=None if sinks is None else sinks.float().contiguous(),
        )
    out = deliver(written, out)
    return (out, result[1].T.contiguous()) if return_lse else out  # AITER returns [heads, tokens]


def _longest(q: Tensor, offsets: Sequence[int] | Tensor | None, bound: int | None) -> int:
    """Returns an upper bound of the longest sequence's length, at least 1, computed without reading device memory. ``offsets`` is
    the call's cu_seqlens_cpu and ``bound`` its max_seqlen; either may be None.
    """
    if bound is None and offsets is not None and not (isinstance(offsets, Tensor) and offsets.device.type != "cpu"):
        values = offsets.tolist() if isinstance(offsets, Tensor) else offsets
        bound = max(end - begin for begin, end in itertools.pairwise(values))
    return max(1, q.shape[0] if bound is None else min(bound, q.shape[0]))
