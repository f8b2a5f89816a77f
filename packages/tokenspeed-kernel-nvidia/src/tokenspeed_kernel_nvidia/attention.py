"""The public functions of attention: they check, choose the kernel, and call it. CuteDSL is imported only to compile one.

Names and meanings of arguments are those of tokenspeed-kernel's operators.

Of a call like one that was right, only that is looked at which programs do not look at themselves: those refuse tensors whose
dtypes, devices and shapes do not go together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from tokenspeed_kernel_nvidia import _limits
from tokenspeed_kernel_nvidia._checks import REFUSALS, Call, has_passed, integer, looks, pass_on, room
from tokenspeed_kernel_nvidia._machine import require_sm90
from tokenspeed_kernel_nvidia.sm90.attention import decode, prefill, window


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
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of sequences that lie one after another, each to itself.

    ``softmax(q @ k.T * softmax_scale) @ v`` within each sequence, where a token sees itself and earlier ones. Query head h uses
    key and value head ``h // (heads // kv_heads)``. Scores and sums are float32; probabilities are rounded to q's dtype, for the
    second product, and so is the output.

    Args:
        q: bfloat16 or float16 ``[tokens, heads, head_dim]``, head_dim 64 or 128.
        k: like q, ``[tokens, kv_heads, head_dim]``; heads is 1 to 16 times kv_heads.
        v: like k. q, k and v may be slices of one tensor; where their last axis is not contiguous or rows do not begin at
            multiples of 16 bytes, they are copied first.
        cu_seqlens: int32 ``[batch + 1]``, where each sequence begins, and the number of tokens. Read on the device only.
        cu_seqlens_cpu: not used; the core's operator passes it to kernels that want lengths on the host.
        max_seqlen: an upper bound of the longest sequence, in tokens. Not needed: lengths are found on the device.
        window_left: how many tokens to the left stay visible besides the token itself, at most 127; -1 for all. A model's
            "sliding window 128" is ``window_left=127``. With a window, heads is 1, 2, 4, 8 or 16 times kv_heads.
        logit_cap: 0.
        sinks: any float dtype ``[heads]``, one more score a query head, in the softmax's denominator only.
        return_lse: also return the log-sum-exp.
        softmax_scale: multiplies the products of q and k; None is ``1 / sqrt(head_dim)``.
        out: receives the output, by a copy where its rows do not begin at multiples of 16 bytes. It must not overlap q, k or v.

    Returns:
        The output ``[tokens, heads, head_dim]`` in q's dtype; with return_lse also float32 ``[tokens, heads]``, the natural
        logarithm of the softmax's denominator, ``exp(sink)`` included.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as said here; nothing has been launched.
        RuntimeError: the tensors lie on no sm_90, or there is no CuteDSL 4.8.

    Never waits for the device, and is safe in CUDA graphs. The first call for a dtype and shape of heads loads a program from the
    cache, or compiles it, which takes seconds; ``python -m tokenspeed_kernel_nvidia.warmup`` does it ahead of time.
    """
    launch = prefill.mha_prefill if window_left == -1 else window.mha_prefill
    arguments = q, k, v, cu_seqlens, cu_seqlens_cpu, max_seqlen, window_left, logit_cap, sinks, return_lse, softmax_scale, out
    others = window_left, type(window_left), logit_cap, softmax_scale
    try:
        alike = "mha_prefill", q.dtype, q.get_device(), q.shape, k.shape, cu_seqlens.shape, looks(sinks), others
        if has_passed(alike, 0 if max_seqlen is None else max_seqlen):
            return launch(*arguments)
    except REFUSALS:
        pass  # the check says what is wrong; if it finds nothing, the launch below fails as this one has
    check = Call("mha_prefill", q)
    check.queries(q)
    check.tensor("k", k, (q.dtype,), "tokens, kv_heads, head_dim", (q.shape[0], None, q.shape[2]))
    check.tensor("v", v, (q.dtype,), "tokens, kv_heads, head_dim", tuple(k.shape))
    check.heads(q, k.shape[1])
    check.offsets("cu_seqlens", cu_seqlens)
    check.window(window_left)
    check.options(q, logit_cap, sinks, softmax_scale, out)
    if max_seqlen is not None:
        integer("mha_prefill", "max_seqlen", max_seqlen, 0)
    require_sm90("mha_prefill", q.device)
    pass_on(alike, sys.maxsize)
    return launch(*arguments)


def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
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
    """The attention of new tokens to a paged cache that holds them already, behind those that came before.

    The caches hold positions 0 to ``cache_seqlens[b] - 1`` of sequence b, position j in page ``page_table[b, j // page_size]``,
    slot ``j % page_size``. Query i of a sequence's q_len is at position ``p = cache_seqlens[b] - q_len + i``. It sees key j where
    ``j <= p``, if is_causal, and ``j >= p - window_left``, if window_left is not negative.

    Args:
        q: bfloat16 or float16 ``[tokens, heads, head_dim]``, head_dim 64 or 128, sequence by sequence.
        cu_seqlens_q: int32 ``[batch + 1]``, where each sequence's queries begin, and the number of tokens.
        cu_seqlens_kv: not used: cache_seqlens says the same.
        k_cache: q's dtype ``[pages, page_size, kv_heads, head_dim]``; heads is 1 to 16 times kv_heads, page_size 16, 32, 64 or 128.
        v_cache: like k_cache.
        page_table: int32 ``[batch, max_pages]``.
        cache_seqlens: int32 ``[batch]``, tokens of each sequence in the cache, the new ones included.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        is_causal: whether later tokens are hidden; True where there is a window.
        window_left, logit_cap, sinks, return_lse, softmax_scale: see `mha_prefill`.
        q_scale, k_scale, v_scale: None; there is no fp8 here.
        out: receives the output. It must not overlap q or the caches.

    Returns, Raises:
        As `mha_prefill`.
    """
    launch = prefill.mha_extend_with_kvcache if window_left == -1 else window.mha_extend_with_kvcache
    arguments = (
        q, cu_seqlens_q, cu_seqlens_kv, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, is_causal,
        window_left, logit_cap, sinks, return_lse, softmax_scale, q_scale, k_scale, v_scale, out,
    )  # fmt: skip
    others = max_seqlen_q, type(max_seqlen_q), is_causal, window_left, type(window_left), logit_cap, softmax_scale
    try:
        shapes = q.shape, cu_seqlens_q.shape, k_cache.shape, page_table.shape, cache_seqlens.shape
        alike = "mha_extend_with_kvcache", q.dtype, q.get_device(), *shapes, looks(sinks), *others, q_scale, k_scale, v_scale
        if has_passed(alike, max_seqlen_k):
            return launch(*arguments)
    except REFUSALS:
        pass  # the check says what is wrong; if it finds nothing, the launch below fails as this one has
    check = Call("mha_extend_with_kvcache", q)
    check.caches(q, k_cache, v_cache, page_table, cache_seqlens)
    check.offsets("cu_seqlens_q", cu_seqlens_q, cache_seqlens.shape[0])
    if not is_causal and window_left >= 0:
        check.fail("is_causal", "True where there is a window", is_causal)
    check.unscaled(q_scale, k_scale, v_scale)
    check.window(window_left)
    check.options(q, logit_cap, sinks, softmax_scale, out)
    integer("mha_extend_with_kvcache", "max_seqlen_q", max_seqlen_q, 0)
    longest = room("mha_extend_with_kvcache", max_seqlen_k, page_table, k_cache.shape[1])
    require_sm90("mha_extend_with_kvcache", q.device)
    pass_on(alike, longest)
    return launch(*arguments)


def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
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
    """The attention of the last ``max_seqlen_q`` tokens of every sequence to a paged cache that holds them already.

    The same as `mha_extend_with_kvcache` with exactly max_seqlen_q new tokens a sequence. Work is divided on the device, from
    cache_seqlens, so that a captured graph stays right when lengths change.

    Args:
        q: bfloat16 or float16 ``[batch * max_seqlen_q, heads, head_dim]``, head_dim 64 or 128, sequence by sequence.
        k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k: see `mha_extend_with_kvcache`.
        max_seqlen_q: new tokens of each sequence, exactly; at most 64 times kv_heads / heads.
        window_left: how many tokens to the left stay visible besides the token itself, any number; -1 for all.
        logit_cap, sinks, return_lse, softmax_scale, q_scale, k_scale, v_scale, out: see `mha_extend_with_kvcache`.

    Returns, Raises:
        As `mha_prefill`.
    """
    arguments = (
        q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, max_seqlen_q, window_left, logit_cap, sinks, return_lse,
        softmax_scale, q_scale, k_scale, v_scale, out,
    )  # fmt: skip
    others = max_seqlen_q, type(max_seqlen_q), window_left, type(window_left), logit_cap, softmax_scale
    try:
        shapes = q.shape, k_cache.shape, page_table.shape, cache_seqlens.shape
        alike = "mha_decode_with_kvcache", q.dtype, q.get_device(), *shapes, looks(sinks), *others, q_scale, k_scale, v_scale
        if has_passed(alike, max_seqlen_k):
            return decode.mha_decode_with_kvcache(*arguments)
    except REFUSALS:
        pass  # the check says what is wrong; if it finds nothing, the launch below fails as this one has
    check = Call("mha_decode_with_kvcache", q)
    check.caches(q, k_cache, v_cache, page_table, cache_seqlens, _limits.DECODE_GQA_RATIOS)
    check.rows(max_seqlen_q, q, k_cache.shape[2], cache_seqlens.shape[0])
    check.unscaled(q_scale, k_scale, v_scale)
    integer("mha_decode_with_kvcache", "window_left", window_left, -1)
    check.options(q, logit_cap, sinks, softmax_scale, out)
    longest = room("mha_decode_with_kvcache", max_seqlen_k, page_table, k_cache.shape[1])
    require_sm90("mha_decode_with_kvcache", q.device)
    pass_on(alike, longest)
    return decode.mha_decode_with_kvcache(*arguments)
