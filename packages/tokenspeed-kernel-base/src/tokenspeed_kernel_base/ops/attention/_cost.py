"""Computes the minimal FLOPs and bytes of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Cost, nbytes
from tokenspeed_kernel_base.ops.attention._softmax import MAX_TREE, first_visible, output_dtype


def visible_pairs(q_len: int, kv_len: int, causal: bool, window_left: int) -> int:
    """Returns the number of (query, visible key) pairs in one sequence whose last ``q_len`` tokens are the queries."""
    position = torch.arange(kv_len - q_len, kv_len)
    last = position if causal else torch.full_like(position, kv_len - 1)
    first = (position - window_left).clamp(min=0) if window_left >= 0 else torch.zeros_like(position)
    return int((last - first + 1).clamp(min=0).sum())


def attention_cost(
    q: Tensor,
    v_head_dim: int,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    causal: bool,
    window_left: int,
    return_lse: bool,
    kv_token_bytes: int,
    *others: Tensor | None,
) -> Cost:
    """Returns the cost of attention: q·k and P·v dot products for visible pairs.

    q, the keys and values that some query sees, and the outputs are each moved once.

    Args:
        kv_token_bytes: bytes of one token's keys and values, all heads.
        others: further tensors, each read once.
    """
    tokens, heads, head_dim = q.shape
    pairs = visible = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        pairs += visible_pairs(q_len, kv_len, causal, window_left)
        visible += kv_len - min(first_visible(kv_len - q_len, window_left), kv_len) if q_len else 0
    written = tokens * heads * (v_head_dim * output_dtype(q).itemsize + 4 * return_lse)
    return Cost(
        flops=2.0 * pairs * heads * (head_dim + v_head_dim),
        bytes=float(nbytes(q, *others) + visible * kv_token_bytes + written),
    )


def ragged_cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window_left: int,
    return_lse: bool,
    cu_seqlens_kv: Tensor | None = None,
    causal: bool = True,
) -> Cost:
    """Returns the cost of a prefill, in which queries attend to their own sequence. ``cu_seqlens_kv`` gives the lengths of keys and
    values if they differ from those of the queries.
    """
    q_lens = lengths(cu_seqlens)
    kv_lens = q_lens if cu_seqlens_kv is None else lengths(cu_seqlens_kv)
    kv_token_bytes = (k.shape[1:].numel() + v.shape[1:].numel()) * k.element_size()
    offsets = (cu_seqlens, cu_seqlens_kv)
    return attention_cost(q, v.shape[2], q_lens, kv_lens, causal, window_left, return_lse, kv_token_bytes, *offsets)


def paged_cost(
    q: Tensor,
    v_head_dim: int,
    kv_token_bytes: int,
    q_lens: Sequence[int],
    cache_seqlens: Tensor,
    causal: bool = True,
    window_left: int = -1,
    return_lse: bool = False,
) -> Cost:
    """Returns the cost of attention of new tokens to the cached tokens of their sequences."""
    kv_lens = cache_seqlens.tolist()
    return attention_cost(q, v_head_dim, q_lens, kv_lens, causal, window_left, return_lse, kv_token_bytes, cache_seqlens)


def without_hidden(cost: Cost, tree_mask: Tensor | None, q_lens: Sequence[int], q: Tensor, v_head_dim: int) -> Cost:
    """Subtracts the FLOPs of (query, key) pairs that the masks of draft trees hide, and adds the bytes of the masks."""
    if tree_mask is None or not len(tree_mask):
        return cost
    tree_mask = tree_mask[: sum(q_lens)]  # the rest is padding
    bits = (tree_mask.unsqueeze(1) >> torch.arange(64, device=tree_mask.device)) & 1
    causal = torch.cat([torch.arange(1, q_len + 1) * (q_len <= MAX_TREE) for q_len in q_lens]).to(tree_mask.device)
    hidden = torch.where(tree_mask != 0, (causal - bits.sum(1)).clamp(min=0), 0).sum()
    flops = 2.0 * float(hidden) * q.shape[1] * (q.shape[2] + v_head_dim)
    return Cost(flops=cost.flops - flops, bytes=cost.bytes + nbytes(tree_mask))


def token_bytes(*caches: Tensor | None) -> int:
    """Returns the bytes that one token occupies in caches ``[pages, page_size, ...]``; a cache that is None counts as 0."""
    return sum(cache.shape[2:].numel() * cache.element_size() for cache in caches if cache is not None)


def lengths(offsets: Tensor) -> list[int]:
    """Returns the sequence lengths of a ``cu_seqlens``, as a list in host memory."""
    return offsets.diff().tolist()
