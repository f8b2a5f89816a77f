"""Code that the operators of the sparse-attention indexer share: scores, checks and inputs.

``score[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])``
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Cost, Draw, nbytes
from tokenspeed_kernel_base.checks import FLOATS, FP8, Checker
from tokenspeed_kernel_base.ops.attention import _cost
from tokenspeed_kernel_base.ops.attention._inputs import draw_cache
from tokenspeed_kernel_base.traits import TraitKind


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the arithmetic, of the weights and of the scores, for queries of dtype ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_scores(q: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Returns uninitialised scores ``[tokens, keys]`` and lengths ``[tokens]``; q may be a fake tensor."""
    return q.new_empty(q.shape[0], keys, dtype=_wide(q.dtype)), q.new_empty(q.shape[0], dtype=torch.int32)


def scores_without_keys(q: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Returns the scores and lengths of tokens that see no key."""
    scores, lengths = empty_scores(q, keys)
    return scores.fill_(-torch.inf), lengths.zero_()


def write_scores(
    q: Tensor, weights: Tensor, k: Tensor, scale: Tensor | None, begin: int, end: int, scores: Tensor, lengths: Tensor
) -> None:
    """Writes the scores of one sequence, and the number of keys that each token sees.

    k ``[kv_len, head_dim]`` holds the sequence's keys; rows ``begin`` to ``end`` of q are its last tokens."""
    wide, kv_len = scores.dtype, k.shape[0]
    k = k.to(wide)
    for token in range(begin, end):
        seen = max(kv_len - end + token + 1, 0)
        products = torch.relu(k[:seen] @ q[token].to(wide).t()) @ weights[token]
        scores[token, :seen] = products if scale is None else products * scale[:seen]
        lengths[token] = seen


def new_offsets(tokens: int, cu_seqlens_q: Tensor | None, batch: int) -> list[int]:
    """Returns the offsets in q at which each sequence's new tokens begin, in host memory; the last offset is the number of
    tokens."""
    return [i * tokens // max(batch, 1) for i in range(batch + 1)] if cu_seqlens_q is None else cu_seqlens_q.tolist()


INDEXER_KINDS: dict[str, TraitKind] = {"heads": int, "head_dim": int, "scaled": bool}


def indexer_traits(q: Tensor, scale: Tensor | None) -> dict[str, object]:
    """Returns the traits that all operators for indexer scores share. ``scaled``: whether keys have scales."""
    return {"heads": q.shape[1], "head_dim": q.shape[2], "scaled": scale is not None}


def check_queries(check: Checker, q: Tensor, weights: Tensor) -> None:
    """Checks an indexer's queries, and the weight of each query head."""
    check.tensor("q", q, "tokens heads head_dim", FLOATS | {torch.float8_e4m3fn})
    check.require(check["heads"] > 0 and check["head_dim"] > 0, "q", "of heads and a head_dim > 0", str(list(q.shape)))
    check.tensor("weights", weights, "tokens heads", _wide(q.dtype))


def check_key_scale(check: Checker, name: str, scale: Tensor | None, keys_name: str, keys: Tensor, shape: str) -> None:
    """Checks the scales of index keys; only fp8 keys may have scales."""
    if scale is not None and keys.dtype not in FP8:
        check.fail(name, f"None, because {keys_name} is not fp8", scale)
    check.tensor(name, scale, shape, torch.float32)


def draw_queries(draw: Draw, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draws queries, and weights of both signs for the query heads."""
    weights = draw.normal(tokens, heads, scale=heads**-0.5, dtype=_wide(dtype))
    return {"q": draw.normal(tokens, heads, head_dim, dtype=dtype), "weights": weights}


def index_pages(draw: Draw, held: Tensor, head_dim: int, dtype: torch.dtype, stale: bool) -> tuple[Tensor, Tensor | None]:
    """Draws paged index keys, and their scales if they are fp8.

    Both tensors are views of pages of bytes. In a page, the scales follow the keys, as in DeepGEMM's layout. With ``stale``, slots
    that hold no token hold NaN."""
    if dtype not in FP8:
        return draw_cache(draw, held, head_dim, dtype=dtype, stale=stale), None
    pages, page_size = held.shape
    packed = torch.zeros(pages, page_size * (head_dim + 4), dtype=torch.uint8, device=draw.device)
    keys, scales = index_views(packed, page_size, head_dim)
    keys.view(torch.uint8).copy_(draw_cache(draw, held, head_dim, dtype=dtype, stale=stale).view(torch.uint8))
    scales.copy_(draw.uniform(pages, page_size, low=0.5, high=1.5).masked_fill(~held & stale, torch.nan))
    return keys, scales


def index_views(packed: Tensor, page_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views pages of bytes as ``k_cache`` and ``k_scale_cache``.

    packed is uint8 ``[pages, page_size * (head_dim + 4)]``; head_dim is a multiple of 4."""
    pages, width = packed.shape[0], page_size * (head_dim + 4)
    keys = packed.view(torch.float8_e4m3fn).as_strided((pages, page_size, head_dim), (width, head_dim, 1))
    floats = packed.view(torch.float32)
    scales = floats.as_strided((pages, page_size), (width // 4, 1), floats.storage_offset() + page_size * head_dim // 4)
    return keys, scales


def indexer_cost(
    q: Tensor, weights: Tensor, offsets: Sequence[int], kv_lens: Sequence[int], token_bytes: int, other_bytes: int
) -> Cost:
    """Returns the cost of scores: a dot product in each head for every visible pair of a token and a key.

    Each key is read once, and the score of each visible pair is written once.

    Args:
        offsets: the offsets in q at which each sequence's new tokens begin.
        token_bytes: bytes of one key and its scale.
        other_bytes: bytes of the other tensors that are read, besides q, weights and the keys.
    """
    pairs = read = 0
    for (begin, end), kv_len in zip(itertools.pairwise(offsets), kv_lens, strict=True):
        pairs += _cost.visible_pairs(end - begin, kv_len, True, -1)
        read += kv_len if end > begin else 0
    written = pairs * weights.element_size() + 4 * len(q)
    flops = 2.0 * pairs * q.shape[1] * (q.shape[2] + 1)
    return Cost(flops=flops, bytes=float(nbytes(q, weights) + other_bytes + read * token_bytes + written))
