"""Runs every CuteDSL kernel on every small case of its operator, on the emulator: host code, PTX, and results. No GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("sm90_emulator")
if torch.cuda.is_available():  # other tests in this process may launch programs on a GPU
    pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process", allow_module_level=True)

import tokenspeed_kernel  # noqa: F401  - registers the kernels
import tokenspeed_kernel_nvidia
from sm90_emulator import emulated_sm90
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.covering import COMPILATION, covering
from tokenspeed_kernel.workbench.numerics.verify import refusal
from tokenspeed_kernel_base.cases import Case, Draw, Recipe
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.parameters import NO_LIMIT
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_nvidia.sm90.attention.decode import launch as decode
from tokenspeed_kernel_nvidia.sm90.attention.prefill import launch as prefill
from tokenspeed_kernel_nvidia.sm90.moe import moe_apply
from tokenspeed_kernel_nvidia.sm90.moe.grouped import launch as grouped
from tokenspeed_kernel_nvidia.sm90.moe.grouped import paired
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import FEW_ROUNDED_COLUMNS

from . import oracle
from .experts import GPT_OSS, RandomLayer, compare
from .launched import as_operator

mha_prefill = as_operator(prefill.mha_prefill)
mha_decode_with_kvcache = as_operator(decode.mha_decode_with_kvcache)
mha_extend_with_kvcache = as_operator(prefill.mha_extend_with_kvcache)

CACHES = ("k_cache", "v_cache")
KERNELS = [spec for spec in KernelRegistry.get().list_kernels() if spec.solution == "cutedsl"]


def eligible() -> Iterator[tuple[KernelSpec, dict[Case, dict[str, Any]]]]:
    """Yields each kernel, with the small cases for which the kernel is eligible on an H200, and their arguments."""
    drawn: dict[str, dict[Case, dict[str, Any]]] = {}
    with emulated_sm90():
        for spec in KERNELS:
            op = get_operator(spec.operator)
            if op.mode not in drawn:
                drawn[op.mode] = {case: op.complete(case.build()) for case in op.all_cases() if not case.large}
            yield spec, {case: each for case, each in drawn[op.mode].items() if refusal(op, spec, each) is None}


DRAWN = dict(eligible())
ELIGIBLE = [(spec, case) for spec, cases in DRAWN.items() for case in cases]


def test_each_kernel_is_eligible_for_some_case() -> None:
    """Asserts that each kernel is eligible for a small case, except for GEMMs whose dtypes and numbers of rows no small case has.
    `test_mm_ptx` executes the programs of these GEMMs."""
    left = {spec.name for spec in KERNELS} - {spec.name for spec, _ in ELIGIBLE}
    assert {get_operator(KernelRegistry.get().get_by_name(name).operator).mode for name in left} == {"mm"}


# Prefill and extend kernels that differ only in head dims and logit caps from kernels that are always tested. Their programs take
# long to compile.
WIDTHS = re.compile(
    r"cutedsl_mla_prefill\w*|cutedsl_mha_(prefill|extend_with_kvcache)_(capped_64|capped_128|((fp8|not_causal)_)?(192_128|256|96|80))"
)
# Three of these kernels are always tested. In the first, the warpgroups have different queries. The head_dim of the second is
# smaller than the width of its tiles in shared memory. The third uses fp8.
SOME = ("cutedsl_mha_prefill_192_128", "cutedsl_mha_extend_with_kvcache_80", "cutedsl_mla_prefill_fp8")


def _parameters() -> list[Any]:
    """Returns the parameters of the next test. A case runs with the kernel that is selected for it, if the case is among the
    covering cases of the kernels that have the same operator and launcher. The other tests are marked slow."""
    best: dict[tuple[str, str], int] = {}
    for spec, case in ELIGIBLE:
        best[spec.operator, case.name] = max(best.get((spec.operator, case.name), 0), spec.priority)
    related: dict[tuple[str, str], dict[KernelSpec, dict[Case, dict[str, Any]]]] = {}
    for spec, drawn in DRAWN.items():
        if WIDTHS.fullmatch(spec.name) is None or spec.name in SOME:
            first = {case: each for case, each in drawn.items() if spec.priority == best[spec.operator, case.name]}
            related.setdefault((spec.operator, KernelRegistry.get().get_impl(spec.name).__module__), {})[spec] = first
    fast = {spec: cases for group in related.values() for spec, cases in covering(group, COMPILATION).items()}
    parameters = []
    for spec, drawn in DRAWN.items():
        for case in drawn:
            marks = [] if case in fast.get(spec, ()) else [pytest.mark.slow]
            parameters.append(pytest.param(spec, case, id=f"{spec.name}-{case.name}", marks=marks))
    return parameters


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["any order", "in order"])
@pytest.mark.parametrize(("spec", "case"), _parameters())
def test_a_kernel_agrees_with_the_reference(spec: KernelSpec, case: Case, seed: int) -> None:
    """With seed 0, warps run in order. With seed 1, warps, copies and wgmmas take random times."""
    with emulated_sm90(seed=seed):
        result = verify_case(spec, case)
    assert result.status is Status.PASSED, result.reason


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("cutedsl_mha_prefill_64", "lengths known on the host"),
        ("cutedsl_mha_decode_with_kvcache_64", "four new tokens, sinks and lse"),
        ("cutedsl_mm_bfloat16", "dense, bfloat16 with float32 bias"),
    ],
)
def test_late_copies_and_wgmmas(kernel: str, name: str) -> None:
    """Asserts that results are correct if copies and wgmmas complete as late as possible."""
    spec = KernelRegistry.get().get_by_name(kernel)
    case = next(case for case in get_operator(spec.operator).all_cases() if case.name == name)
    with emulated_sm90(copies="late") as emulator:
        result = verify_case(spec, case)
    assert result.status is Status.PASSED, result.reason
    assert emulator.launches


@pytest.mark.parametrize(
    ("kernel", "name", "window_left"),
    [
        ("cutedsl_mha_decode_with_kvcache_64", "four new tokens, sinks and lse", NO_LIMIT - 1),
        ("cutedsl_mha_decode_with_kvcache_64", "four new tokens, sinks and lse", 2**31 - 1),
        pytest.param("cutedsl_mha_prefill_any_window_64", "lengths known on the host", NO_LIMIT - 1, marks=pytest.mark.slow),
        pytest.param("cutedsl_mha_extend_with_kvcache_any_window_64", "window of 150", NO_LIMIT - 1, marks=pytest.mark.slow),
    ],
)
def test_windows_beyond_every_sequence(kernel: str, name: str, window_left: int) -> None:
    """Tests that two values of window_left do not overflow: the largest that kernels receive, and the largest 32-bit integer of a
    caller."""
    spec = KernelRegistry.get().get_by_name(kernel)
    case = next(case for case in get_operator(spec.operator).all_cases() if case.name == name)
    assert isinstance(case.make, Recipe)
    with emulated_sm90() as emulator:
        result = verify_case(spec, replace(case, make=case.make.vary(window_left=window_left)))
    assert result.status is Status.PASSED, result.reason
    assert emulator.launches


def test_slots_out_of_range_name_nothing() -> None:
    """Asserts that tokens with these negative slots are not written. The low 32 bits of some of the slots are valid slots of the
    cache."""
    spec, case = next((spec, case) for spec, case in ELIGIBLE if spec.mode == "rmsnorm_qkv_rope" and "slot_mapping" in case.build())

    def make(draw: Draw) -> dict[str, Any]:
        arguments = case.make(draw)
        slots = draw.tensor([-(2**32) + 1, -(2**31) - 1, -(2**63), -1], torch.int64)
        return {**arguments, "slot_mapping": slots[: len(arguments["slot_mapping"])]}

    with emulated_sm90():
        result = verify_case(spec, replace(case, make=make))
    assert result.status is Status.PASSED, result.reason


@pytest.mark.parametrize("head_dim", [64, 256])
def test_decode_of_much_work(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a call that counts as much work. The operator's small cases have so few keys that KV heads are processed one by one."""
    monkeypatch.setattr(decode, "LITTLE", 0)
    monkeypatch.setattr(decode, "WHOLE", 64)
    config = decode.config_of("bfloat16", (head_dim, head_dim), 64, 8, "much", fp8=True, close=True)
    assert (config.abreast, config.swap_ab) == ((2, False) if head_dim == 64 else (1, True))
    kv_lens, e4m3 = [90, 0, 130], torch.float8_e4m3fn
    made = oracle.paged([2] * 3, kv_lens, 12, 4, head_dim, 64, torch.float32, torch.device("cpu"))
    k_scale, v_scale = torch.tensor([0.5, 1.0, 1.5, 0.7]), torch.tensor([1.2, 0.9, 0.6, 1.0])
    case = replace(made, q=made.q.bfloat16(), k_cache=made.k_cache.to(e4m3), v_cache=made.v_cache.to(e4m3))
    meant = replace(case, k_cache=case.k_cache.float() * k_scale.view(-1, 1), v_cache=case.v_cache.float() * v_scale.view(-1, 1))
    sinks = torch.linspace(-2.0, 3.0, 12)
    with emulated_sm90(seed=1):
        got = mha_decode_with_kvcache(
            case.q, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, 130, 2, sinks=sinks, return_lse=True,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    oracle.check(got, meant.wanted(oracle.Options(sinks=sinks)))


@pytest.mark.parametrize("size", [16, 64])
def test_decode_of_pages_that_overlap(size: int) -> None:
    """Pages that begin one token after another: a contiguous cache of any length has whole pages. The last has the first tokens."""
    draw = torch.Generator().manual_seed(1)
    heads, tokens, width = 2, 101, 128
    sizes = (1, 4), (heads, tokens), (heads, tokens)
    q, k, v = (torch.randn(*one, width, generator=draw).bfloat16() for one in sizes)
    shape, strides = (tokens - size + 1, size, heads, width), (width, width, tokens * width, 1)
    begin = [*range(tokens % size, tokens, size), 0]
    table, lengths = torch.tensor([begin], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    with emulated_sm90(seed=1):
        caches = k.as_strided(shape, strides), v.as_strided(shape, strides)
        got = tokenspeed_kernel_nvidia.mha_decode_with_kvcache(q, *caches, table, lengths, tokens)
    wide = (states.float().repeat_interleave(2, 0) for states in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q[0].float().unsqueeze(1), *wide).transpose(0, 1)
    torch.testing.assert_close(got.float(), wanted, atol=5e-3, rtol=2e-2)


def test_fp8_weights_of_scores_that_grow() -> None:
    """Tests scores that grow. Keys are processed from last to first. The first 128 keys of a sequence have larger scores: slightly
    larger in one sequence, far larger in another. The softmax weights of these keys would be too large for e4m3, so the kernel
    raises the shift of the exponents.
    """
    lengths = [200, 190, 260]
    q, k, v = oracle.ragged(lengths, 4, 1, 64, torch.float32, torch.device("cpu"))
    q = q.abs() + 0.5
    for first, size in ((0, 0.7), (200, 1.5), (390, 16.0)):
        k[first : first + 128] += size
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    with emulated_sm90(seed=1):
        got = mha_prefill(q, k, v, oracle.offsets(lengths, q.device), return_lse=True)
    wanted = oracle.attend_ragged(*(x.float() for x in (q, k, v)), lengths, oracle.Options())
    oracle.check(got, wanted, tolerance=0.04, row_tolerance=0.15)


@pytest.mark.parametrize("size", [1e-6, 3e5])
def test_queries_of_any_size_beside_an_fp8_cache(size: float) -> None:
    """Tests very small and very large queries. The kernel scales queries by a power of 2 into float16's range. Rows of the next
    sequence must not affect this power."""
    made = oracle.paged([9, 3], [40, 150], 4, 4, 64, 16, torch.float32, torch.device("cpu"))
    sizes = torch.tensor([size] * 9 + [size * 1e20] * 3).view(-1, 1, 1)
    case = replace(made, q=(made.q * sizes).bfloat16(), **{x: getattr(made, x).to(torch.float8_e4m3fn) for x in CACHES})
    for first, end, scale in ((0, 9, size), (9, 12, size * 1e20)):
        options = oracle.Options(softmax_scale=0.125 / scale)
        with emulated_sm90():
            got, _ = mha_extend_with_kvcache(
                case.q, case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, 9, 150, True,
                softmax_scale=options.softmax_scale, return_lse=True,
            )  # fmt: skip
        wide = replace(case, q=case.q.float(), **{x: getattr(case, x).float() for x in CACHES})
        wanted, _ = wide.wanted(options)
        oracle.check(got[first:end], (wanted[first:end], wanted[first:end]))


@pytest.mark.parametrize("page_size", [128, 256])
def test_one_program_serves_all_pages_of_whole_blocks(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that the program takes the page size from the cache, and that sequences end within a page, at its end and beyond."""
    used: list[Any] = []
    load = type(prefill.prefill_program).__call__
    monkeypatch.setattr(type(prefill.prefill_program), "__call__", lambda self, config: used.append(config) or load(self, config))
    prefill._program_of.cache_clear()
    case = oracle.paged([5, 70, 3, 1], [300, 256, 513, 128], 8, 1, 64, page_size, torch.bfloat16, torch.device("cpu"))
    with emulated_sm90(seed=1):
        got = mha_extend_with_kvcache(
            case.q, case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, 70, 513, True,
            return_lse=True,
        )  # fmt: skip
    oracle.check(got, case.wanted(oracle.Options(is_causal=True)))
    assert [config.page_size for config in used] == [128]


def test_experts_beyond_float16() -> None:
    """Tests activations and results of top-k slots that exceed float16's range."""
    layer = RandomLayer(torch.device("cpu"), 3, 2, 96, 64, dtype=torch.float16)
    x, weights, ids = layer.wide_tokens(5)
    with emulated_sm90(seed=1):
        got = grouped.moe_apply_many(x, layer.prepared, weights, ids, layer.plan)
    compare(got, layer.wanted(x, weights, ids))


def test_experts_that_must_be_exact() -> None:
    """Tests a plan that requests exact activations. Without this option, a call with so few pairs would use the streaming kernel,
    which splits elements."""
    layer = RandomLayer(torch.device("cpu"), 3, 2, 96, 64, exact_activations=True)
    x, weights, ids = layer.outlier_tokens(5, 2.0**100)
    with emulated_sm90(seed=1):
        got = moe_apply.moe_apply(x, layer.prepared, weights, ids, layer.plan)
    compare(got, layer.wanted(x, weights, ids))


def test_experts_with_split_elements() -> None:
    """Calls the grouped kernel, because the operator's small cases have so few pairs that they use the streaming kernel. k has an
    odd number of blocks, and calls may overlap.
    """
    layer = RandomLayer(torch.device("cpu"), 4, 2, 64, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(9)
    with emulated_sm90(seed=1) as emulator:
        for _ in range(2):
            got = grouped.moe_apply_many(x, layer.prepared, weights, ids, layer.plan)
            compare(got, layer.wanted(x, weights, ids))
            x = got
    assert len(emulator.launches) == 16


@pytest.mark.slow
@pytest.mark.parametrize("columns", [None, FEW_ROUNDED_COLUMNS])
def test_experts_with_fp8_activations(columns: int | None) -> None:
    """Calls the grouped kernel with fp8 activations, which the operator's small cases do not use. Calls may overlap."""
    layer = RandomLayer(torch.device("cpu"), 4, 2, 64, 160, activation_dtype="fp8", **GPT_OSS)
    layer.spread_scales([1])
    x, weights, ids = layer.tokens(9)
    with emulated_sm90(seed=1):
        for _ in range(2):
            wanted = layer.wanted(x, weights, ids)
            x = grouped.moe_apply_rounded(x, layer.prepared, weights, ids, layer.plan, columns=columns)
            assert (x.float() - wanted).norm() <= 2e-2 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("activation_dtype", "hidden"), [("none", 128), ("fp8", 160)])
@pytest.mark.parametrize("seed", [0, 1])
def test_experts_whose_ctas_share_columns(activation_dtype: str, hidden: int, seed: int) -> None:
    """Calls the grouped kernel whose clusters share columns, which no small case uses. In the first GEMM, one CTA of a cluster has
    no weights. In the second, the other CTA's last panel is missing. A token and an expert have no pairs. Calls may overlap.
    """
    layer = RandomLayer(torch.device("cpu"), 4, 2, hidden, 192, activation_dtype=activation_dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(9)
    ids[4], ids[ids == 0] = -1, 3
    with emulated_sm90(seed=seed):
        for _ in range(2):
            wanted = layer.wanted(x, weights, ids)
            x = paired.moe_apply_paired(x, layer.prepared, weights, ids, layer.plan)
            if activation_dtype == "none":
                compare(x, wanted)
            assert (x.float() - wanted).norm() <= 2e-2 * wanted.norm()


def test_experts_with_split_elements_beside_outliers() -> None:
    """Tests outliers in two tokens, and in the activations of one expert. The weights of the outliers are zero."""
    layer = RandomLayer(torch.device("cpu"), 4, 2, 64, 160, bias=True)
    assert layer.given.w13_weight_bias is not None
    layer.given.w13_weight_bias[1, [0, 160]] = 2.0**15
    layer.given.w2_weight[..., 0] &= 0xF0
    x, weights, ids = layer.outlier_tokens(9, 2.0**20)
    x[2:] = layer.tokens(7)[0]
    with emulated_sm90(seed=1):
        got = grouped.moe_apply_many(x, layer.prepared, weights, ids, layer.plan)
    compare(got, layer.wanted(x, weights, ids))
