"""Checks that attention operators share.

Functions named ``check_*`` check dtypes, shapes and options; functions named ``check_values_*`` check values of tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import FLOATS, FP8, HALVES, INTS, Checker, describe
from tokenspeed_kernel_base.ops.attention._softmax import MAX_TREE, hidden_pages
from tokenspeed_kernel_base.ops.kvcache.latent_groups import check_latent_groups


def check_options(
    check: Checker, softmax_scale: float | None, logit_cap: float = 0.0, window_left: int = -1, sinks: Tensor | None = None
) -> None:
    """Checks the softmax's options. Call this function when ``heads`` and ``head_dim`` are bound."""
    check.require(check["head_dim"] > 0, "head_dim of q", "positive", check["head_dim"])
    check.require(softmax_scale is None or 0 < softmax_scale < math.inf, "softmax_scale", "positive and finite", softmax_scale)
    check.require(0 <= logit_cap < math.inf, "logit_cap", "0 (off) or positive and finite", logit_cap)
    check.require(window_left >= -1, "window_left", "-1 (unlimited) or a number of tokens", window_left)
    check.tensor("sinks", sinks, "heads", FLOATS)


def check_tree(check: Checker, tree_mask: Tensor | None, window_left: int) -> None:
    """Checks the masks of draft trees. Call this function after ``tokens`` is bound."""
    check.tensor("tree_mask", tree_mask, "tokens", torch.int64)
    fits = tree_mask is None or window_left < 0 or window_left >= MAX_TREE - 1
    check.require(fits, "window_left", f"-1 or at least {MAX_TREE - 1}, because a node sees all its ancestors", window_left)


def check_offsets(
    check: Checker, name: str, offsets: Tensor | None, batch: int | None = None, source: str = "cache_seqlens"
) -> None:
    """Checks a ``cu_seqlens``: int32 ``[batch + 1]``. ``source``: the argument that ``batch`` comes from."""
    if batch is not None:
        check.bind("batch+1", batch + 1, source)
    check.tensor(name, offsets, "batch+1", torch.int32)
    check.require(offsets is None or offsets.shape[0] > 0, name, "of shape [batch + 1]", [0])


def _cache_dtypes(q: Tensor) -> Collection[torch.dtype]:
    """Returns the dtypes that the cache may have for these queries: q's dtype or fp8; for an fp8 q only fp8."""
    return FP8 if q.dtype in FP8 else FP8 | {q.dtype}


def check_pages(check: Checker, page_table: Tensor, cache_seqlens: Tensor) -> None:
    """Checks the page table and lengths of a cache. Call this function when ``page_size`` is bound."""
    check.require(check["page_size"] > 0, "page_size of the cache", "positive", 0)
    check.tensor("cache_seqlens", cache_seqlens, "batch", torch.int32)
    check.tensor("page_table", page_table, "batch max_pages", torch.int32)


def _check_paging(check: Checker, page_table: Tensor, cache_seqlens: Tensor, max_seqlen_k: int) -> None:
    """Checks the page table, the sequence lengths, and ``max_seqlen_k``, the upper bound of these lengths."""
    check_pages(check, page_table, cache_seqlens)
    if not check["batch"]:
        check.bound("max_seqlen_k", max_seqlen_k)
        return
    pages, page_size = check["max_pages"], check["page_size"]
    why = f"because page_table has {pages} pages of {page_size} tokens for each sequence"
    check.bound("max_seqlen_k", max_seqlen_k, 0, pages * page_size, why)


def check_caches(
    check: Checker,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Checks queries and a paged cache of keys and values."""
    check.tensor("q", q, "tokens heads head_dim", FLOATS | FP8)
    check.tensor("k_cache", k_cache, "pages page_size kv_heads head_dim", _cache_dtypes(q))
    check.tensor("v_cache", v_cache, "pages page_size kv_heads v_head_dim", k_cache.dtype)
    transposed = check["page_size"] > 0 and check["heads"] % check["page_size"] == 0  # the axis may be kv_heads instead
    note = "a cache [pages, kv_heads, page_size, head_dim] is passed as k_cache.transpose(1, 2)" if transposed else ""
    check.divides("kv_heads", "heads", note)
    _check_paging(check, page_table, cache_seqlens, max_seqlen_k)
    check_scale(check, "q_scale", q_scale, "q", q, check["kv_heads"])
    check_scale(check, "k_scale", k_scale, "k_cache", k_cache, check["kv_heads"])
    check_scale(check, "v_scale", v_scale, "v_cache", v_cache, check["kv_heads"])


def check_latent_cache(
    check: Checker,
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    kv_lora_rank: int,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
) -> None:
    """Checks queries, a paged cache of latents and its page table."""
    check_latents(check, q, kv_cache, kv_lora_rank, q_scale, kv_scale, kv_scale_cache, rope_cache)
    _check_paging(check, page_table, cache_seqlens, max_seqlen_k)


def check_latents(
    check: Checker,
    q: Tensor,
    kv_cache: Tensor,
    kv_lora_rank: int,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
) -> None:
    """Checks queries and a paged cache of latents."""
    grouped = kv_scale_cache is not None or rope_cache is not None
    check.tensor("q", q, "tokens heads latent_dim", HALVES if grouped else FLOATS | FP8)
    if not grouped:
        check.tensor("kv_cache", kv_cache, "pages page_size latent_dim", _cache_dtypes(q))
    check.bind("head_dim", check["latent_dim"], "q")
    width = check["latent_dim"]
    check.require(0 < kv_lora_rank <= width, "kv_lora_rank", f"positive and at most {width}, the width of a latent", kv_lora_rank)
    check_scale(check, "q_scale", q_scale, "q", q, 1)
    if grouped:
        check.bind("kv_lora_rank", kv_lora_rank, "kv_lora_rank")
        check.bind("rope_dim", width - kv_lora_rank, "q behind kv_lora_rank")
        check_latent_groups(check, kv_cache, kv_scale, kv_scale_cache, rope_cache, q)
    else:
        check_scale(check, "kv_scale", kv_scale, "kv_cache", kv_cache, 1)


def check_extension(
    check: Checker, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor | None, cache_seqlens: Tensor, max_seqlen_q: int
) -> None:
    """Checks the offsets of new tokens that extend cached sequences. Call this function after the check of the cache."""
    check_offsets(check, "cu_seqlens_q", cu_seqlens_q, cache_seqlens.shape[0])
    check_offsets(check, "cu_seqlens_kv", cu_seqlens_kv, cache_seqlens.shape[0])
    check.bound("max_seqlen_q", max_seqlen_q)


def check_new_tokens(check: Checker, q: Tensor, cache_seqlens: Tensor, max_seqlen_q: int) -> None:
    """Checks that q holds exactly ``max_seqlen_q`` new tokens of every sequence."""
    check.require(max_seqlen_q >= 1, "max_seqlen_q", "at least 1", max_seqlen_q)
    check.bind("new_tokens", max_seqlen_q, "max_seqlen_q")
    batch, tokens = cache_seqlens.shape[0], q.shape[0]
    if tokens != batch * max_seqlen_q:
        expected = f"of {batch * max_seqlen_q} tokens, max_seqlen_q = {max_seqlen_q} for each length in cache_seqlens [{batch}]"
        check.fail("q", expected, f"{tokens} tokens")


def check_scales(
    check: Checker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    size: str,
) -> None:
    """Checks the scales of fp8 q, k and v: each is one scale for all heads, or one scale for each head.

    ``size`` names the number of heads; call this function once ``size`` is bound."""
    for name, scale, tensor in (("q", q_scale, q), ("k", k_scale, k), ("v", v_scale, v)):
        check_scale(check, f"{name}_scale", scale, name, tensor, check[size], size)


def check_new_tokens_of(check: Checker, name: str, cu_seqlens_q: Tensor | None) -> None:
    """Checks ``cu_seqlens_q``; without it, checks that the number of tokens is a multiple of batch.

    Call this function when ``tokens`` and ``batch`` are bound."""
    tokens, batch = check["tokens"], check["batch"]
    if cu_seqlens_q is not None:
        check_offsets(check, "cu_seqlens_q", cu_seqlens_q, batch, check.source("batch"))
        return
    expected = f"of a multiple of batch = {batch} tokens, as cu_seqlens_q is None"
    check.require(tokens % batch == 0 if batch else tokens == 0, name, expected, f"{tokens} tokens")


def check_scale(
    check: Checker, name: str, scale: Tensor | None, scaled: str, tensor: Tensor, heads: int, size: str = "kv_heads"
) -> None:
    """Checks the scale of an fp8 tensor: float32, one for all heads or one for each head. ``size`` names the number of heads."""
    if scale is None:
        return
    if tensor.dtype not in FP8:
        check.fail(name, f"None, because {scaled} is not fp8 but {describe(tensor.dtype)}", scale)
    check.dtype(name, scale, torch.float32)
    if scale.shape not in {(), (1,), (heads,)}:
        allowed = "[] or [1]" if heads == 1 else f"[], [1] or [{heads}] ({size})"
        check.fail(name, f"of shape {allowed}", list(scale.shape))


def check_values_offsets(
    check: Checker,
    name: str,
    offsets: Tensor | None,
    tokens: int,
    tensor: str,
    longest_name: str = "",
    longest: int | None = None,
    *,
    padded: bool = False,
) -> None:
    """Checks the values of a ``cu_seqlens``: non-decreasing from 0 to the number of tokens, no sequence longer than ``longest``.

    With ``padded`` the last offset may be less than the number of tokens."""
    if offsets is None:
        return
    first, last = offsets[0].item(), offsets[-1].item()
    check.require(first == 0, f"{name}[0]", "0", first)
    ends = 0 <= last <= tokens if padded else last == tokens
    check.require(ends, f"{name}[-1]", f"{'at most ' * padded}{tokens}, the number of tokens in {tensor}", last)
    if len(offsets) > 1:
        lengths = offsets.diff()
        shortest, longest_found = (int(bound) for bound in lengths.aminmax())
        if shortest < 0:
            at = int(lengths.argmin())
            check.fail(name, "non-decreasing", f"{int(offsets[at])} then {int(offsets[at + 1])} at {at}")
        if longest is not None and longest_found > longest:
            check.fail(longest_name, f"at least {longest_found}, the longest sequence of {name}", longest)


def check_values_counts(check: Checker, name: str, counts: Tensor | None, most: int, why: str) -> None:
    """Checks that each of ``counts`` is from 0 to ``most``. A count is the number of leading elements of a row that are used."""
    if counts is None or not counts.numel():
        return
    smallest, largest = (int(bound) for bound in counts.aminmax())
    check.require(smallest >= 0, name, "0 or more", smallest)
    check.require(largest <= most, name, f"at most {most}, {why}", largest)


def check_values_ragged(
    check: Checker, q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Sequence[int] | Tensor | None, max_seqlen: int | None
) -> None:
    """Checks the lengths of whole sequences for prefill: ``cu_seqlens`` and its copy on the host."""
    hint = _read_hint(check, "cu_seqlens_cpu", cu_seqlens_cpu)
    offsets, name = (cu_seqlens, "cu_seqlens") if cu_seqlens is not None else (hint, "cu_seqlens_cpu")
    check_values_offsets(check, name, offsets, q.shape[0], "q", "max_seqlen", max_seqlen, padded=True)
    if hint is not None and cu_seqlens is not None and not (hint.shape == cu_seqlens.shape and bool((hint == cu_seqlens).all())):
        check.fail("cu_seqlens_cpu", f"equal to cu_seqlens, {describe(cu_seqlens.tolist())}", hint.tolist())


def _read_hint(check: Checker, name: str, hint: Sequence[int] | Tensor | None) -> Tensor | None:
    if hint is None:
        return None
    if isinstance(hint, Tensor):
        check.dtype(name, hint, INTS)
        check.require(hint.device.type == "cpu", name, "on the host", f"on {hint.device}")
    elif isinstance(hint, Sequence) and all(type(value) is int for value in hint):
        check.require(all(value.bit_length() < 64 for value in hint), name, "within the range of int64", hint)
        hint = torch.tensor(hint, dtype=torch.int64)
    else:
        check.fail(name, "a sequence of int, a tensor or None", hint, TypeError)
    check.require(hint.dim() == 1 and len(hint) > 0, name, "of shape [batch + 1]", list(hint.shape))
    return hint


def check_values_paging(
    check: Checker,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    max_seqlen_k: int,
    cache: Tensor,
    cache_name: str,
    window_left: int = -1,
    new_tokens: Tensor | int = 0,
) -> None:
    """Checks the values of ``cache_seqlens``, and of the page table entries in use. A tensor in device memory is passed as None,
    and is not checked.

    ``new_tokens``: the number of new tokens of each sequence; 0 if the host does not know it."""
    if cache_seqlens is None or not cache_seqlens.numel():
        return
    shortest, longest = (int(bound) for bound in cache_seqlens.aminmax())
    check.require(shortest >= 0, "cache_seqlens", "0 or more", shortest)
    check.require(longest <= max_seqlen_k, "cache_seqlens", f"at most max_seqlen_k = {max_seqlen_k}", longest)
    if page_table is None or longest == 0:
        return
    pages, page_size = cache.shape[:2]
    starts = torch.arange(0, page_table.shape[1] * page_size, page_size)
    used = starts < cache_seqlens.unsqueeze(1)
    if window_left >= 0:
        used &= ~(hidden_pages(cache_seqlens, new_tokens, window_left, page_table.shape[1], page_size) & (page_table == -1))
    reached = torch.where(used, page_table, 0)
    lowest, highest = reached.aminmax()
    if int(lowest) < 0 or int(highest) >= pages:
        row, column = (int(index) for index in ((reached < 0) | (reached >= pages)).nonzero()[0])
        expected = f"a page of {cache_name}, 0 to {pages - 1}, where cache_seqlens[{row}] = {int(cache_seqlens[row])} reaches"
        check.fail(f"page_table[{row}, {column}]", expected, int(page_table[row, column]))


def check_values_extension(
    check: Checker,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    cache_seqlens: Tensor | None,
    max_seqlen_q: int,
    is_causal: bool,
) -> None:
    """Checks the numbers of new tokens against the lengths of the sequences that these tokens extend."""
    check_values_offsets(check, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "q", "max_seqlen_q", max_seqlen_q, padded=True)
    if cache_seqlens is None:
        return
    if cu_seqlens_kv is not None:
        kv_lens = cu_seqlens_kv.diff()
        check.require(int(cu_seqlens_kv[0]) == 0, "cu_seqlens_kv[0]", "0", int(cu_seqlens_kv[0]))
        if not torch.equal(kv_lens, cache_seqlens):
            check.fail("cu_seqlens_kv", f"the running sums of cache_seqlens, {cache_seqlens.tolist()}", cu_seqlens_kv.tolist())
    if is_causal and cu_seqlens_q is not None:
        q_lens = cu_seqlens_q.diff()
        if (q_lens > cache_seqlens).any():
            at = int((q_lens - cache_seqlens).argmax())
            expected = f"at least {int(q_lens[at])}, because it includes the new tokens that cu_seqlens_q gives sequence {at}"
            check.fail(f"cache_seqlens[{at}]", expected, int(cache_seqlens[at]))
