"""Tests the adapters to FlashInfer: FlashInfer's signatures, and the arguments that the adapters pass.

The tests use stand-in modules for FlashInfer. The stand-ins' functions have the real functions' signatures, and compute the
documented results in PyTorch on a CPU. If FlashInfer's source shows that a real function violates the operator's contract, the
stand-in does so too, or raises an error. So an adapter may declare support for every case that passes. The last test is for a GPU
with the real FlashInfer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged
from tokenspeed_kernel_base.platform import named_platform, platform_of, use_platform
from tokenspeed_kernel_base.spec import KernelSpec, Priority
from tokenspeed_kernel_base.workspace import Keeper
from tokenspeed_kernel_nvidia.flashinfer import _memory
from tokenspeed_kernel_nvidia.flashinfer import package as _package

from .flashinfer_stand_in import declared, fixtures, forget_adapters, unparsed, with_signature

# FlashInfer's signatures, copied from the source of flashinfer-python 0.7.2 without annotations.
SIGNATURES = {
    "flashinfer.decode.trtllm_batch_decode_with_kv_cache": (
        "(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, "
        "out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout='HND', enable_pdl=None, "
        "backend='auto', q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None, "
        "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, "
        "bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False, cp_world=1, cp_rank=0, "
        "causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None, request_order_plan=None)"
    ),
    "flashinfer.prefill.trtllm_batch_context_with_kv_cache": (
        "(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size, "
        "cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, "
        "kv_layout='HND', enable_pdl=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, "
        "uses_shared_paged_kv_idx=True, causal=True, lse=None, return_lse=False, multi_ctas_kv_counter_buffer=None, "
        "use_fp16_softmax=None, uses_spcompress=None, backend='trtllm-gen')"
    ),
    "flashinfer.prefill.trtllm_ragged_attention_deepseek": (
        "(query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale, batch_size, "
        "window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None, "
        "skip_softmax_threshold_scale_factor=None, out=None, lse=None, sage_attn_sfs=(None, None, None, None), "
        "num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend='trtllm-gen', q_seq_lens_cpu=None, kv_seq_lens_cpu=None, "
        "use_fp16_softmax=None, uses_spcompress=None, skip_all_rows_active_check=True)"
    ),
}
# Conventions and units that the adapters rely on: a source file of FlashInfer, and the text in this file that states the
# convention.
FACTS = {
    "the generated kernels see window_left tokens and the token itself": (
        "flashinfer/data/csrc/trtllm_fmha_kernel_launcher.cu",
        "window_left == -1 ? INT_MAX : window_left + 1",
    ),
    "XQA too": ("flashinfer/decode.py", "sliding_win_size=window_left + 1 if window_left >= 0 else 0"),
    "a log-sum-exp is a logarithm to base 2": (
        "flashinfer/data/include/flashinfer/trtllm/fmha/lse.cuh",
        "lse_scale * (math::log2e * m + math::ptx_log2(d))",
    ),
    "it is not scaled": ("flashinfer/prefill.py", "run_args.append(1.0)  # lse_scale"),
    "sinks are float32": ("flashinfer/data/csrc/trtllm_fmha_kernel_launcher.cu", "attention_sinks must be a float tensor"),
    "a sink is an unscaled score": (
        "flashinfer/data/csrc/fmhaReduction.cu",
        "exp2f(attentionSinksPtr[localHeadIdxO] * M_LOG2E - maxVal * softmaxScaleLog2)",
    ),
    "an XQA sink too": ("flashinfer/data/csrc/xqa/mha.cu", "expf(attentionSinks[srcOffset] - globalRowMax[i])"),
    "strides are those of the keys": (
        "flashinfer/data/csrc/trtllm_fmha_kernel_launcher.cu",
        "runner_params.vStrideKeysValues = kv_stride_keys_values;",
    ),
    "XQA fills slots behind the end with zeros": ("flashinfer/data/csrc/xqa/ldgsts.cuh", "srcSize == 0 means filling with zeros"),
    "XQA wants zeros at first": (
        "flashinfer/decode.py",
        "Must be initialized to 0 for its first use.",
    ),
    "counters stay zero": ("flashinfer/decode.py", "self-resets the counters at the end of each"),
}

_CALLS: list[str] = []
KERNELS = [
    *(f"flashinfer_mha_prefill_{width}{suffix}" for width in (128, 192, 256) for suffix in ("", "_sinks")),
    *(f"flashinfer_mha_extend_with_kvcache_{width}" for width in (64, 128)),
    *(f"flashinfer_mha_decode_with_kvcache_{width}{suffix}" for width in (64, 128) for suffix in ("", "_sinks")),
    *(f"flashinfer_xqa_mha_decode_with_kvcache_{width}_{arch}" for width in (64, 128) for arch in ("sm90", "sm120")),
]


# -- against the source --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_source(source: Callable[[str], str], name: str) -> None:
    module, _, function = name.rpartition(".")
    assert declared(source(module.replace(".", "/") + ".py"), function) == unparsed(SIGNATURES[name])


@pytest.mark.parametrize("fact", FACTS)
def test_conventions_are_those_of_the_source(source: Callable[[str], str], fact: str) -> None:
    file, text = FACTS[fact]
    assert text in source(file)


# -- the stand-in --------------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, causal: bool, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the output and the base-2 LSE of one sequence. The queries are the sequence's last tokens."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(ratio, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    distance = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window != -1:
        hidden = hidden | (distance >= window + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[0], 1)], 2)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1).T / math.log(2)


def _check_common(given: dict[str, Any]) -> None:
    out, lse, workspace = given["out"], given["lse"], given["workspace_buffer"]
    sinks = given.get("sinks", given.get("attention_sinks"))
    assert given["bmm2_scale"] == 1.0
    assert out.is_contiguous(), "its strides are not looked at"
    assert workspace.dtype == torch.uint8
    assert workspace.numel() >= 128 << 20
    assert not workspace[:64].any()
    assert given["return_lse"] == (lse is not None)
    assert given["query"].stride(-1) == 1
    if sinks is not None:
        assert sinks.dtype == torch.float32
        assert sinks.is_contiguous()
        assert lse is None, "undocumented"


def _check_pages(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    k, v = given["kv_cache"]
    assert given["kv_layout"] == "NHD"
    assert k.stride() == v.stride(), "those of v are not looked at"
    assert k.stride(-1) == 1
    assert k.shape[1] in (16, 32, 64, 128)
    assert given["block_tables"].is_contiguous()
    assert given["block_tables"].dtype == given["seq_lens"].dtype == torch.int32
    counters = given["multi_ctas_kv_counter_buffer"]
    assert not counters.any()
    assert counters.numel() >= max(given["seq_lens"].numel() * given["query"].shape[1], 160)
    assert counters.data_ptr() % 16 == 0
    return k, v


@with_signature(
    SIGNATURES["flashinfer.decode.trtllm_batch_decode_with_kv_cache"],
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out sinks kv_layout lse "
    "return_lse multi_ctas_kv_counter_buffer",
)
def _decode(given: dict[str, Any]) -> Any:
    _check_common(given)
    k, v = _check_pages(given)
    q, out, lse, lens = (given[name] for name in ("query", "out", "lse", "seq_lens"))
    assert q.is_contiguous(), "XQA does not look at its strides"
    assert k.shape[1] * given["block_tables"].shape[1] >= given["max_seq_len"] >= lens.max()
    for index, length in enumerate(lens.tolist()):
        if not length:
            out[index] = torch.nan
            continue
        pages = given["block_tables"][index, : -(-length // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        rows = slice(index, index + 1)
        out[rows], of_one = _attend(q[rows], keys, values, given["bmm1_scale"], given["window_left"], True, given["sinks"])
        if lse is not None:
            lse[rows] = of_one
    return (out, lse) if lse is not None else out


@with_signature(
    SIGNATURES["flashinfer.prefill.trtllm_batch_context_with_kv_cache"],
    "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale batch_size cum_seq_lens_q "
    "cum_seq_lens_kv window_left out kv_layout sinks causal multi_ctas_kv_counter_buffer",
)
def _context(given: dict[str, Any]) -> Any:
    _check_common(given)
    k, v = _check_pages(given)
    q, out, lens = (given[name] for name in ("query", "out", "seq_lens"))
    starts = given["cum_seq_lens_q"].tolist()
    assert given["batch_size"] == len(lens) == len(starts) - 1
    assert given["cum_seq_lens_kv"].diff().tolist() == lens.tolist()
    assert given["cum_seq_lens_kv"].dtype == torch.int32
    assert given["causal"] or given["window_left"] == -1
    assert given["max_q_len"] <= q.shape[0]
    for index, length in enumerate(lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        if rows.stop == rows.start:
            continue
        assert rows.stop - rows.start <= given["max_q_len"]
        assert length <= given["max_kv_len"]
        pages = given["block_tables"][index, : -(-length // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1) for cache in (k, v))
        spoilt = not torch.isfinite(values).all()
        scale, window, causal, sinks = (given[name] for name in ("bmm1_scale", "window_left", "causal", "sinks"))
        result, _ = _attend(q[rows], keys[:length], values[:length], scale, window, causal, sinks)
        out[rows] = torch.nan if spoilt else result
    return out


@with_signature(
    SIGNATURES["flashinfer.prefill.trtllm_ragged_attention_deepseek"],
    "query key value workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale batch_size window_left "
    "cum_seq_lens_q cum_seq_lens_kv enable_pdl is_causal return_lse attention_sinks out lse",
)
def _ragged(given: dict[str, Any]) -> Any:
    _check_common(given)
    q, k, v, out, lse = (given[name] for name in ("query", "key", "value", "out", "lse"))
    assert (q.shape[2], k.shape[2], v.shape[2]) in ((128, 128, 128), (192, 192, 128), (256, 256, 256))
    starts, lens = given["cum_seq_lens_q"].tolist(), given["seq_lens"].tolist()
    assert given["cum_seq_lens_q"].dtype == torch.int32
    assert starts == given["cum_seq_lens_kv"].tolist()
    assert min(lens) > 0, "undefined"
    assert max(lens) <= given["max_q_len"] == given["max_kv_len"]
    assert given["batch_size"] == len(lens)
    assert given["is_causal"]
    for begin, length in zip(starts, lens, strict=False):
        rows = slice(begin, begin + length)
        scale, window, sinks = (given[name] for name in ("bmm1_scale", "window_left", "attention_sinks"))
        out[rows], of_one = _attend(q[rows], k[rows], v[rows], scale, window, True, sinks)
        if lse is not None:
            lse[rows] = of_one
    return (out, lse) if lse is not None else out


_FUNCTIONS = dict(zip(SIGNATURES, (_decode, _context, _ragged), strict=True))


flashinfer, specs = fixtures(_FUNCTIONS, "sm_100", _CALLS, "attention")


# -- without FlashInfer --------------------------------------------------------------------------------------------------------


def test_without_it_the_kernels_say_so(specs: dict[str, KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_package.metadata, "version", version)
    reason = _package.gap.__wrapped__()
    assert reason == "needs flashinfer-python >= 0.7.2"
    monkeypatch.setattr(_package, "gap", lambda: reason)
    q = torch.zeros(4, 4, 128, dtype=torch.bfloat16)
    with use_platform(named_platform("sm_100")):
        explained = tokenspeed_kernel.mha_prefill.explain(q, q, q, torch.tensor([0, 4], dtype=torch.int32))
    verdicts = {verdict.spec.name: verdict for verdict in explained.verdicts}
    assert verdicts["flashinfer_mha_prefill_128"].reason == reason


@pytest.mark.parametrize(
    ("version", "gap"),
    [
        ("0.7.2", None),
        ("0.7.2rc1", None),
        ("1.0", None),
        ("0.6.6", "needs flashinfer-python >= 0.7.2, this is 0.6.6"),
        ("unknown", "needs flashinfer-python >= 0.7.2, this is unknown"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, gap: str | None) -> None:
    monkeypatch.setattr(_package.metadata, "version", lambda name: version)
    monkeypatch.setattr(_package.importlib.util, "find_spec", lambda name: name)
    assert _package.gap.__wrapped__() == gap


def test_a_package_without_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_package.metadata, "version", lambda name: "0.7.2")
    monkeypatch.setattr(_package.importlib.util, "find_spec", lambda name: None)
    assert "is not found" in str(_package.gap.__wrapped__())


def test_a_package_that_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match=r"no_such\.module\.function .*ModuleNotFoundError"):
        _package.load("no_such.module", "function")


def test_other_machines_are_refused_first(specs: dict[str, KernelSpec]) -> None:
    for platform in ("sm_80", "sm_110", "cpu", "gfx950"):
        for spec in specs.values():
            assert spec.capability.gap(named_platform(platform)).startswith(("needs an ", "needs architecture"))


# -- the adapters with the stand-in --------------------------------------------------------------------------------------------


def _prefill_arguments(**options: Any) -> dict[str, Any]:
    return ragged([5, 0, 70], 8, 2, 128, **options)(Draw(torch.device("cpu"), 0))


def _decode_arguments(**options: Any) -> dict[str, Any]:
    return paged([1, 70, 130], None, 8, 2, page_size=64, **options)(Draw(torch.device("cpu"), 0))


def _extend_arguments(**options: Any) -> dict[str, Any]:
    return paged([70, 128], [3, 20], 8, 2, page_size=64, is_causal=True, **options)(Draw(torch.device("cpu"), 0))


@pytest.mark.usefixtures("flashinfer", "specs")
@pytest.mark.parametrize(
    ("operator", "arguments", "served"),
    [
        ("mha_prefill", _prefill_arguments(), "flashinfer_mha_prefill_128"),
        ("mha_prefill", _prefill_arguments(sinks=True, window_left=7), "flashinfer_mha_prefill_128_sinks"),
        ("mha_prefill", _prefill_arguments(sinks=True, return_lse=True), None),
        ("mha_prefill", _prefill_arguments(logit_cap=5.0), None),
        ("mha_prefill", _prefill_arguments(dtype=torch.float32), None),
        ("mha_decode_with_kvcache", _decode_arguments(return_lse=True), "flashinfer_mha_decode_with_kvcache_64"),
        ("mha_decode_with_kvcache", _decode_arguments(sinks=True), "flashinfer_mha_decode_with_kvcache_64_sinks"),
        ("mha_decode_with_kvcache", _decode_arguments(max_seqlen_q=2), None),
        ("mha_decode_with_kvcache", _decode_arguments(cache_dtype=torch.float8_e4m3fn), None),
        ("mha_extend_with_kvcache", _extend_arguments(), None),
    ],
)
def test_declarations_for_blackwell(operator: str, arguments: dict[str, Any], served: str | None) -> None:
    assert _taking(operator, arguments) == ([] if served is None else [served])


def _taking(operator: str, arguments: dict[str, Any]) -> list[str]:
    """Returns this package's kernels that are eligible for a call."""
    verdicts = getattr(tokenspeed_kernel, operator).explain(**arguments).verdicts
    return [verdict.spec.name for verdict in verdicts if verdict.accepted and verdict.spec.solution == "flashinfer"]


@pytest.mark.usefixtures("flashinfer", "specs")
def test_declarations_for_hopper() -> None:
    with use_platform(replace(named_platform("sm_90"), pretended=False, emulated=True)):
        for arguments in (_decode_arguments(), _decode_arguments(sinks=True, window_left=3)):
            assert _taking("mha_decode_with_kvcache", arguments) == ["flashinfer_xqa_mha_decode_with_kvcache_64_sm90"]
        assert _taking("mha_decode_with_kvcache", _decode_arguments(return_lse=True)) == []


def test_these_are_declared(specs: dict[str, KernelSpec]) -> None:
    assert sorted(specs) == sorted(KERNELS)


def test_kernels_rank_between_our_own_and_the_portable_ones_and_xqa_on_hopper_below_both(specs: dict[str, KernelSpec]) -> None:
    for name, spec in specs.items():
        if "xqa" in name and name.endswith("_sm90"):  # measured there
            assert Priority.REFERENCE < spec.priority < Priority.PORTABLE
        else:
            assert Priority.PORTABLE < spec.priority < Priority.SPECIALIZED


def _cases(mode: str) -> list[Case]:
    """Returns cases with pages of 64 tokens and wide heads, of which the operators' own cases have few."""
    if mode == "mha_prefill":
        return [
            Case(f"{width} {options}", ragged([1, 90, 0, 7, 0], 8, 2, width, v_width, **options))
            for width, v_width in ((128, 128), (192, 128), (256, 256))
            for options in (
                {"return_lse": True, "softmax_scale": 0.1, "dtype": torch.float16},
                {"sinks": True, "window_left": 0},
                {"sinks": True, "window_left": 31, "hint": True},
            )
        ]
    rows: list[tuple[list[int], list[int] | None]] = [([1, 127, 128, 129, 0, 300], None)]
    if mode == "mha_extend_with_kvcache":
        rows = [([140, 20, 300, 128], [12, 20, 1, 0])]
    shapes: list[dict[str, Any]] = [
        {"page_size": 64, "return_lse": True},
        {"window_left": 0, "page_size": 64},
        {"window_left": 63, "sinks": True, "dtype": torch.float16, "page_size": 32},
        {"softmax_scale": 0.3, "sinks": True},
        {"head_dim": 128, "window_left": 100, "sinks": True, "page_size": 64},
    ]
    extra: dict[str, Any] = {"is_causal": True} if mode == "mha_extend_with_kvcache" else {"stale": True}
    return [Case(f"{shape}", paged(lens, new, 8, 2, **shape, **extra)) for lens, new in rows for shape in shapes]


def _finite(case: Case) -> Case:
    """Returns the case with zeros in slots that hold no token. FlashInfer's kernels read page 0 instead of freed pages, so it must
    not hold NaN."""

    def make(draw: Draw) -> dict[str, Any]:
        arguments = case.make(draw)
        caches = {name: arguments[name].nan_to_num(0.0) for name in ("k_cache", "v_cache")}
        return {**arguments, **caches}

    return Case(case.name, make)


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("mode", ["mha_prefill", "mha_decode_with_kvcache"])
def test_results(specs: dict[str, KernelSpec], mode: str) -> None:
    """Verifies the adapters' kernels on cases in which cache slots without a token hold NaN."""
    small = (case for case in get_operator(mode).all_cases() if not case.large)
    for case in (*_cases(mode), *(_finite(case) if "freed" in case.name else case for case in small)):
        results = [verify_case(spec, case, "cpu") for spec in specs.values() if spec.mode == mode]
        assert_none_wrong(results)
        if case in _cases(mode):
            assert sum(result.status is Status.PASSED for result in results) == 1, case.name


@pytest.mark.usefixtures("flashinfer", "specs")
def test_extend_runs_if_requested_by_name() -> None:
    for case in _cases("mha_extend_with_kvcache"):
        arguments = case.build()
        if arguments.pop("return_lse", False):
            continue
        arguments |= {"cu_seqlens_kv": None, "max_seqlen_q": 2**40}
        name = f"flashinfer_mha_extend_with_kvcache_{arguments['q'].shape[2]}"
        out = tokenspeed_kernel.mha_extend_with_kvcache(**arguments, override=name)
        expected = tokenspeed_kernel.mha_extend_with_kvcache(**arguments, solution="reference")
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=2e-2)
    assert set(_CALLS) == {"flashinfer.prefill.trtllm_batch_context_with_kv_cache"}


@pytest.mark.usefixtures("flashinfer")
def test_the_stand_in_shows_why_extending_is_not_chosen() -> None:
    from tokenspeed_kernel_nvidia.flashinfer.extend_device import mha_extend_with_kvcache

    assert mha_extend_with_kvcache(**_extend_arguments(stale=True)).isnan().any()


@pytest.mark.usefixtures("flashinfer")
def test_other_strides() -> None:
    """Tests a q that is a slice, caches that are views of one tensor, a column-major page table, and an out that is a slice or
    transposed."""
    from tokenspeed_kernel_nvidia.flashinfer.decode_device import mha_decode_with_kvcache

    arguments = _decode_arguments()
    wanted = tokenspeed_kernel.mha_decode_with_kvcache(**arguments, solution="reference")
    arguments["q"] = torch.cat([arguments["q"], arguments["q"]], 1)[:, 8:]
    arguments["page_table"] = arguments["page_table"].T.contiguous().T
    k, v = arguments["k_cache"], arguments["v_cache"]
    arguments["k_cache"], arguments["v_cache"] = torch.stack([k, v], 1).unbind(1)
    wide = torch.full((5, 8, 64), 7.0, dtype=torch.bfloat16)
    out = wide[1:4]
    assert mha_decode_with_kvcache(**arguments, out=out) is out
    torch.testing.assert_close(out, wanted, atol=1e-2, rtol=2e-2)
    assert (wide[[0, 4]] == 7).all()
    transposed = torch.full((3, 64, 8), 7.0, dtype=torch.bfloat16).mT
    assert mha_decode_with_kvcache(**arguments, out=transposed) is transposed
    assert torch.equal(transposed, out)


@pytest.mark.usefixtures("flashinfer")
def test_caches_are_never_copied() -> None:
    from tokenspeed_kernel_nvidia.flashinfer.decode_device import mha_decode_with_kvcache
    from tokenspeed_kernel_nvidia.flashinfer.extend_device import mha_extend_with_kvcache

    for attend, arguments in ((mha_decode_with_kvcache, _decode_arguments()), (mha_extend_with_kvcache, _extend_arguments())):
        k, v = arguments["k_cache"], arguments["v_cache"]
        across = [cache.mT.contiguous().mT for cache in (k, v)]
        for caches in ((torch.cat([k, k], 3)[..., :64], v), across):
            arguments["k_cache"], arguments["v_cache"] = caches
            with pytest.raises(ValueError, match="k_cache and v_cache of the same strides"):
                attend(**arguments)


@pytest.mark.usefixtures("flashinfer")
def test_nothing_is_read_from_the_device_where_the_host_knows_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_nvidia.flashinfer import prefill_device as prefill

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(prefill, "_attend", lambda *args, **kwargs: seen.append({**kwargs, "longest": args[5]}))
    arguments = _prefill_arguments()
    on_device = arguments["cu_seqlens"]
    for hint in ([0, 5, 5, 75], torch.tensor([0, 5, 5, 75])):
        made, kept = prefill._without_empty(on_device, hint)
        assert made is not None
        assert (made.tolist(), kept) == ([0, 5, 75], [5, 70])
        prefill.mha_prefill(**arguments, cu_seqlens_cpu=hint)
    assert prefill._without_empty(torch.tensor([0, 3, 4]), None) == (None, [3, 1])
    assert [(call["longest"], call["batch_size"]) for call in seen] == [(70, 2)] * 2


@pytest.fixture
def pretended_streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fakes the current CUDA stream on a CPU, and its capture state. Returns the dict that sets both."""
    state: dict[str, Any] = {"stream": 7, "capturing": False}
    keeper = Keeper(1 << 15, capturing=lambda: state["capturing"], wait=lambda device: None)
    monkeypatch.setattr(_memory, "_keeper", keeper)
    monkeypatch.setattr(_memory, "_where", lambda device: (-1, state["stream"]))
    monkeypatch.setattr(_memory, "_WORKSPACE_BYTES", 1 << 10)
    return state


@pytest.mark.usefixtures("pretended_streams")
def test_memory_is_kept() -> None:
    cpu = torch.device("cpu")
    assert _memory.workspace(cpu) is _memory.workspace(cpu)
    first = _memory.counters(cpu, 10)
    assert first.numel() == 1 << 10
    assert first is _memory.counters(cpu, 1 << 10)
    assert _memory.counters(cpu, (1 << 10) + 1).numel() == 1 << 11


def test_memory_of_a_captured_graph(pretended_streams: dict[str, Any]) -> None:
    cpu, state = torch.device("cpu"), pretended_streams
    state["capturing"] = True
    with pytest.raises(RuntimeError, match="once before a graph is captured"):
        _memory.workspace(cpu)
    own = _memory.counters(cpu, 10)
    state["capturing"] = False
    space, small = _memory.workspace(cpu), _memory.counters(cpu, 10)
    state["stream"] = 8
    assert _memory.workspace(cpu) is not space
    large = _memory.counters(cpu, 1 << 15)
    state["capturing"] = True
    assert _memory.workspace(cpu) is space
    captured = [own, *(_memory.counters(cpu, wanted) for wanted in (10, 10, 1 << 14))]
    taken = sorted((each.data_ptr(), each.numel()) for each in (small, large, *captured))
    assert all(at + 4 * count <= after for (at, count), (after, _) in itertools.pairwise(taken)), "each has its own"
    assert not any(each.any() for each in captured)


@pytest.mark.usefixtures("flashinfer")
def test_offsets_are_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_nvidia.flashinfer import prefill_device as prefill

    monkeypatch.setattr(prefill, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="must be left out of cu_seqlens"):
        prefill._without_empty(torch.tensor([0, 5, 5, 75]), [0, 5, 5, 75])
    assert prefill._without_empty(torch.tensor([0, 5, 75]), [0, 5, 75]) == (None, [5, 70])


# -- the real FlashInfer -------------------------------------------------------------------------------------------------------


@pytest.mark.nvidia
@pytest.mark.parametrize("name", KERNELS)
def test_on_the_device(specs: dict[str, KernelSpec], name: str) -> None:
    device = torch.device("cuda")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    spec = specs[name]
    gap = spec.capability.gap(platform_of(device))
    if gap is not None:
        pytest.skip(gap)
    forget_adapters()
    cases = [case for case in (*_cases(spec.mode), *get_operator(spec.operator).all_cases()) if not case.large]
    if spec.mode == "mha_extend_with_kvcache":  # extend needs finite values in unused slots, see `extend_device`
        cases = [case for case in cases if "NaN" not in case.name]
    results = [verify_case(spec, case, device) for case in cases]
    assert_none_wrong(results)
