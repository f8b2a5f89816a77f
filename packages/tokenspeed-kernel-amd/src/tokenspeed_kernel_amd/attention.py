"""The public functions of attention: they check, and call the kernel. Triton is imported when one is first called.

Names and meanings of arguments are those of tokenspeed-kernel's operators.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenspeed_kernel_amd import _checks
from tokenspeed_kernel_amd._machine import require_gfx950


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
        k: like q, ``[tokens, kv_heads, head_dim]``; kv_heads divides heads.
        v: like q, ``[tokens, kv_heads, v_head_dim]``, v_head_dim 64 or 128. q, k and v may be slices of one tensor; where their
            last axis is not contiguous or rows do not begin at multiples of 16 bytes, they are copied first.
        cu_seqlens: int32 ``[batch + 1]``, where each sequence begins, and the number of tokens. Read on the device only.
        cu_seqlens_cpu: not used; the core's operator passes it to kernels that want lengths on the host.
        max_seqlen: an upper bound of the longest sequence, in tokens. Not needed: the kernel finds the lengths on the device.
        window_left: how many tokens to the left stay visible besides the token itself; -1 for all. A model's "sliding window
            128" is ``window_left=127``.
        logit_cap: where positive, scores become ``logit_cap * tanh(score / logit_cap)`` after softmax_scale; 0 is off.
        sinks: float32, bfloat16 or float16 ``[heads]``, one more score a query head, in the softmax's denominator only.
        return_lse: also return the log-sum-exp.
        softmax_scale: multiplies the products of q and k; None is ``1 / sqrt(head_dim)``.
        out: receives the output, by a copy where its last axis is not contiguous. It must not overlap q, k or v.

    Returns:
        The output ``[tokens, heads, v_head_dim]`` in q's dtype; with return_lse also float32 ``[tokens, heads]``, the natural
        logarithm of the softmax's denominator, ``exp(sink)`` included.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as said here; nothing has been launched.
        RuntimeError: this machine is no gfx950, or has no Triton 3.9.

    Never waits for the device, and is safe in CUDA graphs.
    """
    check = _checks.Checker("mha_prefill")
    check.tensor("q", q, "tokens heads head_dim", _checks.HALVES)
    check.tensor("k", k, "tokens kv_heads head_dim", q.dtype)
    check.tensor("v", v, "tokens kv_heads v_head_dim", q.dtype)
    _checks.check_heads(check)
    _checks.check_offsets(check, "cu_seqlens", cu_seqlens, q.shape[0])
    if max_seqlen is not None:
        check.integer("max_seqlen", max_seqlen, 0)
    _checks.check_options(check, window_left, logit_cap, sinks, softmax_scale)
    _checks.check_out(check, out, q)
    require_gfx950("mha_prefill")
    from tokenspeed_kernel_amd.gfx950.attention.prefill import mha_prefill as launch

    return launch(q, k, v, cu_seqlens, cu_seqlens_cpu, max_seqlen, window_left, logit_cap, sinks, return_lse, softmax_scale, out)


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
        k_cache: q's dtype or float8_e4m3fn ``[pages, page_size, kv_heads, head_dim]``; kv_heads divides heads. page_size is a
            power of two, at least 16. Numbers of fp8 are widened to q's dtype, in which products are formed.
        v_cache: k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``.
        page_table: int32 ``[batch, max_pages]``.
        cache_seqlens: int32 ``[batch]``, tokens of each sequence in the cache, the new ones included.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        is_causal: whether a token sees later ones.
        window_left, logit_cap, sinks, return_lse, softmax_scale: see `mha_prefill`.
        q_scale: None; q is not fp8.
        k_scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``, multiplies a float8_e4m3fn k_cache; None is 1. Read on the device only.
        v_scale: likewise for v_cache.
        out: receives the output. It must not overlap q or the caches.

    Returns, Raises:
        As `mha_prefill`.
    """
    check = _checks.Checker("mha_extend_with_kvcache")
    _checks.check_caches(check, q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, k_scale, v_scale)
    _checks.check_extension(check, cu_seqlens_q, max_seqlen_q, q.shape[0])
    check.require(q_scale is None, "q_scale", "None: there are no fp8 queries here", q_scale)
    _checks.check_options(check, window_left, logit_cap, sinks, softmax_scale)
    _checks.check_out(check, out, q)
    require_gfx950("mha_extend_with_kvcache")
    from tokenspeed_kernel_amd.gfx950.attention.extend import mha_extend_with_kvcache as launch

    return launch(
        q, cu_seqlens_q, cu_seqlens_kv, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, is_causal,
        window_left, logit_cap, sinks, return_lse, softmax_scale, q_scale, k_scale, v_scale, out,
    )  # fmt: skip


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

    The same as `mha_extend_with_kvcache` with ``is_causal=True`` and exactly max_seqlen_q new tokens a sequence.

    Args:
        q: bfloat16 or float16 ``[batch * max_seqlen_q, heads, head_dim]``, head_dim 64 or 128, sequence by sequence.
        k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k: see `mha_extend_with_kvcache`.
        max_seqlen_q: new tokens of each sequence, exactly.
        window_left, logit_cap, sinks, return_lse, softmax_scale, q_scale, k_scale, v_scale, out: likewise.

    Returns, Raises:
        As `mha_prefill`.
    """
    check = _checks.Checker("mha_decode_with_kvcache")
    _checks.check_caches(check, q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, k_scale, v_scale)
    check.integer("max_seqlen_q", max_seqlen_q, 1)
    wanted = check["batch"] * max_seqlen_q
    tokens = f"{q.shape[0]} tokens"
    check.require(q.shape[0] == wanted, "q", f"of {wanted} tokens, max_seqlen_q for each length in cache_seqlens", tokens)
    check.require(q_scale is None, "q_scale", "None: there are no fp8 queries here", q_scale)
    _checks.check_options(check, window_left, logit_cap, sinks, softmax_scale)
    _checks.check_out(check, out, q)
    require_gfx950("mha_decode_with_kvcache")
    from tokenspeed_kernel_amd.gfx950.attention.decode import mha_decode_with_kvcache as launch

    return launch(
        q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, max_seqlen_q, window_left, logit_cap, sinks, return_lse,
        softmax_scale, q_scale, k_scale, v_scale, out,
    )  # fmt: skip


def mha_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    """The causal attention of a batch in which sequences decode, extend and prefill, all at once, to a paged cache.

    What comes out is what `mha_extend_with_kvcache` gives with ``is_causal=True``. Sequences stand in any order, and each has any
    number of new tokens: one where it decodes, none where it is idle, as many as cache_seqlens says where it prefills. Those that
    have few are served as `mha_decode_with_kvcache` does, the others as `mha_extend_with_kvcache` does; which is which is found out
    on the device.

    Args:
        q, cu_seqlens_q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k: see `mha_extend_with_kvcache`.
        max_seqlen_q: an upper bound of a sequence's new tokens. A close one saves launches where all sequences have few.
        window_left, logit_cap, sinks, return_lse, softmax_scale, q_scale, k_scale, v_scale, out: likewise.

    Returns, Raises:
        As `mha_prefill`.
    """
    check = _checks.Checker("mha_with_kvcache")
    _checks.check_caches(check, q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, k_scale, v_scale)
    _checks.check_extension(check, cu_seqlens_q, max_seqlen_q, q.shape[0])
    check.require(q_scale is None, "q_scale", "None: there are no fp8 queries here", q_scale)
    _checks.check_options(check, window_left, logit_cap, sinks, softmax_scale)
    _checks.check_out(check, out, q)
    require_gfx950("mha_with_kvcache")
    from tokenspeed_kernel_amd.gfx950.attention.mixed import mha_with_kvcache as launch

    return launch(
        q, cu_seqlens_q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, window_left, logit_cap, sinks,
        return_lse, softmax_scale, q_scale, k_scale, v_scale, out,
    )  # fmt: skip
