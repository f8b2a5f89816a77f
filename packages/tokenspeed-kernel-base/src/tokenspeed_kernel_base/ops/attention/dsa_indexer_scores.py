"""Computes the indexer scores of DeepSeek sparse attention for contiguous index keys (prefill)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FP8, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._indexer import (
    INDEXER_KINDS,
    check_key_scale,
    check_queries,
    draw_queries,
    empty_scores,
    indexer_cost,
    indexer_traits,
    scores_without_keys,
    write_scores,
)
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "attention",
    "dsa_indexer_scores",
    formats=("q", "k"),
    traits=INDEXER_KINDS,
    outs=("out", "lengths_out"),
    varying=("tokens", "keys", "batch"),
    scales=("k_scale",),
)
def dsa_indexer_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    k_scale: Tensor | None = None,
    out: Tensor | None = None,
    lengths_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the lightning-indexer scores of DeepSeek sparse attention for contiguous, packed index keys (prefill).

    ``score[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])``, accumulated in float32 (float64 for a float64 q),
    where s counts the keys of t's own sequence. The tokens in q are the last tokens of their sequences. Each token sees itself and
    earlier tokens. `dsa_indexer_scores_with_kvcache` does the same for a paged cache.

    Args:
        q: float16, bfloat16, float32, float64 or float8_e4m3fn ``[tokens, heads, head_dim]``, finite, sequence by sequence.
        k: q's dtype ``[keys, head_dim]``; without cu_seqlens_kv, keys is tokens.
        weights: float32 (float64 for a float64 q) ``[tokens, heads]``. Include all factors of a head's scores here, also the scale
            of an fp8 q.
        cu_seqlens: int32 ``[batch + 1]``, the offsets in q at which sequences begin; the last entry is the end of the last
            sequence.
        cu_seqlens_kv: int32 ``[batch + 1]``, the offsets in k at which sequences begin; the last entry is the end of the last
            sequence. None: the same offsets as in q.
        k_scale: float32 ``[keys]``, multiplies the keys, for fp8 only.
        out: receives the scores; must not overlap an input.
        lengths_out: receives the lengths, see Returns.

    Returns:
        Scores, float32 (float64 for a float64 q) ``[tokens, keys]``. Column s is position s of the token's own sequence. The score
        is -inf at positions that the token does not see or its sequence does not have. Also the lengths, int32 ``[tokens]``: a
        token with length n sees positions 0 to n - 1.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            cu_seqlens and cu_seqlens_kv are checked only if they lie in host memory.

    Example:
        Two sequences of two tokens and of one token.

        >>> import torch
        >>> from tokenspeed_kernel import dsa_indexer_scores
        >>> k, cu_seqlens = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> dsa_indexer_scores(torch.ones(3, 1, 1), k, torch.ones(3, 1), cu_seqlens)
        (tensor([[1., -inf, -inf],
                [1., 2., -inf],
                [3., -inf, -inf]]), tensor([1, 2, 1], dtype=torch.int32))

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    scores, lengths = scores_without_keys(q, k.shape[0])
    new, stored = cu_seqlens.tolist(), (cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv).tolist()
    for (begin, end), (first, last) in zip(itertools.pairwise(new), itertools.pairwise(stored), strict=True):
        scale = None if k_scale is None else k_scale[first:last]
        write_scores(q, weights, k[first:last], scale, begin, end, scores, lengths)
    return scores, lengths


@dsa_indexer_scores.traits
def _(q: Tensor, k_scale: Tensor | None) -> dict[str, object]:
    return indexer_traits(q, k_scale)


@dsa_indexer_scores.check
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_scale: Tensor | None,
) -> None:
    check_queries(check, q, weights)
    check.tensor("k", k, "keys head_dim" if cu_seqlens_kv is not None else "tokens head_dim", q.dtype)
    check.bind("keys", k.shape[0], "k")
    _checks.check_offsets(check, "cu_seqlens", cu_seqlens)
    _checks.check_offsets(check, "cu_seqlens_kv", cu_seqlens_kv)
    check_key_scale(check, "k_scale", k_scale, "k", k, "keys")


@dsa_indexer_scores.check_values(host=("cu_seqlens", "cu_seqlens_kv"))
def _(check: Checker, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None) -> None:
    _checks.check_values_offsets(check, "cu_seqlens", cu_seqlens, q.shape[0], "q")
    _checks.check_values_offsets(check, "cu_seqlens_kv", cu_seqlens_kv, k.shape[0], "k")


@dsa_indexer_scores.fake
def _(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return empty_scores(q, k.shape[0])


@recipe
def _inputs(
    lengths: Sequence[int],
    kv_lengths: Sequence[int] | None = None,
    heads: int = 4,
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws packed sequences. ``kv_lengths``: the number of keys of each sequence, if it differs from the number of queries."""

    def make(draw: Draw) -> dict[str, Any]:
        keys = sum(kv_lengths or lengths)
        return {
            **draw_queries(draw, sum(lengths), heads, head_dim, dtype),
            "k": draw.normal(keys, head_dim, dtype=dtype),
            "cu_seqlens": draw.cumulative(lengths),
            "cu_seqlens_kv": None if kv_lengths is None else draw.cumulative(kv_lengths),
            "k_scale": draw.uniform(keys, low=0.5, high=1.5) if dtype in FP8 else None,
        }

    return make


@dsa_indexer_scores.cases
def _() -> list[Case]:
    fp8: dict[str, Any] = {"heads": 64, "head_dim": 128, "dtype": torch.float8_e4m3fn}
    return [
        Case("one token, float32", _inputs([1], dtype=torch.float32)),
        Case("sequences of none, one and more, float32", _inputs([40, 0, 1, 70], dtype=torch.float32)),
        Case("more keys than queries, float64", _inputs([3, 1, 0], [9, 1, 4], dtype=torch.float64)),
        Case("more queries than keys, odd heads and widths", _inputs([5, 2], [3, 66], heads=3, head_dim=20)),
        Case("deepseek-v3.2, 6 of 150, fp8", _inputs([6, 2], [150, 9], **fp8)),
        Case("no sequences", _inputs([])),
        Case("deepseek-v3.2 prefill 4096, fp8", _inputs([4096], **fp8), large=True),
        Case("deepseek-v3.2 prefill 4 x 2048, fp8", _inputs([2048] * 4, **fp8), large=True),
        Case("deepseek-v3.2 prefill 2048 of 65536, fp8", _inputs([2048], [65536], **fp8), large=True),
        Case("deepseek-v3.2 prefill 4096", _inputs([4096], heads=64, head_dim=128), large=True),
    ]


@dsa_indexer_scores.work
def _(cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None) -> dict[str, list[int]]:
    read = {"lengths": cu_seqlens.diff().tolist()}
    return read if cu_seqlens_kv is None else {**read, "kv_lengths": cu_seqlens_kv.diff().tolist()}


@dsa_indexer_scores.vary
def _(variation: Variation, q: Tensor, k: Tensor, cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None) -> dict[str, Tensor]:
    if variation.want is not Want.CAPTURED:
        return {}
    batch = len(cu_seqlens) - 1
    made = {"cu_seqlens": variation.draw.cumulative(variation.parts("lengths", batch, len(q)))}
    if cu_seqlens_kv is not None:
        made["cu_seqlens_kv"] = variation.draw.cumulative(variation.parts("kv_lengths", batch, len(k)))
    return made


@dsa_indexer_scores.cost
def _(q: Tensor, k: Tensor, weights: Tensor, cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None, k_scale: Tensor | None) -> Cost:
    kv_lens = _cost.lengths(cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv)
    token_bytes = k.shape[1] * k.element_size() + (0 if k_scale is None else 4)
    return indexer_cost(q, weights, cu_seqlens.tolist(), kv_lens, token_bytes, nbytes(cu_seqlens, cu_seqlens_kv))
