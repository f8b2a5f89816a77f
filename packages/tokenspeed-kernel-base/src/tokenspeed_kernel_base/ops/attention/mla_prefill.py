"""Prefill with multi-head latent attention, without absorption, for whole sequences or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import FLOATS, FP8, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._inputs import ragged
from tokenspeed_kernel_base.ops.attention._softmax import Softmax, attend_ragged, empty_outputs, softmax_scale_of
from tokenspeed_kernel_base.ops.attention._traits import (
    SCALE_KINDS,
    SOFTMAX_KINDS,
    WINDOW_KINDS,
    scale_traits,
    softmax_traits,
    window_traits,
)
from tokenspeed_kernel_base.ops.attention._variations import vary_ragged


@operator(
    "attention",
    "mla_prefill",
    formats=("q", "k", "v"),
    traits={**SOFTMAX_KINDS, **WINDOW_KINDS, **SCALE_KINDS, "own_kv_lengths": bool, "is_causal": bool},
    hints=("cu_seqlens_cpu",),
    varying=("batch", "tokens", "kv_tokens"),
    bounds=("max_seqlen",),
    padded="cu_seqlens",
    unlimited=("window_left",),
    scales=("q_scale", "k_scale", "v_scale"),
)
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    logit_cap: float = 0.0,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens_kv: Tensor | None = None,
    is_causal: bool = True,
    window_left: int = -1,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """MLA prefill: attention of packed sequences with keys and values expanded from their latents.

    Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434) without absorption, which is cheaper if a sequence has many
    queries. Every head has its own keys and values. A key is the expanded latent followed by the shared rotary part. Computes the
    same as `mha_prefill` with as many KV heads as query heads. The operator is separate because head_dim and v_head_dim differ here
    (192 and 128 in DeepSeek-V3), and kernels are specialised for that. Accumulators are float32 (float64 for a float64 q), and the
    output is rounded once. With fp8 operands, a kernel may round the softmax probabilities to fp8 too, see `mha_prefill`.

    With ``cu_seqlens_kv`` the number of keys of a sequence may differ from the number of its queries. With q_len queries and
    kv_len keys, query i is at position ``p = kv_len - q_len + i``. The query sees key j if ``j <= p`` (with is_causal) and ``j >= p
    - window_left`` (if there is a window). Chunked prefill of a long prompt uses this: a chunk attends to itself with
    ``is_causal=True``, then to the expanded latents of each earlier chunk with ``is_causal=False``. `attn_merge_state` merges these
    results by their log-sum-exps.

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[tokens, heads, head_dim]``, non-rotary part first, then the rotary part.
        k: q's dtype ``[kv_tokens, heads, head_dim]``; without cu_seqlens_kv, kv_tokens is tokens. The rotary part may be a
            broadcast view.
        v: q's dtype ``[kv_tokens, heads, v_head_dim]``.
        cu_seqlens: int32 ``[batch + 1]``, where each sequence begins, and where the last one ends. Rows past the last offset are
            padding: they belong to no sequence, and the same rows of the outputs are not written.
        cu_seqlens_cpu: the same values on the host. A hint, never required.
        max_seqlen: an upper bound of the longest sequence, in tokens. None: the number of tokens is the only known bound.
        logit_cap: if positive, scores become ``logit_cap * tanh(score / logit_cap)``; 0 is off.
        return_lse: whether to also return the log-sum-exp.
        softmax_scale: multiplies the dot products q·k; None is ``1 / sqrt(head_dim)``.
        cu_seqlens_kv: int32 ``[batch + 1]``, where each sequence's keys begin in k and v, and where the last sequence ends; None:
            the same as cu_seqlens.
        is_causal: whether to hide keys later than the query. False: every query sees all keys, for example those of a prefix that
            does not contain the queries.
        window_left: how many tokens to the left a query sees besides itself; -1, or 2^30 and more, means all.
        q_scale: float32 ``[]``, ``[1]`` or ``[heads]``, multiplies q, for fp8 q only.
        k_scale: the scale of k, like q_scale, for fp8 k only.
        v_scale: the scale of v, like q_scale, for fp8 v only.
        out: receives the output; must not overlap q, k or v.

    Returns:
        The output ``[tokens, heads, v_head_dim]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the natural
        log-sum-exp, float32 ``[tokens, heads]``. A query that sees no key has output 0 and log-sum-exp -inf.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            offsets are checked only if they lie in host memory.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import mla_prefill
        >>> q = k = torch.zeros(3, 1, 12)
        >>> v = torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1)
        >>> mla_prefill(q, k, v, torch.tensor([0, 3], dtype=torch.int32)).flatten()
        tensor([1., 2., 3.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads offsets on the host unless the
    hint is given.
    """
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    softmax = Softmax(softmax_scale_of(softmax_scale, q.shape[-1]), is_causal, window_left, logit_cap)
    q_offsets = offsets.tolist() if isinstance(offsets, Tensor) else offsets
    kv_offsets = None if cu_seqlens_kv is None else cu_seqlens_kv.tolist()
    result, lse = attend_ragged(q, k, v, q_offsets, softmax, kv_offsets, q_scale, k_scale, v_scale)
    return (result, lse) if return_lse else result


@mla_prefill.traits
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logit_cap: float,
    return_lse: bool,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    window_left: int,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, object]:
    return {
        **softmax_traits(q, k.shape[1], v.shape[2], logit_cap, return_lse),
        **window_traits(window_left),
        "own_kv_lengths": cu_seqlens_kv is not None,
        "is_causal": is_causal,
        **scale_traits(q_scale, k_scale, v_scale),
    }


@mla_prefill.check
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    logit_cap: float,
    softmax_scale: float | None,
    cu_seqlens_kv: Tensor | None,
    window_left: int,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check.tensor("q", q, "tokens heads head_dim", FLOATS | FP8)
    check.require(check["heads"] > 0, "heads of q", "positive", 0)
    keys = "tokens" if cu_seqlens_kv is None else "kv_tokens"
    check.tensor("k", k, f"{keys} heads head_dim", q.dtype)
    check.tensor("v", v, f"{keys} heads v_head_dim", q.dtype)
    _checks.check_offsets(check, "cu_seqlens", cu_seqlens)
    _checks.check_offsets(check, "cu_seqlens_kv", cu_seqlens_kv)
    check.bound("max_seqlen", max_seqlen)
    _checks.check_options(check, softmax_scale, logit_cap, window_left)
    _checks.check_scales(check, q, k, v, q_scale, k_scale, v_scale, "heads")


@mla_prefill.check_values(host=("cu_seqlens", "cu_seqlens_kv"))
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Sequence[int] | Tensor | None,
    max_seqlen: int | None,
    cu_seqlens_kv: Tensor | None,
) -> None:
    _checks.check_values_ragged(check, q, cu_seqlens, cu_seqlens_cpu, max_seqlen)
    _checks.check_values_offsets(check, "cu_seqlens_kv", cu_seqlens_kv, k.shape[0], "k", padded=True)


@mla_prefill.fake
def _(q: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    return empty_outputs(q, v.shape[2], return_lse)


@mla_prefill.cases
def _() -> list[Case]:
    deepseek_v3: dict[str, Any] = {"head_dim": 192, "v_head_dim": 128, "softmax_scale": 0.1352}
    e4m3 = torch.float8_e4m3fn
    by_head: dict[str, Any] = {"scales": ("q_scale", "k_scale", "v_scale"), "scale_per_head": True, "return_lse": True}
    return [
        Case("one token, float32", ragged([1], 2, 2, 24, 16, dtype=torch.float32)),
        Case("lengths 0 to 33, float32, lse", ragged([5, 0, 33, 1], 3, 3, 40, 24, dtype=torch.float32, return_lse=True)),
        Case("float64", ragged([7, 2], 2, 2, 12, 8, dtype=torch.float64)),
        Case("logit cap 30, float16", ragged([50, 20], 4, 4, 96, 64, dtype=torch.float16, logit_cap=30.0)),
        Case("lengths known on the host", ragged([17, 64], 4, 4, 96, 64, hint=True)),
        Case("deepseek-v3, 8 of its heads, 1 to 300 tokens", ragged([1, 129, 300], 8, 8, **deepseek_v3)),
        Case(
            "deepseek-v3, 4 of its heads, rows behind the last sequence, lse",
            ragged([33, 70], 4, 4, **deepseek_v3, padding=9, return_lse=True),
        ),
        Case("rows and keys behind the last sequence", ragged([5, 9], 3, 3, 40, 24, kv_lengths=[8, 20], padding=7)),
        Case("no sequences", ragged([], 8, 8, **deepseek_v3, return_lse=True)),
        Case("no sequences, but rows behind", ragged([], 8, 8, **deepseek_v3, padding=5)),
        Case(
            "chunks to what came before them, float32, lse",
            ragged([5, 0, 33, 1], 3, 3, 40, 24, torch.float32, kv_lengths=[70, 20, 0, 129], is_causal=False, return_lse=True),
        ),
        Case(
            "more keys than queries and fewer, causal",
            ragged([5, 33, 2, 7], 3, 3, 40, 24, torch.float32, kv_lengths=[70, 33, 1, 0], return_lse=True),
        ),
        Case("window of 20", ragged([50, 9, 130], 4, 4, 96, 64, window_left=20)),
        Case(
            "window, cap and keys of their own, float16",
            ragged([50, 9], 4, 4, 96, 64, torch.float16, kv_lengths=[90, 40], window_left=30, logit_cap=5.0, return_lse=True),
        ),
        Case("window without causality", ragged([50, 9], 2, 2, 48, 32, kv_lengths=[60, 40], window_left=10, is_causal=False)),
        Case(
            "deepseek-v3, 4 of its heads, in a window of 40, keys of their own",
            ragged([50, 9], 4, 4, **deepseek_v3, kv_lengths=[90, 200], window_left=39, return_lse=True),
        ),
        Case("fp8 without scales", ragged([40, 70], 4, 4, 96, 64, e4m3)),
        Case(
            "fp8, a scale each, keys of their own",
            ragged([40, 20], 4, 4, 96, 64, e4m3, kv_lengths=[70, 9], is_causal=False, scales=("q_scale", "k_scale", "v_scale")),
        ),
        Case(
            "fp8 e5m2, a scale a head",
            ragged([70], 4, 4, 48, 32, torch.float8_e5m2, scales=("q_scale", "k_scale", "v_scale"), scale_per_head=True),
        ),
        Case(
            "deepseek-v3, 8 of its heads, chunks of 100 to 300 before them",
            ragged([100, 100], 8, 8, **deepseek_v3, kv_lengths=[300, 64], is_causal=False, return_lse=True),
        ),
        Case("deepseek-v3, 4 of its heads, fp8, a scale a head, lse", ragged([1, 150], 4, 4, dtype=e4m3, **deepseek_v3, **by_head)),
        Case(
            "deepseek-v3, 4 of its heads, fp8 in a window of 40", ragged([9, 150], 4, 4, dtype=e4m3, **deepseek_v3, window_left=39)
        ),
        Case("deepseek-v3 4 x 4096", ragged([4096] * 4, 128, 128, **deepseek_v3), large=True),
        Case("deepseek-v3, 16 of its heads, 2 x 8192", ragged([8192] * 2, 16, 16, **deepseek_v3, return_lse=True), large=True),
        Case(
            "deepseek-v3, 16 of its heads, a chunk of 2048 to 16384 before it",
            ragged([2048], 16, 16, **deepseek_v3, kv_lengths=[16384], is_causal=False, return_lse=True),
            large=True,
        ),
        Case("deepseek-v3, 16 of its heads, 2 x 8192, fp8", ragged([8192] * 2, 16, 16, dtype=e4m3, **deepseek_v3), large=True),
    ]


@mla_prefill.work
def _(cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None) -> dict[str, list[int]]:
    lengths = {"lengths": cu_seqlens.diff().tolist()}
    return lengths if cu_seqlens_kv is None else {**lengths, "kv_lengths": cu_seqlens_kv.diff().tolist()}


mla_prefill.vary(vary_ragged)


@mla_prefill.cost
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    return_lse: bool,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    window_left: int,
) -> Cost:
    return _cost.ragged_cost(q, k, v, cu_seqlens, window_left, return_lse, cu_seqlens_kv, is_causal)
