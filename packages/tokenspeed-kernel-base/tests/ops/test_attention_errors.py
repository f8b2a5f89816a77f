"""Tests wrong calls of the attention operators: each raises an error that names the argument, the expected value and the actual
value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.attention.attn_merge_state import attn_merge_state
from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_extend_with_kvcache import mha_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
from tokenspeed_kernel_base.ops.attention.mha_with_kvcache import mha_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_extend_with_kvcache import mla_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_prefill import mla_prefill

E4M3 = torch.float8_e4m3fn


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill() -> dict[str, Any]:
    return {
        "q": torch.zeros(5, 4, 8),
        "k": torch.zeros(5, 2, 8),
        "v": torch.zeros(5, 2, 6),
        "cu_seqlens": ints(0, 2, 5),
    }


def latent_prefill() -> dict[str, Any]:
    return {**prefill(), "k": torch.zeros(5, 4, 8), "v": torch.zeros(5, 4, 6)}


def paged() -> dict[str, Any]:
    return {"page_table": ints(0, 1, 2, -1).view(2, 2), "cache_seqlens": ints(7, 3), "max_seqlen_k": 8}


def decode() -> dict[str, Any]:
    return {"q": torch.zeros(2, 4, 8), "k_cache": torch.zeros(3, 4, 2, 8), "v_cache": torch.zeros(3, 4, 2, 6), **paged()}


def stretch() -> dict[str, Any]:
    return {"cu_seqlens_q": ints(0, 4, 6), "cu_seqlens_kv": ints(0, 7, 10), "max_seqlen_q": 4, "is_causal": True}


def extend() -> dict[str, Any]:
    return {**decode(), **stretch(), "q": torch.zeros(6, 4, 8)}


def mixed() -> dict[str, Any]:
    left_out = ("cu_seqlens_kv", "is_causal")
    return {name: value for name, value in extend().items() if name not in left_out}


def latent_decode() -> dict[str, Any]:
    return {"q": torch.zeros(2, 4, 8), "kv_cache": torch.zeros(3, 4, 8), **paged(), "kv_lora_rank": 6, "softmax_scale": 0.5}


def latent_extend() -> dict[str, Any]:
    return {**latent_decode(), **stretch(), "q": torch.zeros(6, 4, 8)}


def merge() -> dict[str, Any]:
    out, lse = torch.zeros(3, 2, 4), torch.zeros(3, 2)
    return {"out_a": out, "lse_a": lse, "out_b": out.clone(), "lse_b": lse.clone()}


BASES: dict[Any, Callable[[], dict[str, Any]]] = {
    mha_prefill: prefill,
    mha_decode_with_kvcache: decode,
    mha_extend_with_kvcache: extend,
    mha_with_kvcache: mixed,
    mla_prefill: latent_prefill,
    mla_decode_with_kvcache: latent_decode,
    mla_extend_with_kvcache: latent_extend,
    attn_merge_state: merge,
}
PREFILLS = [mha_prefill, mla_prefill]
MHA_PAGED = [mha_decode_with_kvcache, mha_extend_with_kvcache, mha_with_kvcache]
MHA = [mha_prefill, *MHA_PAGED]
MLA_PAGED = [mla_decode_with_kvcache, mla_extend_with_kvcache]
PAGED = MHA_PAGED + MLA_PAGED
DECODES = [mha_decode_with_kvcache, mla_decode_with_kvcache]
EXTENDS = [mha_extend_with_kvcache, mla_extend_with_kvcache]
STRETCHES = [*EXTENDS, mha_with_kvcache]
ALL = PREFILLS + PAGED


def fp8(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda base: {name: base[name].to(E4M3) for name in names}


# Each entry: the functions, the changed argument, the error, and the error's message.
WRONG: list[tuple[list[Any], Any, Any, str]] = [
    # shapes and dtypes of q, k, v
    (ALL, {"q": torch.zeros(5, 4, 8, dtype=torch.int32)}, TypeError, "q must be a tensor of .*bfloat16.*got int32"),
    (PREFILLS, {"q": torch.zeros(5, 4, 8).to(E4M3)}, TypeError, "k must be a tensor of float8_e4m3fn, got float32"),
    (PREFILLS, {"q_scale": torch.tensor(1.0)}, ValueError, "q_scale must be None, because q is not fp8 but float32"),
    (
        PREFILLS,
        lambda base: {**fp8("q", "k", "v")(base), "k_scale": torch.ones(3)},
        ValueError,
        r"k_scale must be of shape \[\], \[1\] or \[.\] \(.*heads\), got \[3\]",
    ),
    (
        PREFILLS,
        lambda base: {**fp8("q", "k", "v")(base), "v_scale": torch.ones(1, dtype=torch.float64)},
        TypeError,
        "v_scale must be a tensor of float32, got float64",
    ),
    (ALL, {"q": torch.zeros(5, 32)}, ValueError, r"q must be of shape \[tokens, heads, .*got \[5, 32\]"),
    (ALL, {"q": None}, TypeError, "q must be a tensor, got NoneType"),
    (ALL, {"q": [[0.0]]}, TypeError, "q must be a tensor, got list"),
    (PREFILLS, {"k": torch.zeros(5, 4, 8, dtype=torch.float64)}, TypeError, "k must be a tensor of float32, got float64"),
    (PREFILLS, {"v": torch.zeros(5, 4, 6, dtype=torch.float16)}, TypeError, "v must be a tensor of float32, got float16"),
    (PREFILLS, {"k": torch.zeros(4, 4, 8)}, ValueError, r"k must be .* tokens is 5 in q, got \[4, 4, 8\]"),
    (PREFILLS, {"k": torch.zeros(5, 4, 7)}, ValueError, r"k must be .* head_dim is 8 in q, got \[5, 4, 7\]"),
    ([mha_prefill], {"v": torch.zeros(5, 1, 6)}, ValueError, r"v must be .* kv_heads is 2 in k, got \[5, 1, 6\]"),
    ([mla_prefill], {"k": torch.zeros(5, 2, 8)}, ValueError, r"k must be .* heads is 4 in q, got \[5, 2, 8\]"),
    ([mla_prefill], {"v": torch.zeros(5, 2, 6)}, ValueError, r"v must be .* heads is 4 in q, got \[5, 2, 6\]"),
    (
        [mha_prefill],
        {"k": torch.zeros(5, 3, 8), "v": torch.zeros(5, 3, 6)},
        ValueError,
        "q must be such that heads is a multiple of kv_heads = 3 of k, got heads = 4",
    ),
    ([mha_prefill], {"k": torch.zeros(5, 0, 8), "v": torch.zeros(5, 0, 6)}, ValueError, "a multiple of kv_heads = 0 of k"),
    ([mha_prefill], {"q": torch.zeros(5, 4, 0), "k": torch.zeros(5, 2, 0)}, ValueError, "head_dim of q must be positive, got 0"),
    # options
    (ALL, {"window_left": -2}, ValueError, r"window_left must be -1 \(unlimited\) or a number of tokens, got -2"),
    (ALL, {"window_left": 1.5}, TypeError, "window_left must be int, got float"),
    (ALL, {"window_left": None}, TypeError, "window_left must be int, got NoneType"),
    (ALL, {"logit_cap": -1.0}, ValueError, r"logit_cap must be 0 \(off\) or positive and finite, got -1.0"),
    (ALL, {"logit_cap": float("nan")}, ValueError, "logit_cap must be .*got nan"),
    (ALL, {"logit_cap": float("inf")}, ValueError, "logit_cap must be .*got inf"),
    (ALL, {"softmax_scale": 0.0}, ValueError, "softmax_scale must be positive and finite, got 0.0"),
    (ALL, {"softmax_scale": float("nan")}, ValueError, "softmax_scale must be positive and finite, got nan"),
    (MLA_PAGED, {"softmax_scale": None}, TypeError, "softmax_scale must be float, got NoneType"),
    (MHA, {"sinks": torch.zeros(2)}, ValueError, r"sinks must be of shape \[heads\] where heads is 4 in q, got \[2\]"),
    (MHA, {"sinks": torch.zeros(4, 1)}, ValueError, r"sinks must be of shape \[heads\], got \[4, 1\]"),
    (MHA, {"sinks": torch.zeros(4, dtype=torch.int32)}, TypeError, "sinks must be a tensor of .*got int32"),
    (ALL, {"return_lse": 1}, TypeError, "return_lse must be bool, got int"),
    (EXTENDS, {"is_causal": None}, TypeError, "is_causal must be bool, got NoneType"),
    (MLA_PAGED, {"kv_lora_rank": 0}, ValueError, "kv_lora_rank must be positive and at most 8, the width of a latent, got 0"),
    (MLA_PAGED, {"kv_lora_rank": 9}, ValueError, "kv_lora_rank must be positive and at most 8, the width of a latent, got 9"),
    # whole sequences
    (PREFILLS, {"cu_seqlens": torch.tensor([0, 5])}, TypeError, "cu_seqlens must be a tensor of int32, got int64"),
    (PREFILLS, {"cu_seqlens": ints()}, ValueError, r"cu_seqlens must be of shape \[batch \+ 1\], got \[0\]"),
    (PREFILLS, {"cu_seqlens": ints(0, 5).view(1, 2)}, ValueError, r"cu_seqlens must be of shape \[batch\+1\], got \[1, 2\]"),
    (PREFILLS, {"cu_seqlens": ints(1, 5)}, ValueError, r"cu_seqlens\[0\] must be 0, got 1"),
    (PREFILLS, {"cu_seqlens": ints(0, 6)}, ValueError, r"cu_seqlens\[-1\] must be at most 5, the number of tokens in q, got 6"),
    (PREFILLS, {"cu_seqlens": ints(0, 4, 2, 5)}, ValueError, "cu_seqlens must be non-decreasing, got 4 then 2 at 1"),
    (PREFILLS, {"max_seqlen": 2}, ValueError, "max_seqlen must be at least 3, the longest sequence of cu_seqlens, got 2"),
    (PREFILLS, {"max_seqlen": -1}, ValueError, "max_seqlen must be at least 0, got -1"),
    (
        PREFILLS,
        {"cu_seqlens_cpu": [0, 3, 5]},
        ValueError,
        r"cu_seqlens_cpu must be equal to cu_seqlens, \[0, 2, 5\], got \[0, 3, 5\]",
    ),
    (PREFILLS, {"cu_seqlens_cpu": [0, 5]}, ValueError, r"cu_seqlens_cpu must be equal to cu_seqlens, .*got \[0, 5\]"),
    (PREFILLS, {"cu_seqlens_cpu": []}, ValueError, r"cu_seqlens_cpu must be of shape \[batch \+ 1\], got \[0\]"),
    (PREFILLS, {"cu_seqlens_cpu": [0, 2.0, 5]}, TypeError, "cu_seqlens_cpu must be a sequence of int, a tensor or None"),
    (PREFILLS, {"cu_seqlens_cpu": 5}, TypeError, "cu_seqlens_cpu must be a sequence of int, a tensor or None, got int 5"),
    (PREFILLS, {"cu_seqlens_cpu": torch.zeros(3)}, TypeError, "cu_seqlens_cpu must be a tensor of int32 or int64, got float32"),
    (PREFILLS, {"cu_seqlens_cpu": ints(0, 2, 5).to("meta")}, ValueError, "cu_seqlens_cpu must be on the host, got on meta"),
    # caches
    (MHA_PAGED, {"k_cache": torch.zeros(3, 4, 2, 7)}, ValueError, r"k_cache must be .* head_dim is 8 in q, got \[3, 4, 2, 7\]"),
    (
        MHA_PAGED,
        {"k_cache": torch.zeros(12, 2, 8)},
        ValueError,
        r"k_cache must be of shape \[pages, page_size, kv_heads, head_dim\]",
    ),
    (MHA_PAGED, {"v_cache": torch.zeros(2, 4, 2, 6)}, ValueError, r"v_cache must be .* pages is 3 in k_cache"),
    (MHA_PAGED, {"v_cache": torch.zeros(3, 8, 2, 6)}, ValueError, r"v_cache must be .* page_size is 4 in k_cache"),
    (MHA_PAGED, {"v_cache": torch.zeros(3, 4, 1, 6)}, ValueError, r"v_cache must be .* kv_heads is 2 in k_cache"),
    (MHA_PAGED, {"q": torch.zeros(2, 3, 8)}, ValueError, "q must be such that heads is a multiple of kv_heads = 2 of k_cache"),
    (MHA_PAGED, {"k_cache": torch.zeros(3, 4, 2, 8).half()}, TypeError, "k_cache must be a tensor of .*float32.*got float16"),
    (MHA_PAGED, {"v_cache": torch.zeros(3, 4, 2, 6).to(E4M3)}, TypeError, "v_cache must be a tensor of float32, got float8_e4m3fn"),
    (MHA_PAGED, fp8("q"), TypeError, "k_cache must be a tensor of float8.*got float32"),
    (
        MHA_PAGED,
        {"k_cache": torch.zeros(3, 0, 2, 8), "v_cache": torch.zeros(3, 0, 2, 6)},
        ValueError,
        "page_size .* positive, got 0",
    ),
    (MLA_PAGED, {"kv_cache": torch.zeros(3, 4, 7)}, ValueError, r"kv_cache must be .* latent_dim is 8 in q, got \[3, 4, 7\]"),
    (MLA_PAGED, {"kv_cache": torch.zeros(3, 4, 1, 8)}, ValueError, r"kv_cache must be of shape \[pages, page_size, latent_dim\]"),
    (MLA_PAGED, {"kv_cache": torch.zeros(3, 4, 8).half()}, TypeError, "kv_cache must be a tensor of .*float32.*got float16"),
    (MLA_PAGED, fp8("q"), TypeError, "kv_cache must be a tensor of float8.*got float32"),
    (MLA_PAGED, {"kv_cache": torch.zeros(3, 0, 8)}, ValueError, "page_size of the cache must be positive, got 0"),
    # scales
    (
        PAGED,
        {"q_scale": torch.ones(1)},
        ValueError,
        "q_scale must be None, because q is not fp8 but float32, got a float32 tensor of shape",
    ),
    (MHA_PAGED, {"k_scale": torch.ones(1)}, ValueError, "k_scale must be None, because k_cache is not fp8"),
    (MHA_PAGED, {"v_scale": torch.ones(1)}, ValueError, "v_scale must be None, because v_cache is not fp8"),
    (MLA_PAGED, {"kv_scale": torch.ones(1)}, ValueError, "kv_scale must be None, because kv_cache is not fp8"),
    (
        MHA_PAGED,
        lambda base: {**fp8("k_cache", "v_cache")(base), "k_scale": torch.ones(4)},
        ValueError,
        r"k_scale must be of shape \[\], \[1\] or \[2\] \(kv_heads\), got \[4\]",
    ),
    (
        MHA_PAGED,
        lambda base: {**fp8("k_cache", "v_cache")(base), "v_scale": torch.ones(2, 1)},
        ValueError,
        r"v_scale must be of shape .*got \[2, 1\]",
    ),
    (
        MHA_PAGED,
        lambda base: {**fp8("q", "k_cache", "v_cache")(base), "q_scale": torch.ones(1).half()},
        TypeError,
        "q_scale must be a tensor of float32, got float16",
    ),
    (
        MLA_PAGED,
        lambda base: {**fp8("kv_cache")(base), "kv_scale": torch.ones(4)},
        ValueError,
        r"kv_scale must be of shape \[\] or \[1\], got \[4\]",
    ),
    (PAGED, {"q_scale": 1.0}, TypeError, "q_scale must be a tensor or None, got float"),
    # pages and lengths
    (PAGED, {"page_table": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "page_table must be a tensor of int32, got int64"),
    (PAGED, {"page_table": ints(0, 1)}, ValueError, r"page_table must be of shape \[batch, max_pages\], got \[2\]"),
    (PAGED, {"page_table": ints(0, 1).view(1, 2)}, ValueError, r"page_table must be .* batch is 2 in cache_seqlens, got \[1, 2\]"),
    (PAGED, {"cache_seqlens": torch.tensor([7, 3])}, TypeError, "cache_seqlens must be a tensor of int32, got int64"),
    (
        PAGED,
        {"max_seqlen_k": 9},
        ValueError,
        "max_seqlen_k must be at most 8, because page_table has 2 pages of 4 tokens for each sequence, got 9",
    ),
    (PAGED, {"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0, got -1"),
    (PAGED, {"max_seqlen_k": 6}, ValueError, "cache_seqlens must be at most max_seqlen_k = 6, got 7"),
    (PAGED, {"max_seqlen_k": None}, TypeError, "max_seqlen_k must be int, got NoneType"),
    (PAGED, {"cache_seqlens": ints(9, 3)}, ValueError, "cache_seqlens must be at most max_seqlen_k = 8, got 9"),
    (PAGED, {"cache_seqlens": ints(7, -1)}, ValueError, "cache_seqlens must be 0 or more, got -1"),
    (
        PAGED,
        {"page_table": ints(0, 3, 2, -1).view(2, 2)},
        ValueError,
        r"page_table\[0, 1\] must be a page of kv?_cache, 0 to 2, where cache_seqlens\[0\] = 7 reaches, got 3",
    ),
    (PAGED, {"page_table": ints(0, 1, -1, -1).view(2, 2)}, ValueError, r"page_table\[1, 0\] must be a page of .*got -1"),
    (DECODES, {"cache_seqlens": ints(7, 5)}, ValueError, r"page_table\[1, 1\] must be a page of .*cache_seqlens\[1\] = 5 .*got -1"),
    # new tokens
    (DECODES, {"max_seqlen_q": 0}, ValueError, "max_seqlen_q must be at least 1, got 0"),
    (DECODES, {"max_seqlen_q": 2}, ValueError, r"q must be of 4 tokens, max_seqlen_q = 2 for each .* \[2\], got 2 tokens"),
    (DECODES, {"q": torch.zeros(3, 4, 8)}, ValueError, "q must be of 2 tokens, max_seqlen_q = 1 .*got 3 tokens"),
    (STRETCHES, {"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
    (STRETCHES, {"max_seqlen_q": 3}, ValueError, "max_seqlen_q must be at least 4, the longest sequence of cu_seqlens_q, got 3"),
    (STRETCHES, {"cu_seqlens_q": ints(0, 6)}, ValueError, r"cu_seqlens_q must be .* batch\+1 is 3 in cache_seqlens, got \[2\]"),
    (STRETCHES, {"cu_seqlens_q": ints(1, 4, 6)}, ValueError, r"cu_seqlens_q\[0\] must be 0, got 1"),
    (
        STRETCHES,
        {"cu_seqlens_q": ints(0, 4, 7)},
        ValueError,
        r"cu_seqlens_q\[-1\] must be at most 6, the number of tokens in q, got 7",
    ),
    (
        STRETCHES,
        {"cu_seqlens_q": ints(0, 8, 6), "max_seqlen_q": 9},
        ValueError,
        "cu_seqlens_q must be non-decreasing, got 8 then 6 at 1",
    ),
    (STRETCHES, {"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a tensor, got NoneType"),
    (EXTENDS, {"cu_seqlens_kv": ints(0, 10)}, ValueError, r"cu_seqlens_kv must be .* batch\+1 is 3 in cache_seqlens, got \[2\]"),
    (EXTENDS, {"cu_seqlens_kv": torch.tensor([0, 7, 10])}, TypeError, "cu_seqlens_kv must be a tensor of int32, got int64"),
    (EXTENDS, {"cu_seqlens_kv": ints(1, 8, 11)}, ValueError, r"cu_seqlens_kv\[0\] must be 0, got 1"),
    (
        EXTENDS,
        {"cu_seqlens_kv": ints(0, 6, 10)},
        ValueError,
        r"cu_seqlens_kv must be the running sums of cache_seqlens, \[7, 3\], got \[0, 6, 10\]",
    ),
    (
        STRETCHES,
        {"cu_seqlens_q": ints(0, 2, 6)},
        ValueError,
        r"cache_seqlens\[1\] must be at least 4, because it includes the new tokens that cu_seqlens_q gives sequence 1, got 3",
    ),
    # outputs
    (ALL, {"out": torch.zeros(5, 4, 9)}, ValueError, r"out must have shape \["),
    (ALL, {"out": torch.zeros(5, 4, 6).half()}, TypeError, "out must be float32, got a float16 tensor"),
    # merging
    ([attn_merge_state], {"out_a": torch.zeros(3, 2, 4).to(E4M3)}, TypeError, "out_a must be a tensor of .*got float8_e4m3fn"),
    (
        [attn_merge_state],
        {"out_b": torch.zeros(3, 2, 5)},
        ValueError,
        r"out_b must be of shape \[3, 2, 4\] like out_a, got \[3, 2, 5\]",
    ),
    ([attn_merge_state], {"out_b": torch.zeros(3, 2, 4).half()}, TypeError, "out_b must be a tensor of float32, got float16"),
    ([attn_merge_state], {"lse_a": torch.zeros(3, 2, 1)}, ValueError, r"lse_a must be of shape \[tokens, heads\], got \[3, 2, 1\]"),
    ([attn_merge_state], {"lse_a": torch.zeros(3, 2).double()}, TypeError, "lse_a must be a tensor of float32, got float64"),
    ([attn_merge_state], {"lse_b": torch.zeros(2, 3)}, ValueError, r"lse_b must be of shape \[3, 2\] like lse_a, got \[2, 3\]"),
    ([attn_merge_state], {"lse": torch.zeros(3)}, ValueError, r"lse must have shape \[3, 2\], got .*\[3\]"),
]
TABLE = [(function, *rest) for functions, *rest in WRONG for function in functions]


@pytest.mark.parametrize(
    ("function", "change", "error", "message"), TABLE, ids=[f"{f.operator.mode}: {message}" for f, _, _, message in TABLE]
)
def test_wrong_calls_are_refused(function: Any, change: Any, error: type[Exception], message: str) -> None:
    arguments = BASES[function]()
    function(**arguments)
    arguments.update(change(arguments) if callable(change) else change)
    with pytest.raises(error, match=f"^{function.operator.mode}: .*{message}"):
        function(**arguments)


@pytest.mark.parametrize("function", PAGED)
def test_values_are_checked_again_when_they_are_written_to(function: Any) -> None:
    arguments = BASES[function]()
    function(**arguments)
    arguments["cache_seqlens"][1] = 9
    with pytest.raises(ValueError, match=r"cache_seqlens .* max_seqlen_k = 8, got 9"):
        function(**arguments)
    arguments["cache_seqlens"][1] = 3
    function(**arguments)
    arguments["page_table"][0, 0] = 77
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] must be a page of .*got 77"):
        function(**arguments)


@pytest.mark.parametrize("function", EXTENDS)
def test_more_queries_than_keys_are_refused_only_where_causal(function: Any) -> None:
    arguments = {**BASES[function](), "cu_seqlens_q": ints(0, 2, 6), "is_causal": False}
    out = function(**arguments)
    assert out.shape[0] == 6


@pytest.mark.parametrize("function", PAGED)
def test_an_empty_batch_may_have_no_pages(function: Any) -> None:
    arguments = BASES[function]()
    for name in ("q", "k_cache", "v_cache", "kv_cache", "cache_seqlens", "page_table"):
        if name in arguments:
            arguments[name] = arguments[name][:0]
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if name in arguments:
            arguments[name] = ints(0)
    arguments["page_table"] = arguments["page_table"][:, :0]
    assert function(**arguments).shape[0] == 0


@pytest.mark.parametrize("function", MHA_PAGED, ids=lambda function: function.__name__)
def test_pages_that_the_window_hides_may_be_freed(function: Any) -> None:
    arguments = BASES[function]() | {"window_left": 1}
    if function is not mha_decode_with_kvcache:
        arguments |= {"q": torch.zeros(3, 4, 8), "cu_seqlens_q": ints(0, 2, 3), "max_seqlen_q": 2}
    whole = function(**arguments)
    freed = arguments | {"page_table": ints(-1, 1, 2, -1).view(2, 2)}
    assert torch.equal(function(**freed), whole)
    message = r"page_table\[0, 0\] must be a page of k_cache, 0 to 2, where cache_seqlens\[0\] = 7 reaches, got {}"
    for others, got in [
        ({"window_left": 6}, "-1"),
        ({"window_left": -1}, "-1"),
        ({"page_table": ints(-2, 1, 2, -1).view(2, 2)}, "-2"),
        ({"page_table": ints(3, 1, 2, -1).view(2, 2)}, "3"),
    ]:
        with pytest.raises(ValueError, match=message.format(got)):
            function(**{**freed, **others})


def test_a_page_is_hidden_only_from_all_new_tokens() -> None:
    arguments = decode() | {"q": torch.zeros(4, 4, 8), "max_seqlen_q": 2, "page_table": ints(-1, 1, 2, -1).view(2, 2)}
    mha_decode_with_kvcache(**arguments, window_left=1)  # the older new token is at position 5, and sees positions 4 and 5
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] must be a page of"):
        mha_decode_with_kvcache(**arguments, window_left=2)


@pytest.mark.parametrize("function", MLA_PAGED, ids=lambda function: function.__name__)
def test_without_a_window_no_page_is_free(function: Any) -> None:
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] must be a page of kv_cache"):
        function(**BASES[function]() | {"page_table": ints(-1, 1, 2, -1).view(2, 2)})
