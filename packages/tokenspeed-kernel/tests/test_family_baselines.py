"""Tests the adapters for vLLM's kernels in the benchmark of operator families, with stand-ins for vLLM's functions.

A stand-in has the parameters of a function of vLLM 0.26, in order, and computes what that function's docstring states. So an
adapter that passes a wrong argument, layout or scale causes a wrong result or an error.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.activation.swiglu_quantize import _silu as silu_case
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged
from tokenspeed_kernel_base.ops.attention.dsa_indexer_scores import _inputs as prefill_inputs
from tokenspeed_kernel_base.ops.attention.dsa_indexer_scores_with_kvcache import index_inputs
from tokenspeed_kernel_base.ops.attention.mla_sparse_with_kvcache import _inputs as sparse_inputs
from tokenspeed_kernel_base.ops.attention.top_k_indices import _inputs as top_k_inputs
from tokenspeed_kernel_base.ops.gemm._inputs import fp8
from tokenspeed_kernel_base.ops.kvcache.latent_groups import mla_cache_views
from tokenspeed_kernel_base.ops.norm.rmsnorm_quantize import _case as rmsnorm_case

CPU = torch.device("cpu")
LATENT: dict[str, Any] = {"head_dim": 576, "kv_lora_rank": 512, "page_size": 64, "softmax_scale": 0.1352}
FP8 = torch.float8_e4m3fn


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes attention of queries ``[heads, width]`` to keys and values ``[keys, heads or 1, width]``. Returns the outputs, and
    the LSEs without sinks."""
    scores = torch.einsum("hd,khd->hk", q.float(), k.float().expand(-1, len(q), -1)) * scale
    lse = scores.logsumexp(1)
    total = lse if sink is None else torch.logaddexp(lse, sink.float())
    weights = (scores - total[:, None]).exp()
    return torch.einsum("hk,khd->hd", weights, v.float().expand(-1, len(q), -1)), lse


# -- FlashMLA ----------------------------------------------------------------------------------------------------------------------


class Plan:
    made = False


def dense_decode(
    q: Tensor, kcache: Tensor, head_size_v: int, seqlens_k: Tensor, block_table: Tensor, softmax_scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    assert is_causal
    assert q.dim() == 4
    assert kcache.shape[1:3] == (64, 1)
    outputs, sums = [], []
    for i, length in enumerate(seqlens_k.tolist()):
        keys = kcache[block_table[i, : -(-length // 64)].long()].flatten(0, 1)[:length]
        got, lse = attend(q[i, 0], keys, keys[..., :head_size_v], softmax_scale)
        outputs.append(got.to(torch.bfloat16))
        sums.append(lse)
    return torch.stack(outputs).unsqueeze(1), torch.stack(sums).unsqueeze(2)


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: Plan, num_splits: None = None, softmax_scale: float | None = None, causal: bool = False,
    is_fp8_kvcache: bool = False, indices: Tensor | None = None, attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None, extra_indices_in_kvcache: Tensor | None = None, topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert num_splits is None
    assert softmax_scale is not None
    tile_scheduler_metadata.made = True
    if not is_fp8_kvcache:
        assert block_table is not None
        assert cache_seqlens is not None
        return dense_decode(q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal)
    assert indices is not None
    assert k_cache.shape[2:] == (1, 656)
    assert not causal
    codes, scales, rope = mla_cache_views(k_cache.view(torch.uint8).squeeze(2))
    tokens = torch.cat((codes.float() * scales.repeat_interleave(128, dim=-1), rope.float()), dim=-1)
    found = flash_mla_sparse_fwd(
        q.squeeze(1), tokens.flatten(0, 1).unsqueeze(1), indices, softmax_scale, head_dim_v, topk_length=topk_length
    )
    return found[0].unsqueeze(1), found[1].unsqueeze(2)


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert q.shape[1] % 64 == 0
    assert kv.shape[1] == indices.shape[1] == 1
    result = torch.zeros(*q.shape[:2], d_v, dtype=q.dtype)
    for i, chosen in enumerate(indices[:, 0]):
        counted = chosen if topk_length is None else chosen[: topk_length[i]]
        keys = kv[counted[counted >= 0].long()]
        if len(keys):
            result[i] = attend(q[i], keys, keys[..., :d_v], sm_scale)[0].to(q.dtype)
    return result, result[..., 0].float(), result[..., 0].float()


def fwd_kvcache_mla_fp8(
    q: Tensor, kcache: Tensor, head_size_v: int, seqlens_k: Tensor, block_table: Tensor, softmax_scale: float, is_causal: bool,
    tile_scheduler_metadata: str, num_splits: str, descale_q: Tensor, descale_k: Tensor,
) -> list[Tensor]:  # fmt: skip
    assert (tile_scheduler_metadata, num_splits) == ("plan of 16 heads", "splits")
    assert descale_q.shape == descale_k.shape == (1,)
    wide = (q.float() * descale_q, kcache.float() * descale_k)
    return list(dense_decode(*wide, head_size_v, seqlens_k, block_table, softmax_scale, is_causal))


FLASH_MLA = SimpleNamespace(
    get_mla_metadata=lambda: (Plan(), None),
    flash_mla_with_kvcache=flash_mla_with_kvcache,
    flash_mla_sparse_fwd=flash_mla_sparse_fwd,
)
FLASH_MLA_FP8 = SimpleNamespace(
    get_mla_decoding_metadata_dense_fp8=lambda seqlens_k, num_heads_per_head_k, num_heads_k: (
        f"plan of {num_heads_per_head_k // num_heads_k} heads",
        "splits",
    ),
    fwd_kvcache_mla_fp8=fwd_kvcache_mla_fp8,
)

# -- DeepGEMM ----------------------------------------------------------------------------------------------------------------------


def scores_of(q: Tensor, k: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    return torch.relu(k.float() @ q.float().t()) @ weights * scale


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, None], kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor,
    clean_logits: bool = True,
) -> Tensor:  # fmt: skip
    assert not clean_logits
    assert cu_seqlen_ks.dtype == cu_seqlen_ke.dtype == torch.int32
    result = torch.full((len(q[0]), len(kv[0])), torch.nan)
    for i, (first, end) in enumerate(zip(cu_seqlen_ks.tolist(), cu_seqlen_ke.tolist(), strict=True)):
        result[i, first:end] = scores_of(q[0][i], kv[0][first:end], kv[1][first:end], weights[i])
    return result


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, None], kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, schedule_meta: str,
    max_context_len: int, clean_logits: bool = False,
) -> Tensor:  # fmt: skip
    batch, new, _, dim = q[0].shape
    pages, size, one, bytes_of_slot = kv_cache.shape
    assert (one, bytes_of_slot, kv_cache.dtype, clean_logits) == (1, dim + 4, torch.uint8, False)
    assert context_lens.shape == (batch, new)
    assert schedule_meta == f"plan of {size} for 132"
    flat = kv_cache.reshape(pages, -1)
    keys = flat[:, : size * dim].contiguous().view(FP8).view(pages, size, dim)
    scales = flat[:, size * dim :].contiguous().view(torch.float32)
    result = torch.full((batch * new, max_context_len), torch.nan)
    for i in range(batch * new):
        length = int(context_lens.flatten()[i])
        used = block_table[i // new, : -(-length // size)].long()
        k, scale = keys[used].flatten(0, 1)[:length], scales[used].flatten()[:length]
        result[i, :length] = scores_of(q[0].flatten(0, 1)[i], k, scale, weights[i])
    return result


def fp8_gemm_nt(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, disable_ue8m0_cast: bool = False) -> None:
    assert disable_ue8m0_cast
    (left, left_scale), (right, right_scale) = a, b
    assert left.is_contiguous()
    assert right.is_contiguous()
    assert left_scale.stride(0) == 1, "column by column"
    wide = left.float() * left_scale.repeat_interleave(128, 1)[:, : left.shape[1]]
    by_row = right_scale.repeat_interleave(128, 0)[: len(right)].repeat_interleave(128, 1)[:, : right.shape[1]]
    d.copy_(wide @ (right.float() * by_row).t())


DEEP_GEMM = SimpleNamespace(
    get_num_sms=lambda: 132,
    get_paged_mqa_logits_metadata=lambda context_lens, block_kv, num_sms: f"plan of {block_kv} for {num_sms}",
    fp8_fp4_paged_mqa_logits=fp8_fp4_paged_mqa_logits,
    fp8_fp4_mqa_logits=fp8_fp4_mqa_logits,
    get_mn_major_tma_aligned_tensor=lambda scale: scale.t().contiguous().t(),
    fp8_gemm_nt=fp8_gemm_nt,
)

# -- FlashAttention-3 and vLLM's operators -----------------------------------------------------------------------------------------


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int, cu_seqlens_k: Tensor,
    softmax_scale: float | None = None, causal: bool = False, return_softmax_lse: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, fa_version: int = 2, s_aux: Tensor | None = None,
) -> Any:  # fmt: skip
    assert fa_version == 3
    assert s_aux is None or s_aux.dtype == torch.bfloat16
    bounds, group = cu_seqlens_q.tolist(), q.shape[1] // k.shape[1]
    assert max_seqlen_q == max_seqlen_k == max(end - begin for begin, end in itertools.pairwise(bounds))
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    wide = [q.float().unflatten(1, (-1, group)), k.float(), v.float()]
    out, lse = torch.empty(len(q), q.shape[1], v.shape[2]), torch.empty(q.shape[1], len(q))
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        factors = [1.0 if s is None else s[i][:, None] for s in (q_descale, k_descale, v_descale)]
        heads = wide[0][begin:end] * (factors[0][..., None] if isinstance(factors[0], Tensor) else 1.0)
        keys, values = wide[1][begin:end] * factors[1], wide[2][begin:end] * factors[2]
        for t in range(end - begin):
            seen = t + 1 if causal else end - begin
            both = (x[:seen].repeat_interleave(group, 1) for x in (keys, values))
            out[begin + t], lse[:, begin + t] = attend(heads[t].flatten(0, 1), *both, scale, s_aux)
    result = out.to(torch.bfloat16 if q.dtype == FP8 else q.dtype)
    return (result, lse) if return_softmax_lse else result


def top_k_per_row_prefill(
    logits: Tensor, rowStarts: Tensor, rowEnds: Tensor, indices: Tensor, numRows: int, stride0: int, stride1: int, topK: int
) -> None:
    assert (logits.stride(), len(logits), indices.shape) == ((stride0, stride1), numRows, (numRows, topK))
    indices.fill_(-1)
    for row, begin, end, out in zip(logits, rowStarts.tolist(), rowEnds.tolist(), indices, strict=True):
        # Among equal scores this stand-in selects the last positions. It returns positions in another order than the operator.
        best = row[begin:end].flip(0).sort(descending=True, stable=True).indices[:topK]
        out[: len(best)] = (end - begin - 1 - best).int()


def persistent_topk(logits: Tensor, lengths: Tensor, output: Tensor, workspace: Tensor, k: int, max_seq_len: int) -> None:
    assert workspace.dtype == torch.uint8
    assert max_seq_len == logits.shape[1]
    top_k_per_row_prefill(logits, torch.zeros_like(lengths), lengths, output, len(logits), *logits.stride(), k)


def quantise(result: Tensor, scale: Tensor, values: Tensor, block: int) -> None:
    parts = values.float().unflatten(1, (-1, block))
    scale.copy_(parts.abs().amax(2) / 448)
    result.copy_((parts / scale[..., None]).flatten(1).to(FP8))


def normed(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> Tensor:
    if residual is not None:
        x = residual.add_(x)
    return (torch.nn.functional.rms_norm(x.float(), (x.shape[1],), None, epsilon) * weight.float()).to(x.dtype)


def rms_norm_dynamic_per_token_quant(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float, scale_ub: None, residual: Tensor | None
) -> None:
    quantise(result, scale, normed(input, weight, epsilon, residual), input.shape[1])


def rms_norm_per_block_quant(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float, scale_ub: None, residual: Tensor | None,
    group_size: int, is_scale_transposed: bool,
) -> None:  # fmt: skip
    assert not is_scale_transposed
    quantise(result, scale, normed(input, weight, epsilon, residual), group_size)


def activated(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def silu_and_mul_per_block_quant(out: Tensor, input: Tensor, scales: Tensor, group_size: int) -> None:
    quantise(out, scales, activated(input), group_size)


def silu_and_mul_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    result.copy_((activated(input).float() / scale).clamp(-448, 448).to(FP8))


OPERATORS = SimpleNamespace(
    top_k_per_row_prefill=top_k_per_row_prefill,
    persistent_topk=persistent_topk,
    cooperative_topk=persistent_topk,
    rms_norm_dynamic_per_token_quant=rms_norm_dynamic_per_token_quant,
    rms_norm_per_block_quant=rms_norm_per_block_quant,
    silu_and_mul_per_block_quant=silu_and_mul_per_block_quant,
    silu_and_mul_quant=silu_and_mul_quant,
)
MODULES = {
    "vllm.third_party.flashmla.flash_mla_interface": FLASH_MLA,
    "vllm.third_party.deep_gemm": DEEP_GEMM,
    "vllm.vllm_flash_attn.flash_attn_interface": SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
}
NAMESPACES = {"_C": OPERATORS, "_flashmla_extension_C": FLASH_MLA_FP8}


# A time limit in seconds that no test reaches.
AGES_S = 1e5


@pytest.fixture
def program(programs: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = programs("measure_families")
    monkeypatch.setattr(found, "_CHECK_S", AGES_S)
    monkeypatch.setattr(found.family_baselines_vllm, "_installed", MODULES.__getitem__)
    operators: Callable[..., Any] = lambda module="_C_stable_libtorch", namespace="_C": NAMESPACES[namespace]  # noqa: E731
    monkeypatch.setattr(found.family_baselines_vllm, "_operators", operators)
    return found


BLOCKS: dict[str, Any] = {"a_scale": "block", "b_scale": "block"}
BOTH: dict[str, Any] = {"dtype": FP8, "scales": ("q_scale", "kv_scale")}
EACH: dict[str, Any] = {"dtype": FP8, "scales": ("q_scale", "k_scale", "v_scale")}
SPARSE: dict[str, Any] = {"kv_lora_rank": 512, "rope_dim": 64, "page_size": 64, "top_k": 20, "softmax_scale": 0.1352}
INDEXER: dict[str, Any] = {"heads": 8, "head_dim": 128, "dtype": FP8}
# Baselines and operators, with a call that the baseline supports: a case, or the name of one of the operator's cases.
SERVED: list[tuple[str, str, str | Case]] = [
    ("FlashMLA", "mla_decode_with_kvcache", Case("bfloat16", paged([70, 1, 64], heads=16, **LATENT))),
    ("FlashMLA", "mla_decode_with_kvcache", Case("fp8 without scales", paged([70, 9], heads=16, dtype=FP8, **LATENT))),
    ("FlashMLA", "mla_decode_with_kvcache", Case("fp8", paged([70, 9], heads=16, **BOTH, **LATENT))),
    ("FlashMLA", "mla_sparse_with_kvcache", Case("16 heads", sparse_inputs([70, 9], heads=16, **SPARSE))),
    (
        "FlashMLA",
        "mla_sparse_with_kvcache",
        Case("128 heads, lengths", sparse_inputs([70, 9], [3, 1], heads=128, lengths=True, **SPARSE)),
    ),
    (
        "FlashMLA",
        "mla_sparse_with_kvcache",
        Case("a scale for each 128, lengths", sparse_inputs([70, 9], heads=16, lengths=True, grouped=True, **SPARSE)),
    ),
    ("DeepGEMM", "dsa_indexer_scores_with_kvcache", Case("one new token", index_inputs([200, 64], **INDEXER))),
    ("DeepGEMM", "dsa_indexer_scores_with_kvcache", Case("two new tokens", index_inputs([70, 9], new=2, **INDEXER))),
    ("DeepGEMM", "dsa_indexer_scores", Case("all new", prefill_inputs([40], **INDEXER))),
    ("DeepGEMM", "dsa_indexer_scores", Case("6 of 150", prefill_inputs([6], [150], **INDEXER))),
    ("DeepGEMM", "mm", Case("blocks of 128", fp8(9, 300, 200, **BLOCKS))),
    ("vLLM", "top_k_indices", "equal scores, no lengths"),
    ("vLLM", "top_k_indices", "fewer than wanted, as many, more"),
    ("vLLM, decode", "top_k_indices", Case("equal scores", top_k_inputs([3000, 600, 9], 512, steps=0.5))),
    ("FlashAttention-3", "mha_prefill", Case("bfloat16", ragged([40, 3, 1], 8, 2, 128))),
    ("FlashAttention-3", "mha_prefill", Case("sinks", ragged([40, 3], 8, 2, 64, sinks=True))),
    ("FlashAttention-3", "mha_prefill", Case("fp8", ragged([40, 3], 8, 2, 64, sinks=True, **EACH))),
    ("FlashAttention-3", "mla_prefill", Case("bfloat16", ragged([40, 3], 2, 2, 192, 128, softmax_scale=0.1))),
    ("FlashAttention-3", "mla_prefill", Case("lse, not causal", ragged([9, 3], 2, 2, 192, 128, return_lse=True, is_causal=False))),
    ("FlashAttention-3", "mla_prefill", Case("fp8", ragged([40, 3], 2, 2, 192, 128, **EACH))),
    ("vLLM", "rmsnorm_quantize", rmsnorm_case("fp8", "per token", 9, 256)),
    ("vLLM", "rmsnorm_quantize", rmsnorm_case("fp8", "blocks of 128", 9, 256, granularity="block", residual=False)),
    ("vLLM", "swiglu_quantize", silu_case("fp8", "blocks of 128", 9, 2 * 256, granularity="block")),
    ("vLLM", "swiglu_quantize", "silu_and_mul, fp8_with_scale: scale [], float32"),
]


def call_of(operator: str, case: str | Case) -> tuple[str, Case]:
    found = case if isinstance(case, Case) else next(each for each in get_operator(operator).all_cases() if each.name == case)
    return operator, found


@pytest.mark.parametrize(
    ("name", "operator", "case"),
    SERVED,
    ids=[f"{name}, {operator}: {case.name if isinstance(case, Case) else case}" for name, operator, case in SERVED],
)
def test_an_adapter_matches_the_operator(program: ModuleType, name: str, operator: str, case: str | Case) -> None:
    shape = program.Shape("a family", *call_of(operator, case))
    who, _ = program.measure(shape, CPU, program.Effort(1, 0.001, AGES_S, time.monotonic() + AGES_S))
    (baseline,) = [each for each in who if each.who.name == name]
    assert (baseline.status, baseline.reason, baseline.checked) == ("measured", "", "reference")
    assert len(baseline.rounds) == 1


def test_the_plan_of_a_decode_is_made_before_it_is_timed(program: ModuleType) -> None:
    """The setup of a call must make FlashMLA's plan. Otherwise a graph would contain the planning for all copies of the arguments
    but the first."""
    op = get_operator("mla_decode_with_kvcache")
    arguments = op.complete(Case("bfloat16", paged([70, 1], heads=16, **LATENT)).build(CPU))
    call = program.family_baselines_vllm.flash_mla.bound(arguments)
    assert call.call.args[5].made


def test_modules_of_vllm_are_imported_without_vllm_itself(
    programs: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Modules of vLLM are imported from their folder, without vLLM's ``__init__``. A module that fails must give its reason at each
    import, and other modules must still work."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this takes twenty seconds')")
    (package / "works.py").write_text("value = 1")
    (package / "fails.py").write_text("raise AssertionError('there is no compiler')")
    baselines = programs("family_baselines_vllm")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(baselines, "_FAILED", {})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    try:
        assert baselines._installed("vllm.works").value == 1
        with pytest.raises(AssertionError, match="there is no compiler"):
            baselines._installed("vllm.fails")
        with pytest.raises(ImportError, match="AssertionError: there is no compiler"):
            baselines._installed("vllm.fails")
        assert baselines._FAILED == {"vllm.fails": "AssertionError: there is no compiler"}
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([4, 1, 2], [1, 2, 3]),  # position 4 has the same score as position 3
        ([1, 2, 0], [0, 1, 2]),  # position 0 has a lower score: the chosen positions are returned
        ([1, 1, 2], [1, 1, 2]),  # a duplicate position
        ([1, 2, -1], [1, 2, -1]),  # one position too few
        ([5, 1, 2], [1, 2, -1]),  # a position beyond the length
    ],
)
def test_another_choice_of_equal_scores_is_right(program: ModuleType, chosen: list[int], expected: list[int]) -> None:
    scores = torch.tensor([[0.0, 3.0, 2.0, 1.0, 1.0, 9.0]])
    got = program.family_baselines.chosen_as_defined(scores, torch.tensor([5]), torch.tensor([chosen], dtype=torch.int32))
    assert got.tolist() == [expected]
    assert got.dtype == torch.int32
