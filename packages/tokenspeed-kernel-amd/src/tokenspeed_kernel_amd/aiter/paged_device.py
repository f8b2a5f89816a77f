"""AITER's ``unified_attention``, which implements every operator with a paged cache. Not run on hardware.

``unified_attention`` computes tiles of 64 keys. It masks slots without a token only if a page has more than 64 slots. With smaller
pages, it multiplies the contents of the unused slots of a sequence's last page by 0. So a NaN in such a slot propagates. Therefore
only page sizes 128 and 256 are declared.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd._rows import deliver, rows, rows_to_write
from tokenspeed_kernel_amd.aiter.package import load

_attend = load("aiter.ops.triton.attention.unified_attention").unified_attention


def attend(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_left: int,
    sinks: Tensor | None,
    softmax_scale: float | None,
    out: Tensor | None,
) -> Tensor:
    """Computes causal attention of new tokens to a paged cache that already contains them; see
    `tokenspeed_kernel_amd.mha_extend_with_kvcache`.

    Every sequence must have at least as many tokens in the cache as queries. Caches may have any strides; q, page_table and out are
    copied if their last axis is not contiguous. If pages left of the window were freed (-1), page 0 must hold finite values.
    """
    written = rows_to_write(out, q, *q.shape)
    if not q.numel() or cu_seqlens_q.shape[0] < 2:
        return deliver(written, out)
    _attend(
        rows(q),
        k_cache,
        v_cache,
        written,
        cu_seqlens_q.contiguous(),
        min(max_seqlen_q, q.shape[0]),
        cache_seqlens.contiguous(),
        max_seqlen_k,
        q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=True,
        # AITER reads only the first value: the number of visible tokens to the left of the query's own token.
        window_size=(window_left, 0 if window_left >= 0 else -1),
        # AITER may read pages that have left the window and were freed (-1). So their entries are replaced with page 0.
        block_table=rows(page_table if window_left < 0 else page_table.clamp(min=0)),
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        sinks=None if sinks is None else sinks.contiguous(),
    )
    return deliver(written, out)
