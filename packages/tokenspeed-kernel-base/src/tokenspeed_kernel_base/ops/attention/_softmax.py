"""The masked softmax that the bodies of all attention operators share.

A sequence's tokens have positions 0, 1, 2, ... The queries are its last tokens: query i of ``q_len`` is at position
``kv_len - q_len + i`` of ``kv_len``. A query at position p sees the key at position j where

* ``j <= p``, if attention is causal, and
* ``j >= p - window_left``, if ``window_left`` is not negative.

A query that is a node of a draft tree has a mask of the new tokens that it sees, and a position given by its depth, see
`tree_visible`.

Scores are ``q . k * scale``; with a cap c they become ``c * tanh(score / c)``. The softmax runs over the visible scores. A head's
sink is one more score, whose value vector is zero. Arithmetic is float32 (float64 for a float64 q), and the output is rounded once.
Queries are processed in blocks, which bounds the memory of the scores. Each block reads only the keys that it can see.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.ops.kvcache.latent_groups import whole_tokens

MAX_TREE = 64
"""The largest number of nodes of a draft tree: one for each bit of a node's int64 mask."""

# Number of queries in a block. Blocks limit the memory of scores, and skip keys that none of their queries sees.
_QUERIES_AT_ONCE = 128


class Softmax(NamedTuple):
    """Options of the softmax, which turns scores into probabilities.

    Attributes:
        scale: multiplies the dot products q·k.
        causal: whether later keys are hidden.
        window_left: number of earlier keys that a query sees besides its own; -1 for all.
        logit_cap: the cap c of the scores, see above; 0 for no cap.
        sinks: ``[heads]``, one more score for each head, or None.
    """

    scale: float
    causal: bool = True
    window_left: int = -1
    logit_cap: float = 0.0
    sinks: Tensor | None = None


def softmax_scale_of(softmax_scale: float | None, head_dim: int) -> float:
    """Returns ``softmax_scale``, or ``1 / sqrt(head_dim)`` if it is None."""
    return head_dim**-0.5 if softmax_scale is None else softmax_scale


def output_dtype(q: Tensor) -> torch.dtype:
    """Returns the dtype of the output: q's, but bfloat16 where q is fp8."""
    return torch.bfloat16 if q.dtype in FP8 else q.dtype


def first_visible(position: int, window_left: int) -> int:
    """Returns the first position visible to a query at ``position`` or to any later query."""
    return max(position - window_left, 0) if window_left >= 0 else 0


def hidden_pages(cache_seqlens: Tensor, new_tokens: Tensor | int, window_left: int, max_pages: int, page_size: int) -> Tensor:
    """Returns which page table entries are hidden from all new tokens by the sliding window: bool ``[batch, max_pages]``.

    Such pages cover only positions before the window of the sequence's oldest new token."""
    ends = torch.arange(1, max_pages + 1, device=cache_seqlens.device) * page_size
    if window_left < 0:
        return torch.zeros(len(cache_seqlens), max_pages, dtype=torch.bool, device=cache_seqlens.device)
    return ends <= (cache_seqlens - new_tokens - window_left).unsqueeze(1)


def _wide(q: Tensor) -> torch.dtype:
    """Returns the dtype of the arithmetic for these queries."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _widen(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Converts a ``[..., heads, dim]`` tensor to ``dtype`` and multiplies it by its scale, which is per tensor or per head."""
    return x.to(dtype) if scale is None else x.to(dtype) * scale.reshape(-1, 1)


def _by_query_head(q_scale: Tensor | None, heads: int) -> Tensor | None:
    """Repeats the scale of each KV head for the query heads of its group. A single scale for all heads is returned unchanged."""
    return q_scale if q_scale is None or q_scale.numel() == 1 else q_scale.repeat_interleave(heads // q_scale.numel())


def tree_visible(tree_mask: Tensor, kv_len: int, window_left: int, first_query: int, first_key: int) -> Tensor:
    """Returns the mask of keys that each query of a sequence sees, bool ``[q_len, kv_len]``. Queries may be nodes of a draft tree.

    Args:
        tree_mask: int64 ``[q_len]``. Bit i of a node's mask means that the node sees new token i. A node also sees all tokens
            before the new ones. The position of a node is the position of the first new token, plus the number of bits set in its
            mask, minus one. A query with mask 0 is not a node: it sees itself and earlier tokens.
    """
    device, q_len = tree_mask.device, len(tree_mask)
    own = torch.arange(q_len, device=device).unsqueeze(1)
    bits = (tree_mask.unsqueeze(1) >> torch.arange(64, device=device)) & 1
    is_node = (tree_mask != 0).unsqueeze(1)
    position = first_query + torch.where(is_node, bits.sum(1, keepdim=True) - 1, own)
    key = first_key + torch.arange(kv_len, device=device)
    new = key - first_query
    shown = bits.gather(1, new.clamp(0, 63).expand(q_len, -1)).bool() & (new < 64)
    visible = torch.where(is_node & (new >= 0), shown, key <= position)
    return visible & (key >= position - window_left) if window_left >= 0 else visible


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    first_query: int,
    first_key: int = 0,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of one sequence.

    Args:
        q: ``[q_len, heads, head_dim]``; its first token is at position ``first_query``, which may be negative.
        k, v: ``[kv_len, kv_heads, head_dim]`` and ``[kv_len, kv_heads, v_head_dim]``, the first token at position ``first_key``.
            q, k and v already have the dtype of the arithmetic.
        tree_mask: int64 ``[q_len]``, see `tree_visible`; None where no query is a node.

    Returns:
        The output ``[q_len, heads, v_head_dim]`` and the log-sum-exp ``[q_len, heads]``, unrounded.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[0], q.shape[1])
    if tree_mask is not None:
        shown = tree_visible(tree_mask, k.shape[0], softmax.window_left, first_query, first_key)
        return _attend_block(q, k, v, softmax, shown)
    for begin in range(0, q.shape[0], _QUERIES_AT_ONCE):
        rows = slice(begin, min(begin + _QUERIES_AT_ONCE, q.shape[0]))
        oldest, newest = first_query + rows.start, first_query + rows.stop - 1
        low = max(first_visible(oldest, softmax.window_left) - first_key, 0)
        high = max(newest + 1 - first_key, low) if softmax.causal else k.shape[0]
        # A single query needs no mask, because ``k`` is restricted to its visible keys.
        count, ahead = rows.stop - rows.start, oldest - (first_key + low)
        visible = _visible(count, high - low, softmax, ahead, q.device) if count > 1 else None
        out[rows], lse[rows] = _attend_block(q[rows], k[low:high], v[low:high], softmax, visible)
    return out, lse


def _attend_block(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes the attention of a block of queries. ``visible``: which keys each query sees, ``[q_len, kv_len]``; None if all keys
    are visible.
    """
    (q_len, heads, head_dim), (kv_len, kv_heads, _) = q.shape, k.shape
    # One GEMM for the queries of all heads of a GQA group: [kv_heads, group * q_len, head_dim].
    together = heads // kv_heads * q_len
    grouped = q.transpose(0, 1).reshape(kv_heads, together, head_dim)
    scores = torch.matmul(grouped, k.permute(1, 2, 0)).view(heads, q_len, kv_len) * softmax.scale
    if softmax.logit_cap > 0:
        scores = torch.tanh(scores / softmax.logit_cap) * softmax.logit_cap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    sink = q.new_full((heads, 1), -torch.inf) if softmax.sinks is None else softmax.sinks.to(q.dtype).view(heads, 1)
    row_max = torch.maximum(sink, scores.amax(-1)) if kv_len else sink.expand(heads, q_len)
    shift = torch.where(row_max == -torch.inf, 0.0, row_max)  # a row without visible keys gets exp(...) = 0, not NaN
    weights = torch.exp(scores - shift.unsqueeze(-1))
    row_sum = weights.sum(-1) + torch.exp(sink - shift)
    weighted = torch.matmul(weights.view(kv_heads, together, kv_len), v.transpose(0, 1)).view(heads, q_len, v.shape[2])
    out = weighted / torch.where(row_sum == 0, 1.0, row_sum).unsqueeze(-1)
    return out.transpose(0, 1), (shift + torch.log(row_sum)).transpose(0, 1)


def _visible(q_len: int, kv_len: int, softmax: Softmax, ahead: int, device: torch.device) -> Tensor:
    """Returns which of ``kv_len`` keys each query sees, ``[q_len, kv_len]``; the first query is ``ahead`` positions after the first
    key."""
    distance = torch.arange(q_len, device=device).unsqueeze(1) + ahead - torch.arange(kv_len, device=device)
    visible = distance >= 0 if softmax.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible & (distance <= softmax.window_left) if softmax.window_left >= 0 else visible


def attend_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Sequence[int],
    softmax: Softmax,
    kv_offsets: Sequence[int] | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of packed sequences, each to its own keys. The queries are the last tokens of their sequences.

    Args:
        offsets: ``cu_seqlens`` on the host.
        kv_offsets: ``cu_seqlens_kv`` on the host; None if the sequences have as many keys as queries.
    """
    q_scale = _by_query_head(q_scale, q.shape[1])
    out, lse = _outputs_without_keys(q, v.shape[2])
    wide = _wide(q)
    for (begin, end), (first, last) in zip(itertools.pairwise(offsets), itertools.pairwise(kv_offsets or offsets), strict=True):
        rows, keys = slice(begin, end), slice(first, last)
        k_wide, v_wide = _widen(k[keys], wide, k_scale), _widen(v[keys], wide, v_scale)
        first_query = (last - first) - (end - begin)
        out[rows], lse[rows] = attend(_widen(q[rows], wide, q_scale), k_wide, v_wide, softmax, first_query)
    return out, lse


def attend_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    offsets: Sequence[int],
    kv_lens: Sequence[int],
    softmax: Softmax,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of the last tokens of sequences to the whole sequences, which are in a paged cache.

    Args:
        q: ``[tokens, heads, head_dim]``; sequence b has rows ``offsets[b]`` to ``offsets[b + 1]``.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_dim]``.
        page_table: ``[batch, max_pages]``.
        kv_lens: number of tokens of each sequence in the cache. The queries are the last of these tokens.
        tree_mask: int64 ``[tokens]``, see `tree_visible`; ignored for sequences with more than 64 new tokens.
    """
    q_scale = _by_query_head(q_scale, q.shape[1])
    out, lse = _outputs_without_keys(q, v_cache.shape[3])
    wide = _wide(q)
    for pages, (begin, end), kv_len in zip(page_table, itertools.pairwise(offsets), kv_lens, strict=True):
        rows = slice(begin, end)
        first_query = kv_len - (end - begin)
        first_key = first_visible(first_query, softmax.window_left)
        k = _widen(_gather(k_cache, pages, first_key, kv_len), wide, k_scale)
        v = _widen(_gather(v_cache, pages, first_key, kv_len), wide, v_scale)
        masks = tree_mask[rows] if tree_mask is not None and end - begin <= MAX_TREE else None
        out[rows], lse[rows] = attend(_widen(q[rows], wide, q_scale), k, v, softmax, first_query, first_key, masks)
    return out, lse


def attend_latent(
    q: Tensor,
    kv_cache: Tensor,
    kv_lora_rank: int,
    page_table: Tensor,
    offsets: Sequence[int],
    kv_lens: Sequence[int],
    softmax: Softmax,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    tree_mask: Tensor | None = None,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Calls `attend_paged` for query heads that share one KV head. Its key is the cached latent followed by the cached rotary part;
    its value is the latent alone.
    """
    if kv_scale_cache is not None and rope_cache is not None:
        kv_cache = whole_tokens(kv_cache, kv_scale_cache, rope_cache)
    k_cache = kv_cache.unsqueeze(2)
    v_cache = k_cache[..., :kv_lora_rank]
    return attend_paged(q, k_cache, v_cache, page_table, offsets, kv_lens, softmax, q_scale, kv_scale, kv_scale, tree_mask)


def attend_chosen(
    q: Tensor,
    kv_cache: Tensor,
    kv_lora_rank: int,
    indices: Tensor,
    topk_length: Tensor | None,
    scale: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of every token to the cached latents whose slots are in the token's row of ``indices``.

    Args:
        q: ``[tokens, heads, width]``.
        kv_cache: ``[pages, page_size, width]``; with rope_cache it holds the latents alone.
        indices: int32 ``[tokens, top_k]``, slots of the cache; negative indices are ignored.
        topk_length: int32 ``[tokens]``, the number of leading indices of each token that are used; None for all.
        kv_scale_cache, rope_cache: see `latent_groups`.
    """
    out, lse = _outputs_without_keys(q, kv_lora_rank)
    wide = _wide(q)
    softmax = Softmax(scale)
    counted = torch.arange(indices.shape[1], device=q.device)
    for token, slots in enumerate(indices):
        chosen = slots >= 0 if topk_length is None else (slots >= 0) & (counted < topk_length[token])
        slots = torch.where(chosen, slots, 0).long()
        at = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
        found = kv_cache[at]
        if kv_scale_cache is not None and rope_cache is not None:
            found = whole_tokens(found, kv_scale_cache[at], rope_cache[at])
        keys = _widen(found.unsqueeze(1), wide, kv_scale).masked_fill(~chosen.view(-1, 1, 1), 0.0)  # masked-out slots may hold NaN
        query = slice(token, token + 1)
        values = keys[..., :kv_lora_rank]
        out[query], lse[query] = _attend_block(_widen(q[query], wide, q_scale), keys, values, softmax, chosen.unsqueeze(0))
    return out, lse


def _gather(cache: Tensor, pages: Tensor, begin: int, end: int) -> Tensor:
    """Gathers positions ``begin`` to ``end`` of the sequence whose page indices are ``pages``: ``[end - begin, kv_heads, dim]``."""
    page_size = cache.shape[1]
    first = begin // page_size
    found = cache.index_select(0, pages[first : -(-end // page_size)])
    return found.flatten(0, 1)[begin - first * page_size : end - first * page_size]


def _outputs_without_keys(q: Tensor, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns outputs of 0 and log-sum-exps of -inf. Queries that see no key, and padding rows, keep these values."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_head_dim, dtype=output_dtype(q))
    return out, q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)


def paged_outputs(q: Tensor, v_cache: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the `empty_outputs` of an operator whose cache holds keys and values."""
    return empty_outputs(q, v_cache.shape[3], return_lse)


def latent_outputs(q: Tensor, kv_lora_rank: int, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the `empty_outputs` of an operator whose cache holds latents."""
    return empty_outputs(q, kv_lora_rank, return_lse)


def empty_outputs(q: Tensor, v_head_dim: int, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Returns uninitialised outputs of an attention operator, with the log-sum-exp if ``return_lse``; q may be a fake tensor."""
    out = q.new_empty(q.shape[0], q.shape[1], v_head_dim, dtype=output_dtype(q))
    return (out, q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)) if return_lse else out
