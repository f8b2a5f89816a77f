"""Tests the attention operators against scalar loops, against a dense formula in float64, and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.ops.attention.attn_merge_state import attn_merge_state
from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_extend_with_kvcache import mha_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
from tokenspeed_kernel_base.ops.attention.mha_with_kvcache import mha_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_extend_with_kvcache import mla_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_prefill import mla_prefill
from tokenspeed_kernel_base.signature import FormatSignature

OPERATORS: list[Any] = [
    attn_merge_state,
    mha_decode_with_kvcache,
    mha_extend_with_kvcache,
    mha_prefill,
    mha_with_kvcache,
    mla_decode_with_kvcache,
    mla_extend_with_kvcache,
    mla_prefill,
]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SMALL = [(f, case) for f in OPERATORS for case in f.operator.all_cases() if not case.large]
WITH_SEQUENCES = [x for x in SMALL if x[0] is not attn_merge_state and "no sequences" not in x[1].name]
TOLERANCE = {
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
    torch.float16: {"rtol": 2**-11, "atol": 1e-5},
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
}


def name_of(function: Any, case: Case) -> str:
    return f"{function.operator.mode}: {case.name}"


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def pair(result: Any) -> tuple[Tensor, Tensor]:
    out, lse = result
    return out, lse


def assert_close(got: Tensor, wanted: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), **(tolerance or TOLERANCE[got.dtype]))


def into_pages(tokens: Tensor, lengths: list[int], page_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Stores sequences of different lengths in a cache whose pages are in random order. Unused slots hold NaN; unused page table
    entries are -7."""
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((len(order), page_size, *tokens.shape[1:]), torch.nan).to(tokens.dtype)
    table = torch.full((len(lengths), max(counts, default=0) + 2), -7, dtype=torch.int32)
    rest = iter(tokens)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for column in range(count):
            table[row, column] = order.pop()
        for position in range(length):
            cache[table[row, position // page_size], position % page_size] = next(rest)
    return cache, table


# -- scalar loops ----------------------------------------------------------------------------------------------------------------


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention of one sequence in Python floats: q ``[q_len, heads, dim]``, k and v ``[kv_len, kv_heads, dim]``. The last
    query is at the position of the last key."""
    (q_len, heads, _), (kv_len, kv_heads, v_dim) = q.shape, v.shape
    out = torch.zeros(q_len, heads, v_dim, dtype=torch.float64)
    lse = torch.full((q_len, heads), -math.inf, dtype=torch.float64)
    for i in range(q_len):
        position = kv_len - q_len + i
        for h in range(heads):
            scores = {}
            for j in range(kv_len):
                if (causal and j > position) or (window_left >= 0 and j < position - window_left):
                    continue
                score = scale * sum(a * b for a, b in zip(q[i, h].tolist(), k[j, h * kv_heads // heads].tolist(), strict=True))
                scores[j] = logit_cap * math.tanh(score / logit_cap) if logit_cap else score
            total = sum(math.exp(s) for s in scores.values()) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
            if total:
                lse[i, h] = math.log(total)
            for j, score in scores.items():
                out[i, h] += math.exp(score) / total * v[j, h * kv_heads // heads].double()
    return out, lse


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a few short sequences with cached and new tokens, and all options."""
    kv_heads = draw(st.integers(1, 2))
    kv_lens = draw(st.lists(st.integers(0, 6), max_size=3))
    heads = kv_heads * draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dim, v_dim, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 5)), sum(kv_lens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "kv_lens": kv_lens,
        "q_lens": [draw(st.integers(0, length)) for length in kv_lens],
        "page_size": draw(st.integers(1, 4)),
        "q": normal(tokens, heads, dim),
        "k": normal(tokens, kv_heads, dim),
        "v": normal(tokens, kv_heads, v_dim),
        "options": {
            "window_left": draw(st.sampled_from([-1, 0, 1, 2, 127])),
            "logit_cap": draw(st.sampled_from([0.0, 0.7, 30.0])),
            "sinks": normal(heads) if draw(st.booleans()) else None,
        },
        "softmax_scale": draw(st.sampled_from([None, 0.3, 2.0])),
    }


def expected(problem: dict[str, Any], q_lens: list[int], causal: bool) -> tuple[Tensor, Tensor]:
    """Computes the results of the newest ``q_lens`` tokens of each sequence by scalar loops, and concatenates them."""
    q, k, v = problem["q"], problem["k"], problem["v"]
    scale = problem["softmax_scale"] or 1 / math.sqrt(q.shape[-1])
    parts, end = [(q.new_empty(0, q.shape[1], v.shape[2]), q.new_empty(0, q.shape[1]))], 0
    for q_len, kv_len in zip(q_lens, problem["kv_lens"], strict=True):
        start, end = end, end + kv_len
        parts.append(by_hand(q[end - q_len : end], k[start:end], v[start:end], scale, causal, **problem["options"]))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def newest(problem: dict[str, Any], q_lens: list[int]) -> Tensor:
    """Returns the queries of the newest tokens."""
    sequences = problem["q"].split(problem["kv_lens"]) if problem["kv_lens"] else []
    chosen = [s[len(s) - n :] for s, n in zip(sequences, q_lens, strict=True)]
    return torch.cat([problem["q"][:0], *chosen])


@settings(max_examples=40, deadline=None)
@given(problems())
def test_prefill_by_hand(problem: dict[str, Any]) -> None:
    got = mha_prefill(
        problem["q"],
        problem["k"],
        problem["v"],
        offsets(*problem["kv_lens"]),
        return_lse=True,
        softmax_scale=problem["softmax_scale"],
        **problem["options"],
    )
    out, lse = expected(problem, problem["kv_lens"], True)
    assert_close(pair(got)[0], out)
    assert_close(pair(got)[1], lse, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans(), st.booleans())
def test_extend_by_hand(problem: dict[str, Any], causal: bool, sums: bool) -> None:
    kv_lens, q_lens = problem["kv_lens"], problem["q_lens"]
    k_cache, page_table = into_pages(problem["k"], kv_lens, problem["page_size"])
    v_cache, _ = into_pages(problem["v"], kv_lens, problem["page_size"])
    got = mha_extend_with_kvcache(
        newest(problem, q_lens),
        offsets(*q_lens),
        offsets(*kv_lens) if sums else None,
        k_cache,
        v_cache,
        page_table,
        ints(*kv_lens),
        max(q_lens, default=0),
        max(kv_lens, default=0),
        is_causal=causal,
        return_lse=True,
        softmax_scale=problem["softmax_scale"],
        **problem["options"],
    )
    out, lse = expected(problem, q_lens, causal)
    assert_close(pair(got)[0], out)
    assert_close(pair(got)[1], lse, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(1, 3))
def test_decode_by_hand(problem: dict[str, Any], new: int) -> None:
    kv_lens = problem["kv_lens"]
    k_cache, page_table = into_pages(problem["k"], kv_lens, problem["page_size"])
    v_cache, _ = into_pages(problem["v"], kv_lens, problem["page_size"])
    # If a sequence has fewer tokens than new tokens, queries are put before its own. These queries attend to the sink only.
    held = [min(new, length) for length in kv_lens]
    queries = newest(problem, held).split(held) if held else []
    q = torch.cat([problem["q"][:0], *(torch.cat([s.new_ones(new - len(s), *s.shape[1:]), s]) for s in queries)])
    got = mha_decode_with_kvcache(
        q,
        k_cache,
        v_cache,
        page_table,
        ints(*kv_lens),
        page_table.shape[1] * problem["page_size"],
        max_seqlen_q=new,
        return_lse=True,
        softmax_scale=problem["softmax_scale"],
        **problem["options"],
    )
    out, lse = expected({**problem, "q": problem["q"]}, held, True)
    present = torch.cat([torch.zeros(0, dtype=torch.bool), *(torch.arange(new) >= new - n for n in held)])
    assert_close(pair(got)[0][present], out)
    assert_close(pair(got)[1][present], lse, rtol=1e-6, atol=1e-6)
    assert (pair(got)[0][~present] == 0).all()
    sinks = problem["options"]["sinks"]
    unseen = pair(got)[1][~present].double()
    assert_close(unseen, torch.full_like(unseen, -math.inf) if sinks is None else sinks.expand_as(unseen), rtol=1e-6, atol=1e-6)


# -- every case against a dense formula ------------------------------------------------------------------------------------------


def hide_by_tree(hidden: Tensor, masks: list[int], window_left: int) -> None:
    """Changes the mask of hidden keys, ``[queries, keys]``, in the rows of queries that are nodes of a draft tree."""
    first = hidden.shape[1] - len(masks)
    for row, mask in zip(hidden, masks, strict=True):
        seen = [bool(mask >> i & 1) for i in range(len(masks))]
        if any(seen):
            row[first:] = ~torch.tensor(seen)
            row[:first] = (torch.arange(first) < first + sum(seen) - 1 - window_left) & (window_left >= 0)


def dense(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Any], tree_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes one sequence in float64. KV heads are repeated for their GQA group, all scores are computed at once, and the sink is
    an additional column of scores."""
    (q_len, heads, dim), kv_len = q.shape, len(k)
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scale = options.get("softmax_scale") or dim**-0.5
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if options.get("logit_cap"):
        scores = options["logit_cap"] * torch.tanh(scores / options["logit_cap"])
    position, key = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
    hidden = (key > position) & causal
    if options.get("window_left", -1) >= 0:
        hidden |= key < position - options["window_left"]
    if tree_mask is not None and q_len <= 64:
        hide_by_tree(hidden, tree_mask.tolist(), options.get("window_left", -1))
    scores[:, hidden] = -math.inf
    sinks = options.get("sinks")
    column = torch.full((heads,), -math.inf, dtype=torch.float64) if sinks is None else sinks.double()
    scores = torch.cat([column.view(heads, 1, 1).expand(heads, q_len, 1), scores], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., 1:]
    return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1).T


def scaled(x: Tensor, scale: Tensor | None, per_head: int = 1) -> Tensor:
    if scale is None:
        return x.double()
    factor = scale.double().flatten()
    return x.double() * (factor.repeat_interleave(per_head) if len(factor) > 1 else factor).unsqueeze(-1)


def latents_of(a: dict[str, Any]) -> Tensor:
    """Returns the cache as one tensor of latents and rotary parts. A cache with scales is dequantised."""
    scales = a.get("kv_scale_cache")
    if scales is None:
        return a["kv_cache"]
    return torch.cat((a["kv_cache"].double() * scales.double().repeat_interleave(128, -1), a["rope_cache"].double()), -1)


def dense_case(function: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Computes the expected result of a call, for any operator with sequences."""
    a = function.operator.complete(arguments)
    q_all = a["q"]
    if "k" in a:
        new = a["cu_seqlens"].diff().tolist()
        lengths = new if a.get("cu_seqlens_kv") is None else a["cu_seqlens_kv"].diff().tolist()
        q_all = scaled(q_all, a["q_scale"], q_all.shape[1] // a["k"].shape[1])
        k, v = scaled(a["k"], a["k_scale"]), scaled(a["v"], a["v_scale"])
        keys, values = (x[: sum(lengths)].split(lengths) for x in (k, v))
        causal = a.get("is_causal", True)
    else:
        latent = "kv_cache" in a
        k_cache = latents_of(a).unsqueeze(2) if latent else a["k_cache"]
        v_cache = k_cache[..., : a["kv_lora_rank"]] if latent else a["v_cache"]
        k_scale, v_scale = (a["kv_scale"], a["kv_scale"]) if latent else (a["k_scale"], a["v_scale"])
        q_all = scaled(q_all, a["q_scale"], q_all.shape[1] // k_cache.shape[2])
        keys, values = [], []
        for row, length in zip(a["page_table"].tolist(), a["cache_seqlens"].tolist(), strict=True):
            slots = [(row[j // k_cache.shape[1]], j % k_cache.shape[1]) for j in range(length)]
            pages, inside = (torch.tensor([s[axis] for s in slots], dtype=torch.int64) for axis in (0, 1))
            # The window hides freed pages. But in the dense formula, a NaN in such a page would reach the result even with weight
            # 0.
            freed = (pages < 0).view(-1, 1, 1)
            keys.append(scaled(k_cache[pages, inside], k_scale).masked_fill(freed, 0.0))
            values.append(scaled(v_cache[pages, inside], v_scale).masked_fill(freed, 0.0))
        new = a["cu_seqlens_q"].diff().tolist() if "cu_seqlens_q" in a else [a["max_seqlen_q"]] * len(keys)
        causal = a.get("is_causal", True)
    queries = q_all[: sum(new)].split(new)  # the rows after these are padding
    masks = [None] * len(new) if a.get("tree_mask") is None else a["tree_mask"][: sum(new)].split(new)
    heads, width = q_all.shape[1], (values[0] if len(values) else a.get("v", q_all)).shape[-1]
    parts = [(torch.zeros(0, heads, width), torch.zeros(0, heads))]
    parts += [dense(q, k, v, causal, a, mask) for q, k, v, mask in zip(queries, keys, values, masks, strict=False)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@pytest.mark.parametrize(("function", "case"), WITH_SEQUENCES, ids=[name_of(*x) for x in WITH_SEQUENCES])
def test_cases_against_a_dense_formula(function: Any, case: Case) -> None:
    arguments = case.build()
    wanted, wanted_lse = dense_case(function, arguments)
    out, lse = pair(function(**{**arguments, "return_lse": True}))
    assert out.dtype == (torch.bfloat16 if arguments["q"].dtype in FP8 else arguments["q"].dtype)
    assert lse.dtype == torch.float32
    rows = len(wanted)  # without padding
    assert_close(out[:rows], wanted)
    torch.testing.assert_close(lse[:rows].double(), wanted_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("function", "case"), SMALL, ids=[name_of(*x) for x in SMALL])
def test_cases_match_the_fake_hook_and_fill_out(function: Any, case: Case) -> None:
    arguments = case.build()
    results = function(**arguments)
    fakes = function.operator.fake_outputs(function.operator.complete(arguments))
    results, fakes = ((x if isinstance(x, tuple) else (x,)) for x in (results, fakes))
    assert [(r.shape, r.dtype, r.stride()) for r in results] == [(f.shape, f.dtype, f.stride()) for f in fakes]
    out = torch.full_like(results[0], 3.0)
    again = function(**arguments, out=out)
    assert (again[0] if isinstance(again, tuple) else again) is out
    op = function.operator
    rows = op.counted_rows(arguments)
    assert torch.equal(out[:rows], results[0][:rows])
    assert rows is None or bool((out[rows:] == 3.0).all()), "padding is left as it is"


@pytest.mark.parametrize("function", OPERATORS)
def test_large_cases_are_declared(function: Any) -> None:
    names = [case.name for case in function.operator.all_cases()]
    assert len(set(names)) == len(names)
    assert any(case.large for case in function.operator.all_cases())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (attn_merge_state, "empty parts"),
        (mha_prefill, "window, cap, sinks and lse together"),
        (mha_prefill, "lengths known on the host"),
        (mha_prefill, "fp8, a scale each, head_dim 128, lse"),
        (mha_prefill, "no sequences"),
        (mha_extend_with_kvcache, "window, cap, sinks and lse together"),
        (mha_extend_with_kvcache, "running sums left out"),
        (mha_extend_with_kvcache, "fp8 q and cache, a scale each"),
        (mha_decode_with_kvcache, "four new tokens, sinks and lse"),
        (mha_decode_with_kvcache, "fp8 e5m2 cache, a scale a kv head"),
        (mha_decode_with_kvcache, "no sequences"),
        (mha_with_kvcache, "window, cap, sinks and lse together"),
        (mla_prefill, "lengths 0 to 33, float32, lse"),
        (mla_extend_with_kvcache, "fp8 q and cache, a scale each"),
        (mla_decode_with_kvcache, "three new tokens"),
    ],
)
@pytest.mark.parametrize("given_out", [False, True])
def test_under_torch_compile(
    function: Any, name: str, given_out: bool, check_custom_op: Callable[[Any, dict[str, Any]], None]
) -> None:
    case = next(c for c in function.operator.all_cases() if c.name == name)
    arguments = case.build()
    if given_out:
        result = function(**arguments)
        arguments["out"] = torch.empty_like(result[0] if isinstance(result, tuple) else result)
    check_custom_op(function, arguments)


# -- against PyTorch's own attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 127])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_prefill_against_sdpa(heads: int, kv_heads: int, window_left: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [1, 300, 0, 128]
    q = torch.randn(sum(lengths), heads, 48, dtype=dtype)
    k, v = (torch.randn(sum(lengths), kv_heads, 48, dtype=dtype) for _ in range(2))
    wanted = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        distance = torch.arange(len(qs))[:, None] - torch.arange(len(qs))
        mask = (distance >= 0) & ((distance <= window_left) | (window_left < 0))
        ks, vs = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (ks, vs))
        wanted.append(scaled_dot_product_attention(qs.transpose(0, 1), ks, vs, attn_mask=mask).transpose(0, 1))
    got = mha_prefill(q, k, v, offsets(*lengths), window_left=window_left)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, torch.cat(wanted))


@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
def test_fp8_prefill_agrees_with_dequantised_operands(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8).to(torch.float8_e4m3fn) for heads in (6, 2, 2))
    scales = [torch.rand(shape) + 0.5 for _ in range(3)]
    of_heads = [scale.reshape(-1, 1).expand(-1 if scale.numel() > 1 else 2, 1) for scale in scales]
    wide = [q.float() * of_heads[0].repeat_interleave(3, 0), k.float() * of_heads[1], v.float() * of_heads[2]]
    options: dict[str, Any] = {"window_left": 4, "sinks": torch.randn(6), "logit_cap": 20.0, "return_lse": True}
    wanted, wanted_lse = pair(mha_prefill(*wide, offsets(4, 5), **options))
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    out, lse = pair(mha_prefill(q, k, v, offsets(4, 5), **options, **named))
    assert torch.equal(out, wanted.bfloat16())
    assert torch.equal(lse, wanted_lse)
    # The operators with a cache must give the same result if their pages hold the same keys and values.
    (k_cache, table), (v_cache, _) = into_pages(k, [4, 5], 4), into_pages(v, [4, 5], 4)
    paged_call = (k_cache, v_cache, table, ints(4, 5), 5, 8)
    extended, _ = pair(mha_extend_with_kvcache(q, offsets(4, 5), None, *paged_call, is_causal=True, **options, **named))
    torch.testing.assert_close(extended, out)


def test_softmax_survives_huge_scores() -> None:
    q = torch.tensor([[[300.0]], [[300.0]]])
    v = torch.tensor([1.0, 2.0]).view(2, 1, 1)
    out, lse = pair(mha_prefill(q, q, v, offsets(2), return_lse=True, softmax_scale=1.0))
    assert out.flatten().tolist() == [1.0, 1.5]
    torch.testing.assert_close(lse.flatten(), torch.tensor([90000.0, 90000.0 + math.log(2)]))
    out, lse = pair(mha_prefill(q, -q, v, offsets(2), return_lse=True, sinks=torch.tensor([-5.0])))
    assert out.flatten().tolist() == [0.0, 0.0]
    assert lse.flatten().tolist() == [-5.0, -5.0]


# -- the operators agree with each other -----------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([-1, 0, 1, 7, 127]),
    st.sampled_from([0.0, 3.0]),
    st.booleans(),
    st.sampled_from([1, 5, 16]),
)
def test_prefill_is_chunked_extend_is_decode_token_by_token(
    chunks: list[int], window_left: int, logit_cap: float, with_sinks: bool, page_size: int
) -> None:
    torch.manual_seed(0)
    total = sum(chunks)
    q, k, v = torch.randn(total, 6, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16)
    options: dict[str, Any] = {
        "window_left": window_left,
        "logit_cap": logit_cap,
        "sinks": torch.randn(6) if with_sinks else None,
        "return_lse": True,
    }
    whole, whole_lse = pair(mha_prefill(q, k, v, offsets(total), **options))
    k_cache, page_table = into_pages(k, [total], page_size)
    v_cache, _ = into_pages(v, [total], page_size)
    room = page_table.shape[1] * page_size
    end = 0
    for chunk in chunks:
        begin, end = end, end + chunk
        extended = mha_extend_with_kvcache(
            q[begin:end], offsets(chunk), offsets(end), k_cache, v_cache, page_table, ints(end), chunk, room, True, **options
        )
        torch.testing.assert_close(pair(extended), (whole[begin:end], whole_lse[begin:end]), rtol=1e-5, atol=1e-5)
        several = mha_decode_with_kvcache(
            q[begin:end], k_cache, v_cache, page_table, ints(end), room, max_seqlen_q=chunk, **options
        )
        torch.testing.assert_close(pair(several), pair(extended), rtol=0, atol=0)
    # Runs all chunks in one call, as sequences that share the same pages.
    ends = torch.tensor(chunks, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    mixed = mha_with_kvcache(
        q, offsets(*chunks), k_cache, v_cache, page_table.repeat(len(chunks), 1), ends, max(chunks), room, **options
    )
    torch.testing.assert_close(pair(mixed), (whole, whole_lse), rtol=1e-5, atol=1e-5)
    # Decodes all tokens in one call: sequence i shares the same pages and has length i + 1.
    lengths = torch.arange(1, total + 1, dtype=torch.int32)
    decoded = mha_decode_with_kvcache(q, k_cache, v_cache, page_table.repeat(total, 1), lengths, room, **options)
    torch.testing.assert_close(pair(decoded), (whole, whole_lse), rtol=1e-5, atol=1e-5)


def test_without_causality_only_the_left_is_limited() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    k_cache, page_table = into_pages(k, [9], 4)
    v_cache, _ = into_pages(v, [9], 4)
    call = (q, offsets(3), None, k_cache, v_cache, page_table, ints(9), 3, 12)
    everything = mha_extend_with_kvcache(*call)
    wanted = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
    torch.testing.assert_close(everything, wanted)
    # Queries are at positions 6, 7, 8. A window of 2 to the left hides keys before positions 4, 5, 6.
    mask = torch.arange(9) >= torch.tensor([[4], [5], [6]])
    wanted = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask).transpose(0, 1)
    torch.testing.assert_close(mha_extend_with_kvcache(*call, window_left=2), wanted)


def test_queries_that_see_nothing() -> None:
    cache = torch.randn(1, 4, 1, 8)
    call = (torch.randn(2, 2, 8), offsets(2), None, cache, cache, ints(0).view(1, 1), ints(0), 2, 4)
    out, lse = pair(mha_extend_with_kvcache(*call, return_lse=True))
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    sinks = torch.tensor([1.5, -2.0])
    out, lse = pair(mha_extend_with_kvcache(*call, return_lse=True, sinks=sinks))
    assert (out == 0).all()
    assert torch.equal(lse, sinks.expand(2, 2))


def test_sinks_take_weight_and_add_no_value() -> None:
    """Asserts that a sink s acts like a key with score s and value 0."""
    torch.manual_seed(0)
    q, k, v, sinks = torch.randn(5, 2, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4), torch.randn(2)
    plain, plain_lse = pair(mha_prefill(q, k, v, offsets(5), return_lse=True))
    out, lse = pair(mha_prefill(q, k, v, offsets(5), return_lse=True, sinks=sinks))
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks.expand(5, 2)))
    torch.testing.assert_close(out, plain * torch.exp(plain_lse - lse).unsqueeze(-1))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        torch.testing.assert_close(mha_prefill(q, k, v, offsets(5), sinks=sinks.to(dtype)), out, rtol=0.02, atol=0.02)


def test_hints_change_nothing() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 4) for _ in range(3))
    wanted = mha_prefill(q, k, v, offsets(3, 4))
    hints: list[Any] = [[0, 3, 7], (0, 3, 7), offsets(3, 4), offsets(3, 4).long()]
    for hint in hints:
        assert torch.equal(wanted, mha_prefill(q, k, v, offsets(3, 4), cu_seqlens_cpu=hint, max_seqlen=4))


def test_strided_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    fused = torch.randn(9, 8, 16)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    wanted = mha_prefill(q.contiguous(), k.contiguous(), v.contiguous(), offsets(4, 5))
    assert torch.equal(mha_prefill(q, k, v, offsets(4, 5)), wanted)
    out = torch.empty(9, 16, 4).transpose(1, 2)
    assert mha_prefill(q, k, v, offsets(4, 5), out=out) is out
    assert torch.equal(out, wanted)
    cache = torch.randn(3, 2, 4, 2, 16)  # keys and values of a page are adjacent
    call = (q[:1], cache[:, 0], cache[:, 1], ints(2, 0).view(1, 2), ints(7), 8)
    assert torch.equal(
        mha_decode_with_kvcache(*call), mha_decode_with_kvcache(*(x.contiguous() if isinstance(x, Tensor) else x for x in call))
    )


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_fp8_is_dequantised_by_its_scales(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    lengths = [20, 7]
    k, v = torch.randn(27, 2, 16).to(dtype), torch.randn(27, 2, 16).to(dtype)
    k_cache, page_table = into_pages(k, lengths, 8)
    v_cache, _ = into_pages(v, lengths, 8)
    q = torch.randn(4, 6, 16).to(dtype)
    q_scale, k_scale, v_scale = (torch.rand(shape) + 0.5 for _ in range(3))
    rest = (page_table, ints(*lengths), 24, 2)
    per_q_head = q_scale.repeat_interleave(3) if shape == (2,) else q_scale
    wide = (
        q.float() * per_q_head.reshape(-1, 1),
        k_cache.float() * k_scale.reshape(-1, 1),
        v_cache.float() * v_scale.reshape(-1, 1),
    )
    wanted = mha_decode_with_kvcache(*wide, *rest)
    got = mha_decode_with_kvcache(q, k_cache, v_cache, *rest, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    assert isinstance(wanted, Tensor)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, wanted.bfloat16())
    # With an fp8 cache, queries may have any dtype.
    for q_dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        some = mha_decode_with_kvcache(wide[0].to(q_dtype), k_cache, v_cache, *rest, k_scale=k_scale, v_scale=v_scale)
        assert isinstance(some, Tensor)
        assert some.dtype == q_dtype
        torch.testing.assert_close(some.float(), wanted, rtol=0.03, atol=0.03)


# -- merging ---------------------------------------------------------------------------------------------------------------------


def partial(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes output and LSE of q's attention to all of these keys."""
    room = max(len(k), 1)
    k_cache, v_cache = k.new_zeros(1, room, *k.shape[1:]), v.new_zeros(1, room, *v.shape[1:])
    k_cache[0, : len(k)], v_cache[0, : len(v)] = k, v
    page = ints(0).view(1, 1)
    return pair(
        mha_extend_with_kvcache(
            q, offsets(len(q)), None, k_cache, v_cache, page, ints(len(k)), len(q), room, sinks=sinks, return_lse=True
        )
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=3, max_size=3), st.sampled_from([None, 0, 1, 2]), st.integers(0, 99))
def test_merged_parts_are_the_whole_in_any_order(lengths: list[int], sinks_in: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    sinks = torch.randn(4)
    q, k, v = torch.randn(3, 4, 8), torch.randn(sum(lengths), 2, 8), torch.randn(sum(lengths), 2, 8)
    whole = partial(q, k, v, None if sinks_in is None else sinks)
    parts = zip(k.split(lengths), v.split(lengths), range(3), strict=True)
    a, b, c = (partial(q, ks, vs, sinks if part == sinks_in else None) for ks, vs, part in parts)
    left = attn_merge_state(*attn_merge_state(*a, *b), *c)
    right = attn_merge_state(*a, *attn_merge_state(*b, *c))
    swapped = attn_merge_state(*attn_merge_state(*c, *a), *b)
    for merged in (left, right, swapped):
        torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(attn_merge_state(*a, *b)[0], attn_merge_state(*b, *a)[0])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -300.0, -80.0, -1.0, 0.0, 3.0, 80.0, 300.0]), min_size=3, max_size=3), st.integers(0, 99)
)
def test_merging_is_associative_at_every_magnitude(lses: list[float], seed: int) -> None:
    torch.manual_seed(seed)
    # Near 300, adjacent float32 values differ by 3e-5. So LSEs, and merge weights computed from LSEs, have errors of this size.
    parts = [(torch.randn(1, 1, 4), torch.tensor([[lse]])) for lse in lses]
    a, b, c = parts
    left = attn_merge_state(*attn_merge_state(*a, *b), *c)
    right = attn_merge_state(*a, *attn_merge_state(*b, *c))
    torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-4)
    weights = torch.tensor(lses, dtype=torch.float64).softmax(0).nan_to_num(0.0)
    wanted = sum(weight * out.double() for weight, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(left[0].double(), wanted, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(
        left[1].double().flatten(), torch.tensor([lses], dtype=torch.float64).logsumexp(-1), rtol=2e-4, atol=2e-4
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_merging_an_empty_part_changes_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    out, lse = torch.randn(5, 2, 8).to(dtype), torch.randn(5, 2)
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for merged in (attn_merge_state(out, lse, *empty), attn_merge_state(*empty, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    nothing = attn_merge_state(*empty, *empty)
    assert (nothing[0] == 0).all()
    assert (nothing[1] == -math.inf).all()


def test_merging_in_place() -> None:
    torch.manual_seed(0)
    out_a, out_b, lse_a, lse_b = torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2), torch.randn(5, 2)
    wanted = attn_merge_state(out_a, lse_a, out_b, lse_b)
    assert wanted[0].data_ptr() not in (out_a.data_ptr(), out_b.data_ptr())
    got = attn_merge_state(out_a, lse_a, out_b, lse_b, out=out_a, lse=lse_b)
    assert got[0] is out_a
    assert got[1] is lse_b
    assert torch.equal(out_a, wanted[0])
    assert torch.equal(lse_b, wanted[1])


# -- requests, formats and costs -------------------------------------------------------------------------------------------------


def request(function: Any, name: str) -> tuple[dict[str, object], FormatSignature]:
    case = next(c for c in function.operator.all_cases() if c.name == name)
    asked = function.operator.request(function.operator.complete(case.build()))
    return dict(asked.traits), asked.signature


def test_traits_and_formats() -> None:
    plain = {"logit_cap": False, "return_lse": False, "sliding_window": False, "sinks": False}
    traits, signature = request(mha_prefill, "window, cap, sinks and lse together")
    assert traits == {
        "head_dim": 64,
        "v_head_dim": 64,
        "gqa_ratio": 2,
        **dict.fromkeys(plain, True),
        "window_left": 31,
        "scaled": False,
    }
    assert str(signature) == "k: bfloat16, q: bfloat16, v: bfloat16"
    traits, _ = request(mha_prefill, "v_head_dim 96 under head_dim 160")
    assert traits == {**plain, "head_dim": 160, "v_head_dim": 96, "gqa_ratio": 2, "scaled": False}
    traits, signature = request(mha_prefill, "fp8 e5m2, values alone scaled")
    assert traits == {**plain, "head_dim": 96, "v_head_dim": 64, "gqa_ratio": 4, "scaled": True}
    assert str(signature) == "k: float8_e5m2, q: float8_e5m2, v: float8_e5m2"
    traits, signature = request(mha_decode_with_kvcache, "fp8 e5m2 cache, a scale a kv head")
    cached = {**plain, "head_dim": 64, "v_head_dim": 64, "gqa_ratio": 4, "page_size": 16}
    assert traits == {**cached, "scaled": True, "multi_query": False}
    assert str(signature) == "k_cache: float8_e5m2, q: bfloat16, v_cache: float8_e5m2"
    traits, _ = request(mha_decode_with_kvcache, "four new tokens in a window of three")
    several = {"multi_query": True, "new_tokens": 4}
    assert traits == {**cached, **several, "scaled": False, "sliding_window": True, "window_left": 2}
    traits, _ = request(mha_extend_with_kvcache, "running sums left out")
    assert traits == {**cached, "scaled": False, "is_causal": True}
    traits, _ = request(mha_extend_with_kvcache, "not causal, lse")
    assert traits == {**cached, "scaled": False, "is_causal": False, "return_lse": True}
    unset = dict.fromkeys(("logit_cap", "return_lse", "sliding_window"), False)
    latent = {**unset, "head_dim": 24, "v_head_dim": 16, "gqa_ratio": 3, "page_size": 16}
    traits, signature = request(mla_extend_with_kvcache, "fp8 q and cache, a scale each")
    assert traits == {**latent, "scaled": True, "is_causal": True}
    assert str(signature) == "kv_cache: float8_e4m3fn, q: float8_e4m3fn"
    traits, _ = request(mla_decode_with_kvcache, "three new tokens")
    assert traits == {
        **latent,
        "scaled": False,
        "grouped_scales": False,
        "multi_query": True,
        "return_lse": True,
        "tree_mask": False,
    }
    traits, _ = request(mla_prefill, "lengths known on the host")
    assert traits == {
        **unset,
        **dict.fromkeys(("own_kv_lengths", "scaled"), False),
        "is_causal": True,
        "head_dim": 96,
        "v_head_dim": 64,
        "gqa_ratio": 1,
    }
    traits, signature = request(attn_merge_state, "odd sizes, float16")
    assert traits == {"v_head_dim": 33}
    assert str(signature) == "out_a: float16, out_b: float16"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.sampled_from([-1, 0, 1, 3, 50]))
def test_cost_counts_visible_pairs_and_tokens(q_len: int, kv_len: int, causal: bool, window_left: int) -> None:
    q_len = min(q_len, kv_len) if causal else q_len
    seen = [
        (i, j)
        for i in range(q_len)
        for j in range(kv_len)
        if (not causal or j <= kv_len - q_len + i) and (window_left < 0 or j >= kv_len - q_len + i - window_left)
    ]
    cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 5)
    cost = mha_extend_with_kvcache.operator.cost_of(
        {
            "q": torch.zeros(q_len, 6, 8),
            "cu_seqlens_q": offsets(q_len),
            "cu_seqlens_kv": None,
            "k_cache": cache,
            "v_cache": v_cache,
            "page_table": ints(0, 1, 2).view(1, 3),
            "cache_seqlens": ints(kv_len),
            "max_seqlen_q": 9,
            "max_seqlen_k": 9,
            "is_causal": causal,
            "window_left": window_left,
            "return_lse": True,
        }
    )
    assert cost.flops == 2 * len(seen) * 6 * (8 + 5)
    tokens = len({j for _, j in seen})
    assert cost.bytes == 4 * (q_len * 6 * (8 + 5 + 1) + tokens * 2 * (8 + 5) + 1)


def test_cost_of_prefill_and_latent_decode() -> None:
    q, v = torch.zeros(7, 4, 8), torch.zeros(7, 2, 5)
    call: dict[str, Any] = {"q": q, "k": q[:, :2], "v": v, "cu_seqlens": offsets(3, 0, 4)}
    cost = mha_prefill.operator.cost_of(call)
    assert cost.flops == 2 * (6 + 10) * 4 * 13
    assert cost.bytes == 4 * (7 * 4 * 8 + 7 * 2 * 13 + 7 * 4 * 5 + 4)
    call = {"q": torch.zeros(2, 4, 8, dtype=torch.bfloat16), "kv_cache": torch.zeros(4, 2, 8, dtype=torch.float8_e4m3fn)}
    call |= {"page_table": ints(0, 1, 2, 3).view(2, 2), "cache_seqlens": ints(3, 4), "max_seqlen_k": 4}
    cost = mla_decode_with_kvcache.operator.cost_of({**call, "kv_lora_rank": 6, "softmax_scale": 1.0})
    assert cost.flops == 2 * 7 * 4 * (8 + 6)
    assert cost.bytes == 2 * 2 * 4 * 8 + 7 * 8 + 2 * 2 * 4 * 6 + 2 * 4
