"""Tests the package's declarations, and which of its kernels tokenspeed-kernel selects. No kernel is launched unless a test says
so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenspeed_kernel
from tokenspeed_kernel_base.cases import Case, Recipe
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm._inputs import fp8
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Explanation, NoKernelFoundError
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import FEW_ROWS, LONG_N, QUICK_N
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import MAX_EXPERTS, MAX_TOP_K, max_k

from .experts import GPT_OSS


def chosen(mode: str, case: str, platform: str = "sm_90", **changed: Any) -> str:
    """Returns the kernel that is selected for a case of an operator."""
    op = get_operator(f"attention.{mode}")
    arguments = op.complete(next(c for c in op.all_cases() if c.name == case).build(torch.device("cpu")))
    with use_platform(named_platform(platform)):
        return str(getattr(tokenspeed_kernel, mode).explain(**{**arguments, **changed}).chosen.name)


SUPPORTED = [
    ("mha_prefill", "gpt-oss-120b full layer, 1 to 100 tokens", "cutedsl_mha_prefill_64"),
    ("mha_prefill", "gpt-oss-120b sliding layer, 1 to 180 tokens", "cutedsl_mha_prefill_window_64"),
    ("mha_extend_with_kvcache", "not causal, lse", "cutedsl_mha_extend_with_kvcache_64"),
    ("mha_extend_with_kvcache", "head_dim 128 in a window of 50", "cutedsl_mha_extend_with_kvcache_window_128"),
    ("mha_decode_with_kvcache", "sixteen query heads a key head", "cutedsl_mha_decode_with_kvcache_wide_64"),
    ("mha_decode_with_kvcache", "gpt-oss-120b full layer, 1 to 300 tokens, pages of 64", "cutedsl_mha_decode_with_kvcache_64"),
    ("mha_decode_with_kvcache", "gpt-oss-120b sliding layer, 1 to 400 tokens", "cutedsl_mha_decode_with_kvcache_64"),
    ("mha_decode_with_kvcache", "four new tokens in a window of three", "cutedsl_mha_decode_with_kvcache_64"),
    ("mha_decode_with_kvcache", "fp8 cache without scales", "cutedsl_mha_decode_with_kvcache_64"),
    ("mha_decode_with_kvcache", "logit cap 30, float16, scale 0.3", "cutedsl_mha_decode_with_kvcache_64"),
    ("mha_decode_with_kvcache", "pages of one token, three new ones", "cutedsl_mha_decode_with_kvcache_gathered_64"),
    ("mha_decode_with_kvcache", "gemma-2 in a window, logit cap 50", "cutedsl_mha_decode_with_kvcache_256"),
    ("mha_decode_with_kvcache", "head_dim 192 over v_head_dim 128, float16", "cutedsl_mha_decode_with_kvcache_192_128"),
    ("mha_decode_with_kvcache", "head_dim 96, lse", "cutedsl_mha_decode_with_kvcache_96"),
    ("mha_decode_with_kvcache", "head_dim 256, fp8 cache, a window of 30, lse", "cutedsl_mha_decode_with_kvcache_fp8_cache_256"),
    ("mha_prefill", "window, cap, sinks and lse together", "cutedsl_mha_prefill_window_64"),
    ("mha_prefill", "fp8, a scale each, head_dim 128, lse", "cutedsl_mha_prefill_128"),
    ("mha_prefill", "window of 150", "cutedsl_mha_prefill_any_window_64"),
    ("mha_prefill", "fp8 in a window of 20, head_dim 128", "cutedsl_mha_prefill_any_window_128"),
    ("mha_extend_with_kvcache", "window of 150", "cutedsl_mha_extend_with_kvcache_any_window_64"),
    ("mha_extend_with_kvcache", "fp8 q and cache, a scale each", "cutedsl_mha_extend_with_kvcache_64"),
    ("mha_extend_with_kvcache", "fp8 cache without scales", "cutedsl_mha_extend_with_kvcache_64"),
    ("mha_extend_with_kvcache", "fp8 cache in a window of 40, head_dim 128", "cutedsl_mha_extend_with_kvcache_any_window_128"),
    ("mla_sparse_with_kvcache", "deepseek-v3, 16 of its heads, top 192 of 300", "cutedsl_mla_sparse_with_kvcache"),
    ("mla_extend_with_kvcache", "deepseek-v3, 16 of its heads, 1 to 100 new", "cutedsl_mla_extend_with_kvcache"),
    ("mla_extend_with_kvcache", "deepseek-v3, 16 of its heads, fp8 q and cache, lse", "cutedsl_mla_extend_with_kvcache_fp8"),
    ("mha_prefill", "logit cap 30, float16, scale 0.3", "cutedsl_mha_prefill_capped_64"),
    ("mha_prefill", "head_dim 256, lse", "cutedsl_mha_prefill_256"),
    ("mha_prefill", "a key head for each head, head_dim 192, v_head_dim 128", "cutedsl_mha_prefill_192_128"),
    ("mha_extend_with_kvcache", "head_dim 80, a key head for each head", "cutedsl_mha_extend_with_kvcache_80"),
    ("mha_extend_with_kvcache", "head_dim 128, logit cap 50", "cutedsl_mha_extend_with_kvcache_capped_128"),
    ("mha_extend_with_kvcache", "head_dim 256 in a window of 30", "cutedsl_mha_extend_with_kvcache_256"),
    (
        "mha_extend_with_kvcache",
        "fp8 cache in a window of 30, head_dim 256",
        "cutedsl_mha_extend_with_kvcache_fp8_cache_256",
    ),
    ("mha_prefill", "fp8, head_dim 96", "cutedsl_mha_prefill_fp8_96"),
    ("mha_extend_with_kvcache", "head_dim 80, not causal", "cutedsl_mha_extend_with_kvcache_not_causal_80"),
    ("mha_extend_with_kvcache", "head_dim 96, fp8 q and cache, not causal", "cutedsl_mha_extend_with_kvcache_not_causal_96"),
    ("mha_extend_with_kvcache", "head_dim 192, v_head_dim 128, fp8 q and cache", "cutedsl_mha_extend_with_kvcache_fp8_192_128"),
    ("mla_prefill", "deepseek-v3, 8 of its heads, chunks of 100 to 300 before them", "cutedsl_mla_prefill"),
    ("mla_prefill", "deepseek-v3, 4 of its heads, in a window of 40, keys of their own", "cutedsl_mla_prefill_window"),
    ("mla_prefill", "deepseek-v3, 4 of its heads, fp8, a scale a head, lse", "cutedsl_mla_prefill_fp8"),
    ("mla_prefill", "deepseek-v3, 4 of its heads, fp8 in a window of 40", "cutedsl_mla_prefill_fp8_window"),
]


@pytest.mark.parametrize(("mode", "case", "name"), SUPPORTED, ids=[f"{mode}-{case}" for mode, case, _ in SUPPORTED])
def test_it_is_selected_on_sm_90_alone(registered: KernelRegistry, mode: str, case: str, name: str) -> None:
    assert chosen(mode, case) == name
    assert registered.get_by_name(name).priority > Priority.PERFORMANT
    for platform in ("sm_80", "sm_100", "gfx950", "cpu"):
        assert not chosen(mode, case, platform).startswith("cutedsl")


LEFT = [
    ("mha_prefill", "one token, float32", {}),
    ("mha_prefill", "five query heads a key head, head_dim 80", {}),
    ("mha_prefill", "v_head_dim 96 under head_dim 160", {}),
    ("mha_prefill", "fp8 without scales", {"logit_cap": 30.0}),
    ("mha_extend_with_kvcache", "head_dim 96, fp8 q and cache", {"logit_cap": 30.0}),
    ("mha_extend_with_kvcache", "head_dim 128, logit cap 50", {"is_causal": False}),
    ("mla_prefill", "deepseek-v3, 8 of its heads, 1 to 300 tokens", {"window_left": 9, "is_causal": False}),
    ("mla_prefill", "deepseek-v3, 4 of its heads, fp8, a scale a head, lse", {"logit_cap": 30.0}),
    ("mla_prefill", "logit cap 30, float16", {}),
    ("mha_prefill", "window of 1000, five query heads a key head", {}),
    ("mha_decode_with_kvcache", "fp8 q and cache, a scale each", {}),
    ("mha_decode_with_kvcache", "fp8 e5m2 cache, a scale a kv head", {}),
    ("mha_extend_with_kvcache", "fp8 e5m2 cache, a scale a kv head", {}),
    ("mha_prefill", "fp8, a scale a kv head, window, cap and sinks", {}),
    ("mha_decode_with_kvcache", "pages of one token, fp8 cache, head_dim 128", {}),
    ("mha_decode_with_kvcache", "head_dim 80, fp8 cache, logit cap 5", {}),
    ("mha_decode_with_kvcache", "one key head of 24 query heads, pages of 256", {}),
    ("mha_decode_with_kvcache", "a key head a query head, lse", {}),
    ("mha_extend_with_kvcache", "not causal, in a window", {}),
    ("mla_sparse_with_kvcache", "deepseek-v3, top 96 of 200, fp8 cache", {}),
    ("mla_sparse_with_kvcache", "deepseek-v3.2, top 96 of 200, a scale for each 128", {}),
    ("mla_decode_with_kvcache", "deepseek-v3.2, 16 of its heads, a scale for each 128", {}),
]


@pytest.mark.parametrize(("mode", "case", "changed"), LEFT, ids=[f"{mode}-{case}" for mode, case, _ in LEFT])
def test_undeclared_calls_go_to_other_kernels(registered: KernelRegistry, mode: str, case: str, changed: dict[str, Any]) -> None:
    assert not chosen(mode, case, **changed).startswith("cutedsl")


@pytest.mark.parametrize(("heads", "most"), [(8, 8), (16, 4)])
def test_as_many_new_tokens_as_there_are_rows_for(registered: KernelRegistry, heads: int, most: int) -> None:
    def name(new: int) -> str:
        cache = torch.zeros(3, 64, 1, 64, dtype=torch.bfloat16)
        q, lengths = torch.zeros(new, heads, 64, dtype=torch.bfloat16), torch.tensor([100], dtype=torch.int32)
        pages = torch.zeros(1, 2, dtype=torch.int32)
        with use_platform(named_platform("sm_90")):
            explained = tokenspeed_kernel.mha_decode_with_kvcache.explain(q, cache, cache, pages, lengths, 128, new)
        return str(explained.chosen.name)

    for new in (2, most):
        assert name(new).startswith("cutedsl")
    assert not name(most + 1).startswith("cutedsl")


def _ours(explained: Explanation) -> str:
    """Returns the name of this package's eligible kernel for a call, or an empty string. Selection may prefer a kernel of another
    package."""
    names = [v.spec.name for v in explained.verdicts if v.accepted and v.spec.solution == "cutedsl"]
    assert len(names) <= 1
    return "".join(names)


def _gemm(m: int, k: int, dtype: torch.dtype = torch.bfloat16, platform: str = "sm_90", **options: Any) -> str:
    a, weight = torch.zeros(m, k, dtype=dtype), torch.zeros(48, k, dtype=dtype)
    with use_platform(named_platform(platform)):
        return _ours(tokenspeed_kernel.mm.explain(a, weight.t(), **options))


def test_gemms_of_few_rows(registered: KernelRegistry) -> None:
    """Asserts that calls are eligible with up to 16 rows of multiples of 16 bytes, with any bias, and with float32 results."""
    for m in (1, 8, 16):
        assert _gemm(m, 72) == "cutedsl_mm_bfloat16"
        assert _gemm(m, 72, torch.float16, out_dtype=torch.float32) == "cutedsl_mm_float16"
        assert _gemm(m, 72, bias=torch.zeros(48)) == "cutedsl_mm_bfloat16"
        assert _gemm(m, 72, platform="sm_80") == ""
    assert _gemm(17, 72) == ""
    assert _gemm(1, 76) == ""
    assert _gemm(1, 72, torch.float32) == ""
    assert _gemm(1, 72, out_dtype=torch.float16) == ""


@pytest.mark.parametrize(
    ("m", "k", "n", "preferred"),
    [
        (17, 4096, 2880, True),
        (32, 3080, 2048, True),
        (16, 4096, 2880, False),
        (33, 4096, 2880, False),
        (32, 4104, 2880, False),
        (32, 2880, 2880, False),
        (32, 4096, 2888, False),
        (32, 4096, 2040, False),
    ],
)
def test_gemms_with_k_split_over_a_cluster(registered: KernelRegistry, m: int, k: int, n: int, preferred: bool) -> None:
    """Asserts that the kernel is preferred for 17 to 32 rows and sizes up to the measured size, and not eligible otherwise."""
    for dtype, name in ((torch.bfloat16, "cutedsl_mm_split_k_bfloat16"), (torch.float16, "cutedsl_mm_split_k_float16")):
        a, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
        with use_platform(named_platform("sm_90")):
            explained = tokenspeed_kernel.mm.explain(a, weight.t(), bias=bias)
            wide = tokenspeed_kernel.mm.explain(a, weight.t(), out_dtype=torch.float32)
        assert (explained.chosen.name == _ours(explained) == name) == preferred
        assert not _ours(wide).startswith("cutedsl_mm_split_k")


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "chosen"),
    [
        (8, 2880, 128, "triton"),
        (9, 2880, 128, "cutedsl"),
        (256, 4096, 128, "cutedsl"),
        (257, 2880, 128, "composed"),
        (17, 4104, 128, "composed"),
        (16, 2880, 129, "triton"),
        (40, 2884, 32, "composed"),
    ],
)
def test_routers(registered: KernelRegistry, tokens: int, hidden: int, experts: int, chosen: str) -> None:
    """Asserts that the fused router is preferred for 9 to 256 tokens."""
    x, norm, router = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((tokens, hidden), (hidden,), (experts, hidden)))
    with use_platform(named_platform("sm_90")):
        explained = tokenspeed_kernel.rmsnorm_moe_topk.explain(x, norm, router.t(), 4, eps=1e-5, residual=x)
    assert explained.chosen.name == f"{chosen}_rmsnorm_moe_topk"


def test_gemms_with_few_columns_are_preferred(registered: KernelRegistry) -> None:
    """Asserts that the kernel is preferred up to the largest n for which it was measured to be faster than PyTorch at all numbers
    of rows."""
    for n, name, preferred in ((QUICK_N, "cutedsl_mm_bfloat16", True), (QUICK_N + 1, "cutedsl_mm_wide_bfloat16", False)):
        a, weight = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (16, n))
        with use_platform(named_platform("sm_90")):
            explained = tokenspeed_kernel.mm.explain(a, weight.t())
        assert _ours(explained) == name
        assert (explained.chosen.name == name) == preferred


@pytest.mark.parametrize(("m", "chosen"), [(1, "cutedsl_mm_long_bfloat16"), (FEW_ROWS, "cutedsl_mm_long_bfloat16"), (5, "")])
def test_output_matrices_of_few_rows_are_preferred(registered: KernelRegistry, m: int, chosen: str) -> None:
    a, weight = torch.empty(m, 8, dtype=torch.bfloat16), torch.empty(LONG_N, 8, dtype=torch.bfloat16)
    with use_platform(named_platform("sm_90")):
        found = tokenspeed_kernel.mm.explain(a, weight.t()).chosen.name
    assert found == chosen if chosen else not found.startswith("cutedsl")


GEMMS = [
    ("fp8 per tensor", "cutedsl_mm_more_fp8"),
    ("fp8 per token and channel, bias", ""),  # k = 300 is not a multiple of 16
    ("fp8 per token and tensor, one token", "cutedsl_mm_fp8"),
    ("fp8 per block, one block", "cutedsl_mm_fp8"),
    ("fp8 e5m2 with e4m3fn", ""),
    ("fp8 weight only, per channel", "cutedsl_mm_fp8_weights_bfloat16"),
    ("fp8 weight only, per block", "cutedsl_mm_fp8_block_weights_float16"),
    ("mxfp4 weight only", "cutedsl_mm_mxfp4_weights_bfloat16"),
    ("mxfp4, bias", ""),
    ("mxfp8 weight only", ""),
]


@pytest.mark.parametrize(("case", "name"), GEMMS, ids=[case for case, _ in GEMMS])
def test_gemms_with_scales(registered: KernelRegistry, case: str, name: str) -> None:
    op = get_operator("gemm.mm")
    arguments = op.complete(next(c for c in op.all_cases() if c.name == case).build(torch.device("cpu")))
    with use_platform(named_platform("sm_90")):
        assert _ours(tokenspeed_kernel.mm.explain(**arguments)) == name


@pytest.mark.parametrize("kind", ["e8m0_blocks", "columns", "e8m0_columns", "blocks_of_64"])
@pytest.mark.parametrize(
    ("m", "k", "n", "size"),
    [(512, 2048, 4096, 512), (1024, 2048, 2048, 1024), (4096, 2048, 2048, 1024), (512, 2048, 2048, 0), (256, 2048, 4096, 0),
     (1024, 1024, 2048, 0)],
)  # fmt: skip
def test_fp8_gemms_of_many_rows(registered: KernelRegistry, kind: str, m: int, k: int, n: int, size: int) -> None:
    """Asserts that the kernel is preferred for calls in which it was measured to be faster than the portable kernel. The portable
    kernel need not be installed."""
    scales = {"b_scale": "block" if "blocks" in kind else "block1d", "block": 64 if "64" in kind else 128}
    made = fp8(m, k, n, a_scale="block", scales="e8m0" if "e8m0" in kind else "float32", **scales)
    arguments = get_operator("gemm.mm").complete(Case(kind, made).build(torch.device("cpu"), 0))
    with use_platform(named_platform("sm_90")):
        name = _ours(tokenspeed_kernel.mm.explain(**arguments))
    assert name == (f"cutedsl_mm_fp8_{kind}_{size}_rows" if size else "")
    assert not name or registered.get_by_name(name).priority > Priority.PORTABLE


@pytest.mark.parametrize(("m", "preferred"), [(1, True), (FEW_ROWS, True), (FEW_ROWS + 1, False), (16, False)])
@pytest.mark.parametrize("scale", ["channel", "block"])
def test_gemms_with_scaled_weights_are_preferred_for_few_rows(
    registered: KernelRegistry, scale: str, m: int, preferred: bool
) -> None:
    """Asserts that the kernel is preferred up to the number of rows at which it was measured to be faster than the portable kernel,
    and never for block-scaled weights with bfloat16 activations. The portable kernel need not be installed.
    """
    made = fp8(m, 64, 48, a_scale="", b_scale=scale, a_dtype=torch.bfloat16)
    arguments = get_operator("gemm.mm").complete(Case(scale, made).build(torch.device("cpu"), 0))
    with use_platform(named_platform("sm_90")):
        explained = tokenspeed_kernel.mm.explain(**arguments)
    ours = next(spec for spec in registered.get_for_operator("gemm", "mm") if spec.name == _ours(explained))
    assert (ours.priority > Priority.PORTABLE) == (preferred and scale == "channel")


def _planned(platform: str = "sm_90", solution: str | None = "cutedsl", **changed: Any) -> str:
    """Plans a layer with sizes and options like GPT-OSS's. Returns the name of the planned kernel, or an empty string if no kernel
    is eligible."""
    sizes = {"num_experts": 128, "top_k": 4, "hidden_size": 2880, "intermediate_size": 2880}
    options = {"weight_format": "mxfp4", **sizes, **GPT_OSS, **changed}
    try:
        return str(tokenspeed_kernel.moe_apply.plan(**options, platform=named_platform(platform), solution=solution).kernel)
    except NoKernelFoundError:
        return ""


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_experts": 32},
        {"dtype": torch.float16},
        {"bias": False, "w13_interleaved": False},
        {"limit": None, "alpha": 1.0, "beta": 0.0},
        {"num_experts": MAX_EXPERTS, "top_k": MAX_TOP_K, "hidden_size": max_k(), "intermediate_size": max_k()},
        {"num_experts": 1, "top_k": 1, "hidden_size": 32, "intermediate_size": 32},
        {"activation_dtype": "fp8"},
    ],
    ids=str,
)
def test_experts_in_mxfp4(registered: KernelRegistry, changed: dict[str, Any]) -> None:
    rounded = "activation_dtype" in changed
    ours = "cutedsl_moe_apply_mxfp4_fp8" if rounded else "cutedsl_moe_apply_mxfp4"
    assert _planned(**changed) == ours
    assert _planned(solution=None, **changed) == ours
    assert not _planned("sm_80", solution=None, **changed).startswith("cutedsl")
    for platform in ("sm_80", "sm_100", "gfx950", "cpu"):
        assert _planned(platform, **changed) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": max_k() + 32},
        {"intermediate_size": max_k() + 32},
        {"top_k": MAX_TOP_K + 1},
        {"num_experts": MAX_EXPERTS + 1},
        {"activation_dtype": "mxfp4"},
        {"dtype": torch.float32},
        {"weight_format": "dense"},
        {"weight_format": "fp8_block"},
    ],
    ids=str,
)
def test_experts_that_go_to_others(registered: KernelRegistry, changed: dict[str, Any]) -> None:
    assert _planned(**changed) == ""


def test_without_a_compiler_it_says_why(registered: KernelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "dsl_gap", lambda: "needs nvidia-cutlass-dsl >= 4.8, there is none")
    op = get_operator("attention.mha_prefill")
    arguments = op.complete(op.all_cases()[0].build(torch.device("cpu")))
    with use_platform(named_platform("sm_90")):
        explained = tokenspeed_kernel.mha_prefill.explain(**arguments)
    assert not explained.chosen.name.startswith("cutedsl")
    assert "needs nvidia-cutlass-dsl >= 4.8, there is none" in str(explained)


# -- on the device -------------------------------------------------------------------------------------------------------------


def kit_cases(kernel: str) -> list[Case] | None:
    """Returns cases for a kernel that supports only sizes of the operator's large cases; None for other kernels."""
    if not kernel.startswith("cutedsl_mm_split_k"):
        return None
    base = next(case for case in get_operator("mm").all_cases() if case.name == "20 rows of a long k, float16")
    assert isinstance(base.make, Recipe)
    dtype = getattr(torch, kernel.rpartition("_")[2])
    made = base.make.vary(dtype=dtype)
    return [Case("20 rows", made), Case("20 rows and a bias", made.vary(bias=dtype))]


@pytest.mark.slow
def test_the_kit_finds_nothing(registered: KernelRegistry, sm90: torch.device, cutedsl_kernel: str) -> None:
    from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
    from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong

    assert_none_wrong(conform(registered.get_by_name(cutedsl_kernel), sm90, Options(shrink_seconds=0), kit_cases(cutedsl_kernel)))
