"""Tests a table of wrong calls. Each wrong call raises the right error before anything is launched. The message names the argument,
the expected value and the actual value. A kernel with the highest priority records the calls that are launched."""

# ruff: noqa: E501 (each row of the table is one line)

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.operator import get_operator, operators
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.decoder.weights import DecoderLayer, DecoderWeights
from tokenspeed_kernel_base.ops.gemm.linear import linear
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.value import Quantization
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_base.traits import as_constraint

BF16, F32, F64, I32, I64, U8, FP8 = (
    torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn,
)  # fmt: skip


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=F32).to(dtype)


def like(value: Any, **changes: Any) -> Any:
    """Returns a copy of an object with some changed attributes."""
    return SimpleNamespace(**{**vars(value), **changes})


def ints(*values: Any, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def decoder_layer(**changes: Any) -> DecoderLayer:
    """Returns a layer with 4 query heads and 2 key heads of 8 elements, and 4 experts, with some changed weights."""
    experts = MoEWeights(ones(4, 12, 8), None, None, ones(4, 8, 6), None, None)
    weights = {"qkv": ones(64, 8), "projection": ones(8, 32), "router": ones(4, 8), "experts": experts}
    return DecoderLayer(**{"input_norm": ones(8), "norm": ones(8), **weights, **changes})


def decoder_weights(**changes: Any) -> DecoderWeights:
    """Returns two equal layers."""
    layer = decoder_layer(**changes)
    return DecoderWeights([layer, layer])


def _valid() -> dict[str, dict[str, Any]]:
    """Returns one valid call of each operator: 2 sequences of 3 and 2 tokens, 4 q heads, 2 KV heads, head_dim 8, pages of 4
    tokens."""
    prefill = {"q": ones(5, 4, 8), "k": ones(5, 2, 8), "v": ones(5, 2, 8), "cu_seqlens": ints(0, 3, 5)}
    paged = {
        "k_cache": ones(6, 4, 2, 8),
        "v_cache": ones(6, 4, 2, 8),
        "page_table": ints([0, 1], [2, 3]),
        "cache_seqlens": ints(7, 5),
        "max_seqlen_k": 8,
    }
    latent = {
        "kv_cache": ones(6, 4, 12),
        "page_table": ints([0, 1], [2, 3]),
        "cache_seqlens": ints(7, 5),
        "max_seqlen_k": 8,
        "kv_lora_rank": 8,
        "softmax_scale": 0.3,
    }
    extend = {"cu_seqlens_q": ints(0, 3, 5), "cu_seqlens_kv": ints(0, 7, 12), "max_seqlen_q": 3}
    weights = MoEWeights(ones(4, 12, 8), None, None, ones(4, 8, 6), None, None)
    rows = {"temperature": ones(3, dtype=F32), "top_k": ints(0, 2, 5), "top_p": ones(3, dtype=F32)}
    return {
        "silu_and_mul": {"x": ones(3, 8)},
        "gelu_and_mul": {"x": ones(3, 8)},
        "swiglu": {"x": ones(3, 8)},
        "attn_merge_state": {
            "out_a": ones(3, 4, 8), "lse_a": ones(3, 4, dtype=F32), "out_b": ones(3, 4, 8), "lse_b": ones(3, 4, dtype=F32),
        },
        "mha_prefill": prefill,
        "mha_extend_with_kvcache": {"q": ones(5, 4, 8), **extend, **paged, "is_causal": True},
        "mha_decode_with_kvcache": {"q": ones(2, 4, 8), **paged},
        "mha_with_kvcache": {"q": ones(5, 4, 8), **{n: x for n, x in extend.items() if n != "cu_seqlens_kv"}, **paged},
        "mla_prefill": {**prefill, "k": ones(5, 4, 8), "v": ones(5, 4, 6)},
        "mla_extend_with_kvcache": {"q": ones(5, 4, 12), **extend, **latent},
        "mla_decode_with_kvcache": {"q": ones(2, 4, 12), **latent},
        "apply_rope": {
            "q": ones(3, 4, 8), "k": ones(3, 2, 8), "positions": ints(0, 1, 2, dtype=I64), "cos_sin_cache": ones(16, 8, dtype=F32),
        },
        "mm": {"a": ones(3, 8), "b": ones(8, 4)},
        "bmm": {"a": ones(2, 3, 8), "b": ones(2, 8, 4)},
        "store_kv_cache": {
            "k": ones(3, 2, 8), "v": ones(3, 2, 8), "k_cache": ones(6, 4, 2, 8), "v_cache": ones(6, 4, 2, 8), "slot_mapping": ints(0, 5, -1),
        },
        "moe_topk": {"logits": ones(3, 8, dtype=F32), "top_k": 2},
        "moe_apply": {
            "x": ones(3, 8), "weights": weights, "topk_weights": ones(3, 2, dtype=F32), "topk_ids": ints([0, 1], [2, 3], [1, 0]),
            "plan": moe_apply.plan(4, 2, 8, 6),
        },
        "moe_apply_add": {
            "x": ones(3, 8), "weights": weights, "topk_weights": ones(3, 2, dtype=F32), "topk_ids": ints([0, 1], [2, 3], [1, 0]),
            "plan": moe_apply.plan(4, 2, 8, 6), "residual": ones(3, 8),
        },
        "moe_topk_apply": {"x": ones(3, 8), "logits": ones(3, 4), "weights": weights, "plan": moe_apply.plan(4, 2, 8, 6)},
        "mm_add": {"a": ones(3, 8), "b": ones(8, 4), "residual": ones(3, 4)},
        "linear": {"x": ones(3, 8), "weights": LinearWeights(ones(4, 8)), "plan": linear.plan(8, 4)},
        "rmsnorm_moe_topk": {"x": ones(3, 8), "norm_weight": ones(8), "router_weight": ones(8, 4), "top_k": 2},
        "qk_rmsnorm_rope_store_kv_cache": {
            "qkv": ones(3, 64), "positions": ints(0, 1, 2, dtype=I64), "cos_sin_cache": ones(16, 8, dtype=F32),
            "k_cache": ones(6, 4, 2, 8), "v_cache": ones(6, 4, 2, 8), "slot_mapping": ints(0, 5, -1), "q_weight": ones(8),
            "k_weight": ones(8),
        },
        "rmsnorm_qkv_rope": {
            "x": ones(3, 8), "norm_weight": ones(8), "qkv_weight": ones(8, 64), "positions": ints(0, 1, 2, dtype=I64),
            "cos_sin_cache": ones(16, 8, dtype=F32), "kv_heads": 2, "head_dim": 8, "k_cache": ones(6, 4, 2, 8),
            "v_cache": ones(6, 4, 2, 8), "slot_mapping": ints(0, 5, -1),
        },
        "decoder_layers": {
            "x": ones(2, 8), "weights": decoder_weights(), "k_cache": ones(2, 6, 4, 2, 8), "v_cache": ones(2, 6, 4, 2, 8),
            "page_table": ints([0, 1], [2, 3]), "cache_seqlens": ints(7, 5), "slot_mapping": ints(6, 12),
            "cos_sin_cache": ones(16, 8, dtype=F32), "plan": moe_apply.plan(4, 2, 8, 6),
        },
        "all_reduce": {"x": ones(3, 8), "group": ProcessGroup.of()},
        "all_gather": {"x": ones(3, 8), "group": ProcessGroup.of()},
        "reduce_scatter": {"x": ones(3, 8), "group": ProcessGroup.of()},
        "all_reduce_rmsnorm": {"x": ones(3, 8), "weight": ones(8), "group": ProcessGroup.of(), "residual": ones(3, 8)},
        "all_reduce_rmsnorm_quantize": {
            "x": ones(3, 8), "weight": ones(8), "group": ProcessGroup.of(), "quantization": Quantization.fp8(), "residual": ones(3, 8),
        },
        "moe_dispatch": {
            "x": ones(3, 8), "topk_weights": ones(3, 2, dtype=F32), "topk_ids": ints([0, 1], [2, 3], [1, -1]), "num_experts": 4,
            "group": ProcessGroup.of(),
        },
        "moe_combine": {"x": ones(3, 8), "ids": ints([0, 1], [2, 3], [1, -1]), "group": ProcessGroup.of()},
        "rmsnorm": {"x": ones(3, 8), "weight": ones(8)},
        "layernorm": {"x": ones(3, 8), "weight": ones(8), "bias": ones(8), "residual": ones(3, 8)},
        "rmsnorm_gated": {"x": ones(3, 8), "gate": ones(3, 8), "weight": ones(8)},
        "qk_rmsnorm": {"q": ones(3, 4, 8), "k": ones(3, 2, 8), "q_weight": ones(8), "k_weight": ones(8)},
        "rmsnorm_quantize": {"x": ones(3, 64), "weight": ones(64), "quantization": Quantization.fp8(), "residual": ones(3, 64)},
        "swiglu_quantize": {"x": ones(3, 128), "quantization": Quantization.fp8()},
        "quantize": {"x": ones(3, 64), "quantization": Quantization.fp8()},
        "quantize_fp8": {"x": ones(3, 256)},
        "quantize_fp8_with_scale": {"x": ones(3, 256), "scale": ones(1, dtype=F32)},
        "dequantize_fp8": {"q": ones(3, 256, dtype=FP8), "scale": ones(1, dtype=F32)},
        "quantize_mxfp8": {"x": ones(3, 64)},
        "dequantize_mxfp8": {"q": ones(3, 64, dtype=FP8), "scale": ones(3, 2, dtype=U8)},
        "quantize_mxfp4": {"x": ones(3, 64)},
        "dequantize_mxfp4": {"q": ones(3, 32, dtype=U8), "scale": ones(3, 2, dtype=U8)},
        "quantize_nvfp4": {"x": ones(3, 64), "global_scale": ones(1, dtype=F32)},
        "dequantize_nvfp4": {"q": ones(3, 32, dtype=U8), "scale": ones(3, 4, dtype=FP8), "global_scale": ones(1, dtype=F32)},
        "swizzle_scales": {"scale": ones(3, 5, dtype=U8)},
        "unswizzle_scales": {"scale": ones(1, 2, 32, 4, 4, dtype=U8), "rows": 3, "columns": 5},
        "adjust_logits": {"logits": ones(2, 8), "tokens": torch.tensor([[1, 7], [0, -1]], dtype=torch.int32)},
        "mla_sparse_with_kvcache": {
            "q": ones(3, 4, 12), "kv_cache": ones(6, 4, 12), "indices": ints([0, 5], [23, -1], [7, 7]), "kv_lora_rank": 8,
            "softmax_scale": 0.3, "topk_length": ints(2, 1, 2),
        },
        "dsa_indexer_scores": {
            "q": ones(4, 2, 8), "k": ones(5, 8), "weights": ones(4, 2, dtype=F32), "cu_seqlens": ints(0, 3, 4), "cu_seqlens_kv": ints(0, 3, 5),
        },
        "dsa_indexer_scores_with_kvcache": {
            "q": ones(4, 2, 8), "k_cache": ones(6, 4, 8), "weights": ones(4, 2, dtype=F32), "page_table": ints([0, 1], [2, 3]),
            "cache_seqlens": ints(7, 5), "cu_seqlens_q": None,
        },
        "positions_to_slots": {"positions": ints([0, 5], [7, -1]), "page_table": ints([0, 1], [2, 3]), "page_size": 4, "cu_seqlens_q": ints(0, 1, 2)},
        "store_index_k_cache": {
            "k": ones(3, 8), "k_cache": ones(6, 4, 8, dtype=FP8), "k_scale_cache": ones(6, 4, dtype=F32), "slot_mapping": ints(0, 5, -1),
        },
        "dsa_select_with_kvcache": {
            "q": ones(4, 2, 8), "k_cache": ones(6, 4, 8), "weights": ones(4, 2, dtype=F32), "page_table": ints([0, 1], [2, 3]),
            "cache_seqlens": ints(7, 5), "top_k": 3,
        },
        "top_k_indices": {"scores": ones(3, 8, dtype=F32), "top_k": 2, "lengths": ints(8, 0, 5)},
        "store_mla_kv_cache": {
            "latent": ones(3, 8), "k_rope": ones(3, 4), "kv_cache": ones(6, 4, 12), "slot_mapping": ints(0, 5, -1),
        },
        "apply_rope_mla": {
            "q_latent": ones(3, 4, 8), "q_rope": ones(3, 4, 4), "latent": ones(3, 8), "k_rope": ones(3, 4),
            "positions": ints(0, 1, 2), "cos_sin_cache": ones(16, 4, dtype=F32), "kv_cache": ones(6, 4, 12), "slot_mapping": ints(0, 5, -1),
        },
        "compact_kv_cache": {
            "k_cache": ones(6, 4, 2, 8), "v_cache": ones(6, 4, 2, 8), "page_table": ints([0, 1], [2, 3]), "cache_seqlens": ints(7, 5),
            "path": ints([0, 2, -1], [0, -1, -1]), "counts": ints(2, 1),
        },
        "copy_kv_pages": {"cache": ones(6, 4, 2, 8), "source_pages": ints(0, 1), "target_pages": ints(2, -1), "source": None},
        "zero_kv_pages": {"cache": ones(6, 4, 2, 8), "pages": ints(0, -1)},
        "expand_page_table": {"page_table": ints([0, 1], [2, -1]), "factor": 2},
        "build_draft_tree": {
            "tokens": ints([4, 5], [6, 7]), "scores": ones(2, 2, dtype=F32), "parents": ints([-1, 0], [-1, -1]), "root_tokens": ints(1, 2),
            "nodes": 3,
        },
        "verify_draft_tokens": {"target_tokens": ints([4, 5], [6, 7]), "draft_tokens": ints([1, 4], [2, 3]), "parents": None},
        "verify_draft_probs": {
            "target_probs": ones(2, 2, 8, dtype=F32), "draft_probs": ones(2, 1, 8, dtype=F32), "draft_tokens": ints([1, 4], [2, 3]),
            "seed": ints(1, 2, dtype=I64), "offset": ints(0, 0, dtype=I64), "parents": None,
        },
        "gated_delta_rule_prefill": {
            "q": ones(5, 2, 8), "k": ones(5, 2, 8), "v": ones(5, 4, 6), "g": ones(5, 4), "beta": ones(5, 4),
            "states": ones(4, 4, 8, 6, dtype=F32), "cu_seqlens": ints(0, 3, 5), "state_slots": ints(2, -1),
        },
        "gated_delta_rule_decode": {
            "q": ones(2, 1, 2, 8), "k": ones(2, 1, 2, 8), "v": ones(2, 1, 4, 6), "g": ones(2, 1, 4), "beta": ones(2, 1, 4),
            "states": ones(4, 4, 8, 6, dtype=F32), "state_slots": ints(2, -1),
        },
        "causal_conv1d_prefill": {
            "x": ones(5, 8), "weight": ones(8, 4), "cu_seqlens": ints(0, 3, 5), "states": ones(4, 3, 8), "state_slots": ints(2, -1),
        },
        "ssd_prefill": {
            "x": ones(5, 4, 2), "dt": ones(5, 4), "A": ones(4, dtype=F32), "B": ones(5, 2, 8), "C": ones(5, 2, 8), "cu_seqlens": ints(0, 3, 5),
            "states": ones(4, 4, 2, 8, dtype=F32), "state_slots": ints(2, -1),
        },
        "ssd_decode": {
            "x": ones(2, 1, 4, 2), "dt": ones(2, 1, 4), "A": ones(4, dtype=F32), "B": ones(2, 1, 2, 8), "C": ones(2, 1, 2, 8),
            "states": ones(4, 4, 2, 8, dtype=F32), "state_slots": ints(2, -1),
        },
        "causal_conv1d_decode": {"x": ones(2, 1, 8), "weight": ones(8, 4), "states": ones(4, 3, 8), "state_slots": ints(2, -1)},
        "argmax": {"logits": ones(3, 8)},
        "argmax_with_value": {"logits": ones(3, 8)},
        "merge_argmax": {"values": ones(2, 3, dtype=F32), "tokens": ints([0, 1, 2], [3, 4, 5])},
        "token_logprobs": {"logits": ones(3, 8), "tokens": ints(0, 1, 2)},
        "merge_token_logprobs": {
            "token_logits": ones(2, 3, dtype=F32), "top_logits": ones(2, 3, 1, dtype=F32),
            "top_tokens": ints([[0], [1], [2]], [[3], [4], [5]]), "lse": ones(2, 3, dtype=F32),
        },
        "sample_top_k_top_p": {"logits": ones(3, 8), **rows, "seed": ints(1, 2, 3, dtype=I64), "offset": ints(0, 0, 0, dtype=I64)},
        "top_k_top_p_probs": {"logits": ones(3, 8), **rows},
    }  # fmt: skip


VALID = _valid()
T, V = TypeError, ValueError

FP8_GIVEN = Quantization.fp8_with_scale(ones(2, dtype=F32))

# Each entry: the operator, the changed argument of its valid call, the error, and its message.
MALFORMED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # comm
    ("all_reduce", {"group": None}, T, r"group must be ProcessGroup, got NoneType None"),
    ("all_reduce", {"group": "gloo"}, T, r"group must be ProcessGroup, got str 'gloo'"),
    ("all_reduce", {"x": ones(3, 8) > 0}, T, r"x must be a tensor of bfloat16 or .*, got bool"),
    ("all_reduce", {"out": ones(3, 4)}, V, r"out must have shape \[3, 8\], got a bfloat16 tensor of shape \[3, 4\]"),
    ("all_gather", {"x": ones()}, V, r"x must be a tensor of one axis or more, got a bfloat16 tensor of shape \[\]"),
    ("all_gather", {"out": ones(4, 8)}, V, r"out must have shape \[3, 8\], got a bfloat16 tensor of shape \[4, 8\]"),
    ("reduce_scatter", {"x": ones(3, 8) > 0}, T, r"x must be a tensor of bfloat16 or .*, got bool"),
    ("reduce_scatter", {"x": ones()}, V, r"x must be a tensor of one axis or more, got a bfloat16 tensor of shape \[\]"),
    ("all_reduce_rmsnorm", {"weight": ones(4)}, V, r"weight must be of shape \[hidden\] where hidden is 8 in x, got \[4\]"),
    ("all_reduce_rmsnorm", {"residual": ones(3, 4)}, V, r"residual must be of shape \[3, 8\] like x, got \[3, 4\]"),
    ("all_reduce_rmsnorm", {"eps": 0.0}, V, r"eps must be positive, got 0.0"),
    ("all_reduce_rmsnorm_quantize", {"weight": ones(4)}, V, r"weight must be of shape \[hidden\] where hidden is 8 in x, got \[4\]"),
    ("all_reduce_rmsnorm_quantize", {"quantization": like(Quantization.fp8(), dtype=BF16)}, V, r"quantization.dtype must be one of .*, got bfloat16"),
    ("all_reduce_rmsnorm_quantize", {"x": ones(3, 8, dtype=F64)}, T, r"x must be a tensor of .*, got float64"),
    ("moe_dispatch", {"topk_ids": ints([0, 1], [2, 3])}, V, r"topk_ids must be of shape \[tokens, top_k\] where tokens is 3 in x, got \[2, 2\]"),
    ("moe_dispatch", {"topk_weights": ones(3, 2)}, T, r"topk_weights must be a tensor of float32, got bfloat16"),
    ("moe_dispatch", {"num_experts": 0}, V, r"num_experts must be a positive multiple of 1, the number of ranks, below 2\^31, got 0"),
    ("moe_dispatch", {"topk_ids": ints([0, 1], [2, 4], [1, 0])}, V, r"topk_ids must be below num_experts = 4, got an id 4"),
    ("moe_combine", {"ids": ints([0, 1], [2, 3])}, V, r"ids must be of shape \[rows, top_k\] where rows is 3 in x, got \[2, 2\]"),
    ("moe_combine", {"ids": ones(3, 2)}, T, r"ids must be a tensor of int32, got bfloat16"),
    # compositions
    ("linear", {"x": ones(3, 9)}, V, r"x must be of shape \[tokens, in_features\] where in_features is 8 in plan.in_features, got \[3, 9\]"),
    ("linear", {"x": ones(3, 8, dtype=F32)}, T, r"x must be a tensor of bfloat16, got float32"),
    ("linear", {"weights": LinearWeights(ones(8, 4))}, V, r"weights.weight must be of shape \[out_features, in_features\] where .*"),
    ("linear", {"plan": linear.plan(8, 4, bias=True)}, V, r"weights.bias must be a tensor, because plan.bias is True, got None"),
    ("mm_add", {"b": ones(8, 4, dtype=F32)}, T, r"b must be a tensor of bfloat16, got float32"),
    ("mm_add", {"residual": ones(3, 8)}, V, r"residual must be of shape \[m, n\] where n is 4 in b, got \[3, 8\]"),
    ("decoder_layers", {"x": ones(3, 8)}, V, r"x must be of shape \[tokens, hidden\] where tokens is 2 in cache_seqlens, got \[3, 8\]"),
    ("decoder_layers", {"k_cache": ones(3, 6, 4, 2, 8)}, V, r"k_cache must be of shape .* where layers is 2 in weights, got \[3, 6, 4, 2, 8\]"),
    ("decoder_layers", {"v_cache": ones(2, 6, 4, 2, 8, dtype=F32)}, T, r"v_cache must be a tensor of bfloat16, got float32"),
    ("decoder_layers", {"page_table": ints([0, 1])}, V, r"page_table must be of shape \[batch, max_pages\] where batch is 2 in cache_seqlens, .*"),
    ("decoder_layers", {"page_table": ints([0, 6], [2, 3])}, V, r"page_table\[0, 1\] must be a page of k_cache, 0 to 5, .*, got 6"),
    ("decoder_layers", {"cache_seqlens": ints(7, 0)}, V, r"cache_seqlens must be at least 1, got 0"),
    ("decoder_layers", {"cache_seqlens": ints(9, 5)}, V, r"cache_seqlens must be at most 8, the tokens that the pages of page_table hold, got 9"),
    ("decoder_layers", {"cos_sin_cache": ones(6, 8, dtype=F32)}, V, r"cache_seqlens must be at most 6, the positions of cos_sin_cache, got 7"),
    ("decoder_layers", {"cos_sin_cache": ones(16, 7, dtype=F32)}, V, r"cos_sin_cache must be of an even rotary_dim, .*, got \[16, 7\]"),
    ("decoder_layers", {"slot_mapping": ints(6, 6)}, V, r"slot_mapping must be of distinct slots .*, got slot 6 for tokens \[0, 1\]"),
    ("decoder_layers", {"eps": 0.0}, V, r"eps must be positive, got 0.0"),
    ("decoder_layers", {"weights": decoder_weights(projection=ones(8, 24))}, V, r"weights.layers\[0\].projection must be of shape \[hidden, width\] where .*"),
    ("decoder_layers", {"weights": decoder_weights(qkv=ones(60, 8))}, V, r"weights.layers\[0\].qkv, transposed, must be of \(heads .*, got \[8, 60\]"),
    ("decoder_layers", {"weights": decoder_weights(sinks=ones(4))}, T, r"weights.layers\[0\].sinks must be a tensor of float32, got bfloat16"),
    ("decoder_layers", {"weights": decoder_weights(router=ones(5, 8))}, V, r"weights.layers\[0\].router, transposed, must be of shape .*, got \[8, 5\]"),
    ("decoder_layers", {"weights": decoder_weights(qkv=ones(64, 8, dtype=FP8))}, V, r"weights.layers\[0\].qkv_scale, transposed, must be given with .*"),
    ("decoder_layers", {"weights": decoder_weights(qkv_scale=ones(64, 1, dtype=F32))}, V, r"weights.layers\[0\].qkv_scale, .* must be None with .*"),
    ("decoder_layers", {"weights": decoder_weights(projection_scale=ones(8, 1, dtype=F32))}, V, r"weights.layers\[0\].projection_scale must be None with .*"),
    ("decoder_layers", {"weights": decoder_weights(projection=ones(8, 24, dtype=FP8), projection_scale=ones(8, 1, dtype=F32))}, V, r"weights.layers\[0\].projection must be of shape \[hidden, width\] where .*"),
    ("decoder_layers", {"weights": decoder_weights(projection=ones(8, 32, dtype=FP8), projection_scale=ones(9, 1, dtype=F32))}, V, r"weights.layers\[0\].projection_scale, transposed, must be of shape .*"),
    ("decoder_layers", {"weights": decoder_weights(projection=ones(8, 16, dtype=U8), projection_scale=ones(8, 2, dtype=FP8))}, V, r"weights.layers\[0\].projection must be in one of the formats .*, got nvfp4"),
    ("decoder_layers", {"weights": decoder_layer()}, T, r"weights must be DecoderWeights, got DecoderLayer .*"),
    ("decoder_layers", {"plan": moe_apply.plan(4, 2, 8, 8)}, V, r"weights.w13_weight must be of shape .* where 2\*intermediate is 16 in .*"),
    ("moe_apply_add", {"residual": ones(3, 4)}, V, r"residual must be of shape \[tokens, hidden\] where .*, got \[3, 4\]"),
    ("moe_apply_add", {"topk_ids": ints([0, 1], [2, 4], [1, 0])}, V, r"topk_ids must be below plan.num_experts = 4, got an id 4"),
    ("moe_topk_apply", {"logits": ones(3, 5)}, V, r"logits must be of shape \[tokens, plan.num_experts\] = \[tokens, 4\], got \[3, 5\]"),
    ("moe_topk_apply", {"num_groups": 3}, V, r"num_groups must be a divisor of the 4 experts of logits, got 3"),
    ("moe_topk_apply", {"x": ones(2, 8)}, V, r"x must be of shape \[tokens, hidden\] where .*, got \[2, 8\]"),
    ("rmsnorm_moe_topk", {"top_k": 5}, V, r"top_k must be from 1 to the 4 experts of logits, got 5"),
    ("rmsnorm_moe_topk", {"residual": ones(3, 4)}, V, r"residual must be of shape \[3, 8\] like x, got \[3, 4\]"),
    ("rmsnorm_moe_topk", {"router_bias": ones(8)}, V, r"router_bias must be of shape \[experts\] where experts is 4 in router_weight, got \[8\]"),
    ("rmsnorm_moe_topk", {"eps": 0.0}, V, r"eps must be positive, got 0.0"),
    ("rmsnorm_qkv_rope", {"qkv_weight": ones(8, 32)}, V, r"qkv_weight must be of \(heads \+ 2 \* kv_heads\) \* head_dim columns .*, got \[8, 32\]"),
    ("rmsnorm_qkv_rope", {"head_dim": 7}, V, r"qkv_weight must be of \(heads \+ 2 \* kv_heads\) \* head_dim columns .*, got \[8, 64\]"),
    ("rmsnorm_qkv_rope", {"slot_mapping": None}, V, r"slot_mapping must be given with .*: .*, got None"),
    ("rmsnorm_qkv_rope", {"slot_mapping": ints(0, 5, 24)}, V, r"slot_mapping must be below pages \* page_size = 24 .*, got 24 for token 2"),
    ("rmsnorm_qkv_rope", {"positions": ints(0, 1, 16, dtype=I64)}, V, r"positions must be in 0 to 15, .*, got 16 for token 2"),
    # activation
    ("silu_and_mul", {"x": ones(3, 7)}, V, r"x must be of shape \[\.\.\., 2 \* d\], even in the last axis, got \[3, 7\]"),
    ("silu_and_mul", {"x": ints(1, 2)}, T, r"x must be a tensor of bfloat16 or .*, got int32"),
    ("silu_and_mul", {"x": None}, T, r"x must be a tensor, got None"),
    ("silu_and_mul", {"out": ones(3, 8)}, V, r"out must have shape \[3, 4\], got a bfloat16 tensor of shape \[3, 8\]"),
    ("gelu_and_mul", {"x": ones(3, 7)}, V, r"x must be of shape \[\.\.\., 2 \* d\], even in the last axis, got \[3, 7\]"),
    ("gelu_and_mul", {"approximate": "erf"}, V, r"approximate must be one of 'none', 'tanh', got 'erf'"),
    ("swiglu", {"x": torch.tensor(1.0)}, V, r"x must be of shape \[\.\.\., gate_and_up\], got \[\]"),
    ("swiglu", {"limit": -1.0}, V, r"limit must be positive or None, got -1.0"),
    ("swiglu", {"alpha": float("nan")}, V, r"alpha must be finite, got nan"),
    ("swiglu", {"interleaved": 1}, T, r"interleaved must be bool, got int 1"),
    # attention: prefill
    ("mha_prefill", {"q": ones(5, 32)}, V, r"q must be of shape \[tokens, heads, head_dim\], got \[5, 32\]"),
    ("mha_prefill", {"k": ones(4, 2, 8)}, V, r"k must be of shape .* where tokens is 5 in q, got \[4, 2, 8\]"),
    ("mha_prefill", {"k": ones(5, 2, 8, dtype=F32)}, T, r"k must be a tensor of bfloat16, got float32"),
    ("mha_prefill", {"v": ones(5, 1, 8)}, V, r"v must be of shape .* where kv_heads is 2 in k, got \[5, 1, 8\]"),
    ("mha_prefill", {"k": ones(5, 3, 8), "v": ones(5, 3, 8)}, V, r"q must be such that heads is a multiple of kv_heads = 3 of k, got heads = 4"),
    ("mha_prefill", {"cu_seqlens": ints(0, 3, 5, dtype=I64)}, T, r"cu_seqlens must be a tensor of int32, got int64"),
    ("mha_prefill", {"cu_seqlens": ints(0, 3, 6)}, V, r"cu_seqlens\[-1\] must be at most 5, the number of tokens in q, got 6"),
    ("mha_prefill", {"cu_seqlens": ints(1, 3, 5)}, V, r"cu_seqlens\[0\] must be 0, got 1"),
    ("mha_prefill", {"cu_seqlens": ints(0, 6, 5)}, V, r"cu_seqlens must be non-decreasing, got 6 then 5 at 1"),
    ("mha_prefill", {"cu_seqlens": torch.empty(0, dtype=I32)}, V, r"cu_seqlens must be of shape \[batch \+ 1\], got \[0\]"),
    ("mha_prefill", {"cu_seqlens_cpu": [0, 2, 5]}, V, r"cu_seqlens_cpu must be equal to cu_seqlens, \[0, 3, 5\], got \[0, 2, 5\]"),
    ("mha_prefill", {"cu_seqlens_cpu": [0, 2**63, 5]}, V, r"cu_seqlens_cpu must be within the range of int64, got \[0, 9223372036854775808, 5\]"),
    ("mha_prefill", {"cu_seqlens_cpu": "lengths"}, T, r"cu_seqlens_cpu must be a sequence of int, a tensor or None, got lengths"),
    ("mha_prefill", {"max_seqlen": 2}, V, r"max_seqlen must be at least 3, the longest sequence of cu_seqlens, got 2"),
    ("mha_prefill", {"window_left": -2}, V, r"window_left must be -1 \(unlimited\) or a number of tokens, got -2"),
    ("mha_prefill", {"window_left": 1.5}, T, r"window_left must be int, got float 1.5"),
    ("mha_prefill", {"logit_cap": -1.0}, V, r"logit_cap must be 0 \(off\) or positive and finite, got -1.0"),
    ("mha_prefill", {"softmax_scale": 0.0}, V, r"softmax_scale must be positive and finite, got 0.0"),
    ("mha_prefill", {"sinks": ones(2)}, V, r"sinks must be of shape \[heads\] where heads is 4 in q, got \[2\]"),
    ("mha_prefill", {"return_lse": "yes"}, T, r"return_lse must be bool, got str 'yes'"),
    ("mha_prefill", {"out": ones(5, 4, 8, dtype=F32)}, T, r"out must be bfloat16, got a float32 tensor"),
    ("mha_prefill", {"k": torch.ones(5, 2, 8, dtype=BF16, device="meta")}, V, r"k must be on cpu like q, got a bfloat16 tensor of .* on meta"),
    ("mha_prefill", {"override": "no_such_kernel"}, NoKernelFoundError, r"override=: no kernel named no_such_kernel"),
    ("mha_prefill", {"solution": 3}, T, r"solution must be str or None, got int 3"),
    ("mla_prefill", {"k": ones(5, 4, 6)}, V, r"k must be of shape .* where head_dim is 8 in q, got \[5, 4, 6\]"),
    ("mla_prefill", {"cu_seqlens": [0, 3, 5]}, T, r"cu_seqlens must be a tensor, got list"),
    # attention: cache
    ("mha_decode_with_kvcache", {"q": ones(3, 4, 8)}, V, r"q must be of 2 tokens, max_seqlen_q = 1 for each length in cache_seqlens \[2\], got 3 tokens"),
    ("mha_decode_with_kvcache", {"q": ones(2, 3, 8)}, V, r"q must be such that heads is a multiple of kv_heads = 2 of k_cache, got heads = 3"),
    (
        "mha_decode_with_kvcache",
        {"k_cache": ones(4, 2, 16, 8), "v_cache": ones(4, 2, 16, 8)},  # [pages, kv_heads, page_size, head_dim]
        V,
        r"q must be such that heads is a multiple of kv_heads = 16 of k_cache \(.*k_cache.transpose\(1, 2\)\), got heads = 4",
    ),
    ("mha_decode_with_kvcache", {"k_cache": ones(6, 4, 2, 8, dtype=F32)}, T, r"k_cache must be a tensor of bfloat16 or float8.*, got float32"),
    ("mha_decode_with_kvcache", {"k_cache": ones(6, 4, 2, 8, dtype=U8)}, T, r"k_cache must be a tensor of bfloat16 or float8.*, got uint8 \(where its bytes are fp8, pass k_cache.view\(torch.float8_e4m3fn\)"),
    ("store_kv_cache", {"k_cache": ones(4, 4, 2, 8, dtype=U8)}, T, r"k_cache must be a tensor of bfloat16 or float8.*, got uint8 \(where its bytes are fp8, pass k_cache.view\(torch.float8_e4m3fn\)"),
    ("mha_decode_with_kvcache", {"v_cache": ones(5, 4, 2, 8)}, V, r"v_cache must be of shape .* where pages is 6 in k_cache, got \[5, 4, 2, 8\]"),
    ("mha_decode_with_kvcache", {"page_table": ints([0], [2])}, V, r"max_seqlen_k must be at most 4, because page_table has 1 pages of 4 tokens for each sequence, got 8"),
    ("mha_decode_with_kvcache", {"page_table": ints([0, 1])}, V, r"page_table must be of shape .* where batch is 2 in cache_seqlens, got \[1, 2\]"),
    ("mha_decode_with_kvcache", {"page_table": ints([0, 6], [2, 3])}, V, r"page_table\[0, 1\] must be a page of k_cache, 0 to 5, .*, got 6"),
    ("mha_decode_with_kvcache", {"page_table": ints([0, 1], [-1, 3])}, V, r"page_table\[1, 0\] must be a page of k_cache, 0 to 5, .*, got -1"),
    ("mha_decode_with_kvcache", {"page_table": ints([0, 1], [2, 3], dtype=I64)}, T, r"page_table must be a tensor of int32, got int64"),
    ("mha_decode_with_kvcache", {"cache_seqlens": ints(9, 5)}, V, r"cache_seqlens must be at most max_seqlen_k = 8, got 9"),
    ("mha_decode_with_kvcache", {"cache_seqlens": ints(-1, 5)}, V, r"cache_seqlens must be 0 or more, got -1"),
    ("mha_decode_with_kvcache", {"k_scale": ones(1, dtype=F32)}, V, r"k_scale must be None, because k_cache is not fp8 but bfloat16, got a float32"),
    ("mha_decode_with_kvcache", {"max_seqlen_k": None}, T, r"max_seqlen_k must be int, got None"),
    ("mha_extend_with_kvcache", {"cu_seqlens_q": ints(0, 5)}, V, r"cu_seqlens_q must be of shape .* where batch\+1 is 3 in cache_seqlens, got \[2\]"),
    ("mha_extend_with_kvcache", {"cu_seqlens_q": ints(0, 3, 6)}, V, r"cu_seqlens_q\[-1\] must be at most 5, the number of tokens in q, got 6"),
    ("mha_extend_with_kvcache", {"cu_seqlens_kv": ints(0, 7, 11)}, V, r"cu_seqlens_kv must be the running sums of cache_seqlens, \[7, 5\], got \[0, 7, 11\]"),
    ("mha_extend_with_kvcache", {"max_seqlen_q": 2}, V, r"max_seqlen_q must be at least 3, the longest sequence of cu_seqlens_q, got 2"),
    ("mha_extend_with_kvcache", {"cache_seqlens": ints(2, 5), "cu_seqlens_kv": ints(0, 2, 7)}, V, r"cache_seqlens\[0\] must be at least 3, because it includes the new tokens .*, got 2"),
    ("mha_with_kvcache", {"cu_seqlens_q": ints(0, 5)}, V, r"cu_seqlens_q must be of shape .* where batch\+1 is 3 in cache_seqlens, got \[2\]"),
    ("mha_with_kvcache", {"max_seqlen_q": 2}, V, r"max_seqlen_q must be at least 3, the longest sequence of cu_seqlens_q, got 2"),
    ("mha_with_kvcache", {"cache_seqlens": ints(2, 5)}, V, r"cache_seqlens\[0\] must be at least 3, because it includes the new tokens .*, got 2"),
    ("mha_with_kvcache", {"page_table": ints([0, 6], [2, 3])}, V, r"page_table\[0, 1\] must be a page of k_cache, 0 to 5, .*, got 6"),
    ("mla_decode_with_kvcache", {"kv_cache": ones(6, 4, 10)}, V, r"kv_cache must be of shape .* where latent_dim is 12 in q, got \[6, 4, 10\]"),
    ("mla_decode_with_kvcache", {"kv_lora_rank": 13}, V, r"kv_lora_rank must be positive and at most 12, the width of a latent, got 13"),
    ("mla_extend_with_kvcache", {"softmax_scale": -1.0}, V, r"softmax_scale must be positive and finite, got -1.0"),
    ("mla_extend_with_kvcache", {"page_table": None}, T, r"page_table must be a tensor, got None"),
    ("mla_sparse_with_kvcache", {"indices": ints([0, 5], [24, -1], [7, 7])}, V, r"indices\[1, 0\] must be below pages \* page_size = 24 .*, got 24"),
    ("mla_sparse_with_kvcache", {"indices": ints([0, 5])}, V, r"indices must be of shape .* where tokens is 3 in q, got \[1, 2\]"),
    ("mla_sparse_with_kvcache", {"topk_length": ints(2, 3, 1)}, V, r"topk_length must be at most 2, the top_k of indices, got 3"),
    ("dsa_indexer_scores", {"cu_seqlens_kv": None}, V, r"k must be of shape .* where tokens is 4 in q, got \[5, 8\]"),
    ("dsa_indexer_scores", {"cu_seqlens_kv": ints(0, 3, 4)}, V, r"cu_seqlens_kv\[-1\] must be 5, the number of tokens in k, got 4"),
    ("dsa_indexer_scores_with_kvcache", {"cache_seqlens": ints(9, 5)}, V, r"cache_seqlens must be at most max_pages \* page_size = 8, got 9"),
    ("dsa_indexer_scores_with_kvcache", {"q": ones(3, 2, 8), "weights": ones(3, 2, dtype=F32)}, V, r"q must be of a multiple of batch = 2 tokens, .*, got 3 tokens"),
    ("dsa_indexer_scores_with_kvcache", {"k_scale_cache": ones(6, 4, dtype=F32)}, V, r"k_scale_cache must be None, because k_cache is not fp8, got "),
    ("dsa_indexer_scores_with_kvcache", {"page_table": ints([0, 1], [2, 6])}, V, r"page_table\[1, 1\] must be a page of k_cache, 0 to 5, .*, got 6"),
    ("dsa_indexer_scores_with_kvcache", {"weights": ones(4, 2)}, T, r"weights must be a tensor of float32, got bfloat16"),
    ("dsa_select_with_kvcache", {"top_k": 0}, V, r"top_k must be from 1 to 1048576, .*, got 0"),
    ("dsa_select_with_kvcache", {"top_k": 2**20 + 1}, V, r"top_k must be from 1 to 1048576, .*, got 1048577"),
    ("dsa_select_with_kvcache", {"cache_seqlens": ints(9, 5)}, V, r"cache_seqlens must be at most max_pages \* page_size = 8, got 9"),
    ("top_k_indices", {"top_k": 0}, V, r"top_k must be from 1 to 1048576, .*, got 0"),
    ("top_k_indices", {"top_k": 2**31 - 1}, V, r"top_k must be from 1 to 1048576, .*, got 2147483647"),
    ("top_k_indices", {"lengths": ints(8, 0, 9)}, V, r"lengths must be at most 8, the keys of scores, got 9"),
    ("top_k_indices", {"scores": ones(3, 8, dtype=I32)}, T, r"scores must be a tensor of .*, got int32"),
    ("attn_merge_state", {"lse_a": ones(3, 4)}, T, r"lse_a must be a tensor of float32, got bfloat16"),
    ("attn_merge_state", {"out_b": ones(3, 4, 6)}, V, r"out_b must be of shape \[3, 4, 8\] like out_a, got \[3, 4, 6\]"),
    # embedding and cache
    ("apply_rope", {"positions": ints(0, 1, 16)}, V, r"positions must be in 0 to 15, the rows of cos_sin_cache, got 16 for token 2"),
    ("apply_rope", {"positions": ints(0, -1, 2)}, V, r"positions must be in 0 to 15, .*, got -1 for token 1"),
    ("apply_rope", {"positions": ints(0, 1)}, V, r"positions must be of shape \[tokens\] where tokens is 3 in q, got \[2\]"),
    ("apply_rope", {"cos_sin_cache": ones(16, 10, dtype=F32)}, V, r"cos_sin_cache must be .*, got "),
    ("apply_rope", {"cos_sin_cache": ones(16, 8)}, T, r"cos_sin_cache must be a tensor of float32, got bfloat16"),
    ("apply_rope", {"k_cache": ones(6, 4, 2, 8)}, V, r"v.* must be .*, got "),
    ("store_kv_cache", {"slot_mapping": ints(0, 24, -1)}, V, r"slot_mapping must be below pages \* page_size = 24 .*, got 24 for token 1"),
    ("store_kv_cache", {"slot_mapping": ints(5, 5, -1)}, V, r"slot_mapping must be .*, got "),
    ("store_kv_cache", {"slot_mapping": ones(3, dtype=F32)}, T, r"slot_mapping must be a tensor of int32 or int64, got float32"),
    ("store_kv_cache", {"v": ones(3, 2, 6)}, V, r"v_cache must be of shape .* where v_head_dim is 6 in v, got \[6, 4, 2, 8\]"),
    ("store_mla_kv_cache", {"k_rope": ones(3, 5)}, V, r"kv_cache must be of shape .* where latent_dim is 13 in latent and k_rope together, got \[6, 4, 12\]"),
    ("store_mla_kv_cache", {"slot_mapping": ints(0, 24, -1)}, V, r"slot_mapping must be below pages \* page_size = 24 .*, got 24 for token 1"),
    ("apply_rope", {"mrope_section": (2, 1, 1)}, V, r"positions must be of shape \[3, tokens\], got "),
    ("apply_rope", {"positions": ints([0, 1, 2], [0, 1, 16], [0, 1, 2]), "mrope_section": (2, 1, 1)}, V, r"positions must be in 0 to 15, .*, got 16 for token 2"),
    ("apply_rope", {"positions": ones(3, 3, dtype=I64), "mrope_section": (2, 2, 1)}, V, r"mrope_section must be three numbers from 0 on that add up to rotary_dim / 2 = 4, got \(2, 2, 1\)"),
    ("apply_rope", {"positions": ones(3, 3, dtype=I64), "mrope_section": (1, 1, 2), "mrope_interleaved": True}, V, r"mrope_section must be of at most 1 and 1 pairs of height and width: .*, got \(1, 1, 2\)"),
    ("apply_rope", {"positions": ones(4, 3, dtype=I64), "mrope_section": (1, 1, 1, 1)}, V, r"mrope_section must be three numbers.* a row of cos_sin_cache.*, got \(1, 1, 1, 1\)"),
    ("apply_rope", {"mrope_section": [2, 1, 1]}, T, r"mrope_section must be tuple of int or None, got list"),
    ("apply_rope", {"mrope_interleaved": True}, V, r"mrope_interleaved must be False, because there is no mrope_section, got True"),
    ("qk_rmsnorm_rope_store_kv_cache", {"qkv": ones(3, 60)}, V, r"qkv must be of heads \* 8 columns and 32 more for k and v, with heads > 0, got \[3, 60\]"),
    ("qk_rmsnorm_rope_store_kv_cache", {"qkv": ones(3, 32)}, V, r"qkv must be .*, got \[3, 32\]"),
    ("qk_rmsnorm_rope_store_kv_cache", {"k_weight": None}, V, r"k_weight must be given where the other weight is, got None"),
    ("qk_rmsnorm_rope_store_kv_cache", {"q_weight": ones(4)}, V, r"q_weight must be of shape \[head_dim\] where head_dim is 8 in k_cache, got \[4\]"),
    ("qk_rmsnorm_rope_store_kv_cache", {"v_cache": ones(6, 4, 1, 8)}, V, r"v_cache must be of shape .* where kv_heads is 2 in k_cache, got "),
    ("qk_rmsnorm_rope_store_kv_cache", {"slot_mapping": ints(0, 24, -1)}, V, r"slot_mapping must be below .*, got 24 for token 1"),
    ("qk_rmsnorm_rope_store_kv_cache", {"k_scale": ones(1, dtype=F32)}, V, r"k_scale must be None, because k_cache has k's dtype, got "),
    ("qk_rmsnorm_rope_store_kv_cache", {"mrope_section": (2, 1, 1)}, V, r"positions must be of shape \[3, tokens\], got "),
    ("apply_rope_mla", {"q_rope": ones(3, 4, 4, dtype=F32)}, T, r"q_rope must be a tensor of bfloat16, got float32"),
    ("apply_rope_mla", {"positions": ints(0, 1, 16)}, V, r"positions must be in 0 to 15, the rows of cos_sin_cache, got 16 for token 2"),
    ("positions_to_slots", {"page_size": 0}, V, r"page_size must be from 1 to 2\^31 - 1, got 0"),
    ("positions_to_slots", {"cu_seqlens_q": ints(0, 2)}, V, r"cu_seqlens_q must be of shape \[batch\+1\] where batch\+1 is 3 in page_table, got"),
    ("positions_to_slots", {"cu_seqlens_q": ints(0, 1, 3)}, V, r"cu_seqlens_q\[-1\] must be 2, the number of tokens in positions, got 3"),
    ("positions_to_slots", {"cu_seqlens_q": None, "page_table": ints([0], [1], [2])}, V, r"positions must be of a multiple of batch = 3 tokens"),
    ("store_index_k_cache", {"k_cache": ones(6, 4, 8)}, T, r"k_cache must be a tensor of float8_e4m3fn, got bfloat16"),
    ("store_index_k_cache", {"slot_mapping": ints(0, 24, -1)}, V, r"slot_mapping must be below pages \* page_size = 24 .*, got 24 for token 1"),
    ("store_index_k_cache", {"scale_format": "e5m2"}, V, r"scale_format must be one of .*, got 'e5m2'"),
    ("compact_kv_cache", {"path": ints([0, 2, -1])}, V, r"path must be of shape .* where batch is 2 in page_table, got \[1, 3\]"),
    ("compact_kv_cache", {"cache_seqlens": ints(9, 5)}, V, r"cache_seqlens must be at most 8, .*, got 9"),
    ("copy_kv_pages", {"target_pages": ints(2, 2)}, V, r"target_pages must be of distinct pages .*, got page 2 twice"),
    ("copy_kv_pages", {"source_pages": ints(0, 6)}, V, r"source_pages must be below 6, .*, got 6"),
    ("zero_kv_pages", {"pages": ints(0, 6)}, V, r"pages must be below 6, .*, got 6"),
    ("expand_page_table", {"factor": 0}, V, r"factor must be 1 to 2\^20, got 0"),
    ("build_draft_tree", {"nodes": 65}, V, r"nodes must be 1 to 64, got 65"),
    ("build_draft_tree", {"scores": ones(2, 3, dtype=F32)}, V, r"scores must be of shape .* where candidates is 2 in tokens, got \[2, 3\]"),
    ("verify_draft_tokens", {"target_tokens": ints([4, 5], [6, 7], dtype=I64)}, T, r"target_tokens must be a tensor of int32, got int64"),
    ("verify_draft_tokens", {"parents": ints(-1, 0)}, V, r"parents must be of shape \[batch, nodes\], got \[2\]"),
    ("verify_draft_probs", {"draft_probs": ones(2, 3, 8, dtype=F32)}, V, r"draft_probs must be of at most 2 rows, one for each node, got \[2, 3, 8\]"),
    ("verify_draft_probs", {"seed": ints(1, 2)}, T, r"seed must be a tensor of int64, got int32"),
    ("mha_with_kvcache", {"tree_mask": ints(1, 3, 7, 1, 3)}, T, r"tree_mask must be a tensor of int64, got int32"),
    ("mla_prefill", {"cu_seqlens_kv": ints(0, 3, 6)}, V, r"cu_seqlens_kv\[-1\] must be at most 5, the number of tokens in k, got 6"),
    ("store_kv_cache", {"k_scale": ones(1, dtype=F32)}, V, r"k_scale must be None, because k_cache has k's dtype, got a float32 tensor"),
    # state spaces
    ("gated_delta_rule_prefill", {"g": ones(5, 4, 6)}, V, r"g must be of shape .* where k_dim is 8 in q, got \[5, 4, 6\]"),
    ("gated_delta_rule_prefill", {"g": ones(5)}, V, r"g must be of shape \[tokens, v_heads\], got \[5\]"),
    ("gated_delta_rule_prefill", {"v": ones(5, 3, 6)}, V, r"v must be such that v_heads is a multiple of heads = 2 of q, got v_heads = 3"),
    ("gated_delta_rule_prefill", {"states": ones(4, 4, 6, 8, dtype=F32)}, V, r"states must be of shape .* where k_dim is 8 in q, got \[4, 4, 6, 8\]"),
    ("gated_delta_rule_prefill", {"states": ones(4, 4, 8, 6, dtype=F64)}, T, r"states must be a tensor of bfloat16 or float32, got float64"),
    ("gated_delta_rule_prefill", {"dt_bias": ones(4)}, V, r"dt_bias must be None, because A_log is None, got a bfloat16"),
    ("gated_delta_rule_prefill", {"cu_seqlens": ints(0, 3, 4)}, V, r"cu_seqlens\[-1\] must be 5, the number of tokens in q, got 4"),
    ("gated_delta_rule_decode", {"k": ones(2, 1, 4, 8)}, V, r"k must be of shape .* where heads is 2 in q, got \[2, 1, 4, 8\]"),
    ("gated_delta_rule_decode", {"A_log": ones(2)}, V, r"A_log must be of shape \[v_heads\] where v_heads is 4 in v, got \[2\]"),
    ("gated_delta_rule_decode", {"output_slots": ints([1], [1])}, V, r"output_slots must be of distinct slots .*, got slot 1 for requests \[0, 1\]"),
    ("causal_conv1d_prefill", {"weight": ones(8, 5)}, V, r"weight must be of shape \[channels, width\] with width 2, 3 or 4, got \[8, 5\]"),
    ("causal_conv1d_prefill", {"states": ones(4, 4, 8)}, V, r"states must be of shape .* where width-1 is 3 in weight, got \[4, 4, 8\]"),
    ("causal_conv1d_prefill", {"states": ones(4, 3, 8, dtype=F64)}, T, r"states must be a tensor of bfloat16 or float32, got float64"),
    ("causal_conv1d_prefill", {"cu_seqlens": ints(0, 3, 4)}, V, r"cu_seqlens\[-1\] must be 5, the number of tokens in x, got 4"),
    ("causal_conv1d_prefill", {"state_slots": ints(2)}, V, r"state_slots must be of shape .* where batch is 2 in cu_seqlens, got \[1\]"),
    ("causal_conv1d_prefill", {"state_slots": ints(2, 2)}, V, r"state_slots must be of distinct slots .*, got slot 2 for requests \[0, 1\]"),
    ("causal_conv1d_prefill", {"has_initial_state": ints(1, 0)}, T, r"has_initial_state must be a tensor of bool, got int32"),
    ("causal_conv1d_prefill", {"activation": "gelu"}, V, r"activation must be one of 'silu', None, got 'gelu'"),
    ("causal_conv1d_decode", {"x": ones(2, 0, 8)}, V, r"x must be of at least one token, got \[2, 0, 8\]"),
    ("causal_conv1d_decode", {"state_slots": ints(4, -1)}, V, r"state_slots must be below 4, the slots of states, got 4 for request 0"),
    ("causal_conv1d_decode", {"output_slots": ints([1, 2])}, V, r"output_slots must be of shape .* where .*, got \[1, 2\]"),
    ("ssd_prefill", {"B": ones(5, 3, 8)}, V, r"x must be such that heads is a multiple of groups = 3 of B, got heads = 4"),
    ("ssd_prefill", {"C": ones(5, 2, 8, dtype=F32)}, T, r"C must be a tensor of bfloat16, got float32"),
    ("ssd_prefill", {"dt": ones(5, 4, dtype=torch.float16)}, T, r"dt must be a tensor of bfloat16 or float32, got float16"),
    ("ssd_prefill", {"states": ones(4, 4, 8, 2, dtype=F32)}, V, r"states must be of shape .* where head_dim is 2 in x, got \[4, 4, 8, 2\]"),
    ("ssd_prefill", {"dt_min": -0.1}, V, r"dt_min must be 0 or more, got -0.1"),
    ("ssd_prefill", {"dt_min": 0.5, "dt_max": 0.1}, V, r"dt_max must be at least dt_min = 0.5, got 0.1"),
    ("ssd_prefill", {"cu_seqlens": ints(0, 3, 6)}, V, r"cu_seqlens\[-1\] must be 5, the number of tokens in x, got 6"),
    ("ssd_decode", {"z": ones(2, 1, 4, 3)}, V, r"z must be of shape .* where head_dim is 2 in x, got \[2, 1, 4, 3\]"),
    ("ssd_decode", {"output_slots": ints([3], [3])}, V, r"output_slots must be of distinct slots .*, got slot 3 for requests \[0, 1\]"),
    # gemm
    ("mm", {"b": ones(7, 4)}, V, r"b must be such that its k is 8 like a's .*, got 7"),
    ("mm", {"a": ones(8)}, V, r"a must be of shape \[m, k\], got a bfloat16 tensor of shape \[8\]"),
    ("mm", {"b": ones(8, 4, dtype=F32)}, T, r"a and b must be in formats that go together .*, got a: bfloat16 and b: float32"),
    ("mm", {"bias": ones(5)}, V, r"bias must be of shape \[n\] where n is 4 in b, got \[5\]"),
    ("mm", {"alpha": ones(1, dtype=F32)}, V, r"alpha must be None where no operand is nvfp4, got "),
    ("mm", {"out_dtype": torch.int8}, V, r"out_dtype must be one of .*, got int8"),
    ("mm", {"out_dtype": "bfloat16"}, T, r"out_dtype must be a torch.dtype or None, got str 'bfloat16'"),
    ("mm", {"a_scale": ones(1, dtype=F32)}, V, r"a_scale must be None.*, got "),
    ("bmm", {"b": ones(3, 8, 4)}, V, r"b must be of shape .* where batch is 2 in a, got \[3, 8, 4\]"),
    ("bmm", {"a": ones(3, 8)}, V, r"a must be of shape \[batch, m, k\], got a bfloat16 tensor of shape \[3, 8\]"),
    # mixture of experts
    ("moe_topk", {"top_k": 9}, V, r"top_k must be from 1 to .*8.*, got 9"),
    ("moe_topk", {"scoring": "relu"}, V, r"scoring must be one of 'softmax', .*, got 'relu'"),
    ("moe_topk", {"num_groups": 3}, V, r"num_groups must be a divisor of the 8 experts of logits, got 3"),
    ("moe_topk", {"correction_bias": ones(7)}, V, r"correction_bias must be of shape \[experts\] where experts is 8 in logits, got \[7\]"),
    ("moe_apply", {"x": ones(3, 9)}, V, r"x must be of shape .* where hidden is 8 in plan.hidden_size, got \[3, 9\]"),
    ("moe_apply", {"topk_ids": ints([0, 1], [2, 4], [1, 0])}, V, r"topk_ids must be below plan.num_experts = 4, got an id 4"),
    ("moe_apply", {"weights": SimpleNamespace(w13_weight=ones(1))}, T, r"weights must be an object with .*w2_weight"),
    ("moe_apply", {"weights": dataclasses.replace(VALID["moe_apply"]["weights"], w2_weight=ones(4, 8, 5))}, V, r"weights.w2_weight must be of shape .*, got \[4, 8, 5\]"),
    ("moe_apply", {"plan": None}, T, r"plan must be MoEPlan, got NoneType None: pass what moe_apply.plan returns"),
    ("linear", {"plan": linear}, T, r"plan must be LinearPlan, got .*: pass what linear.plan returns"),
    ("linear", {"weights": ones(4, 8)}, T, r"weights must be an object with weight, got a bfloat16 tensor .*: pass a LinearWeights"),
    # normalisation
    ("rmsnorm", {"weight": ones(7)}, V, r"weight must be of shape \[hidden\] where hidden is 8 in x, got \[7\]"),
    ("rmsnorm", {"eps": 0.0}, V, r"eps must be positive, got 0.0"),
    ("rmsnorm", {"residual": ones(3, 8, dtype=F64)}, T, r"residual must be a tensor of bfloat16 or float32, got float64"),
    ("rmsnorm", {"residual_out": ones(3, 8)}, V, r"residual_out must be None, because this call has no such output, got a bfloat16"),
    ("layernorm", {"bias": ones(4)}, V, r"bias must be of shape \[hidden\] where hidden is 8 in x, got \[4\]"),
    ("layernorm", {"eps": 0.0}, V, r"eps must be positive, got 0.0"),
    ("layernorm", {"residual": ones(3, 4)}, V, r"residual must be of shape \[3, 8\] like x, got \[3, 4\]"),
    ("rmsnorm_gated", {"gate": ones(3, 4)}, V, r"gate must be of shape \[3, 8\] like x, got \[3, 4\]"),
    ("rmsnorm_gated", {"activation": "relu"}, V, r"activation must be one of 'silu', 'sigmoid', got 'relu'"),
    ("qk_rmsnorm", {"k": ones(3, 2, 6)}, V, r"k must be of shape .* where head_dim is 8 in q, got \[3, 2, 6\]"),
    ("qk_rmsnorm", {"q_weight": ones(4)}, V, r"q_weight must be of shape \[head_dim\] where head_dim is 8 in q, got \[4\]"),
    # quantisation
    ("rmsnorm_quantize", {"weight": ones(4)}, V, r"weight must be of shape \[hidden\] where hidden is 64 in x, got \[4\]"),
    ("rmsnorm_quantize", {"x": ones(3, 64, dtype=F64)}, T, r"x must be a tensor of bfloat16 or float16 or float32, got float64"),
    ("rmsnorm_quantize", {"quantization": None}, T, r"quantization must be Quantization, got NoneType None"),
    ("rmsnorm_quantize", {"quantization": FP8_GIVEN, "residual": None}, V, r"quantization.scale must be of shape \[\] .*, got a float32 tensor of shape \[2\]"),
    ("rmsnorm_quantize", {"quantization": Quantization.mxfp8(), "x": ones(3, 33), "weight": ones(33), "residual": None}, V, r"x must be of shape .* a multiple of 32, got a bfloat16 tensor of shape \[3, 33\]"),
    ("rmsnorm_quantize", {"quantization": Quantization.nvfp4(ones(2, dtype=F32))}, V, r"quantization.scale must be of shape \[\] or \[1\], got "),
    ("swiglu_quantize", {"x": ones(3, 7)}, V, r"x must be of shape \[..., 2 \* d\], even in the last axis, got \[3, 7\]"),
    ("swiglu_quantize", {"x": ones(3, 32), "quantization": Quantization.mxfp8()}, V, r"x must be of shape \[..., 2 \* d\] where d is a multiple of 32, got \[3, 32\]"),
    ("swiglu_quantize", {"x": ones(3, 24), "quantization": Quantization.nvfp4(ones(1, dtype=F32))}, V, r"x must be .* where d is a multiple of 16, got \[3, 24\]"),
    ("swiglu_quantize", {"limit": 0.0}, V, r"limit must be positive or None, got 0.0"),
    ("swiglu_quantize", {"quantization": like(Quantization.mxfp8(), scale_rounding="nearest")}, V, r"quantization.scale_rounding must be .*down.*up.*, got 'nearest'"),
    ("quantize_fp8", {"granularity": "row"}, V, r"granularity must be one of .*, got 'row'"),
    ("quantize_fp8", {"block_size": 0}, V, r"block_size must be at least 1, got 0"),
    ("quantize", {"quantization": "fp8"}, T, r"quantization must be an object with granularity, .*, got str 'fp8': pass a Quantization"),
    ("quantize", {"quantization": like(Quantization.fp8(), format="fp4")}, V, r"quantization.format must be one of .*, got 'fp4'"),
    ("quantize", {"quantization": like(Quantization.fp8(), block_size=0)}, V, r"quantization.block_size must be at least 1, got 0"),
    ("quantize", {"quantization": like(Quantization.mxfp8(), granularity="token")}, V, r"quantization.granularity must be .*, got 'token'"),
    ("quantize", {"quantization": like(Quantization.mxfp8(), scale=1.0)}, T, r"quantization.scale must be a tensor or None, got float 1.0"),
    ("quantize", {"quantization": Quantization.fp8_with_scale(ones(2, dtype=F32))}, V, r"quantization.scale must be of shape \[\] \(tensor\) or .*, got "),
    ("quantize", {"quantization": Quantization.nvfp4(ones(1))}, T, r"quantization.scale must be a tensor of float32, got bfloat16"),
    ("quantize", {"quantization": Quantization.mxfp8(scale_layout="128x4"), "x": ones(32)}, V, r"x must be of at least two axes with .*, got "),
    ("quantize", {"quantization": Quantization.fp8_with_scale(ones(1, dtype=F32)), "scale_out": ones(3, 1, dtype=F32)}, V, r"scale_out must be None, because this call has no such output, got "),
    ("quantize_fp8", {"dtype": BF16}, V, r"dtype must be one of .*float8_e4m3fn.*, got bfloat16"),
    ("quantize_fp8_with_scale", {"scale": ones(2, dtype=F32)}, V, r"scale must be of shape \[\] \(tensor\) or .*, got a float32 tensor of shape \[2\]"),
    ("quantize_fp8_with_scale", {"scale": 1.0}, T, r"scale must be a tensor, got float 1.0"),
    ("dequantize_fp8", {"q": ones(3, 256)}, T, r"q must be a tensor of float8.*, got bfloat16"),
    ("dequantize_fp8", {"scale": ones(1)}, T, r"scale must be a tensor of float32 or .*int32 or uint8, got bfloat16"),
    (
        "dequantize_fp8",
        {"q": ones(3, 256).to(torch.float8_e4m3fnuz), "scale": ints(1)},
        T,
        r"scale must be a tensor of float32, got int32",
    ),
    ("quantize_mxfp8", {"x": ones(3, 33)}, V, r"x must be of shape .* a multiple of 32, got a bfloat16 tensor of shape \[3, 33\]"),
    ("quantize_mxfp8", {"scale_rounding": "nearest"}, V, r"scale_rounding must be .*down.*up.*, got 'nearest'"),
    ("quantize_mxfp8", {"scale_rounding": None}, T, r"scale_rounding must be str, got None"),
    ("dequantize_mxfp8", {"scale": ones(3, 3, dtype=U8)}, V, r"scale must be of shape \[3, 2\].*, got a uint8 tensor of shape \[3, 3\]"),
    ("quantize_mxfp4", {"x": ones(3, 64, dtype=I32)}, T, r"x must be a tensor of .*, got int32"),
    ("dequantize_mxfp4", {"scale": ones(3, 2, dtype=F32)}, T, r"scale must be a tensor of uint8, got float32"),
    ("quantize_nvfp4", {"x": ones(3, 24)}, V, r"x must be of shape .* a multiple of 16, got a bfloat16 tensor of shape \[3, 24\]"),
    ("quantize_nvfp4", {"global_scale": ones(2, dtype=F32)}, V, r"global_scale must be .*, got "),
    ("quantize_fp8", {"scale_dtype": torch.int8}, V, r"scale_dtype must be one of float32, uint8, int32, got int8"),
    ("quantize_fp8", {"scale_dtype": torch.uint8}, V, r"granularity must be 'block' or 'block2d' with scale_dtype=torch.uint8, got "),
    (
        "quantize_fp8",
        {"scale_dtype": torch.int32, "granularity": "block", "dtype": torch.float8_e4m3fnuz},
        V,
        r"dtype must be float8_e4m3fn or float8_e5m2 with scale_dtype=torch.int32, got ",
    ),
    ("quantize_nvfp4", {"scale_layout": "8x4"}, V, r"scale_layout must be one of 'linear', '128x4', got '8x4'"),
    ("quantize_mxfp8", {"scale_layout": "tiles"}, V, r"scale_layout must be one of 'linear', '128x4', got 'tiles'"),
    ("quantize_mxfp4", {"scale_layout": "128x4", "x": ones(32)}, V, r"x must be of at least two axes with scale_layout='128x4', got "),
    ("dequantize_nvfp4", {"scale": ones(3, 5, dtype=FP8)}, V, r"scale must be of shape \[3, 4\].*, got a float8_e4m3fn tensor of shape \[3, 5\]"),
    ("swizzle_scales", {"scale": ones(3, 5, dtype=F32)}, T, r"scale must be a tensor of float8_e4m3fn or .*uint8, got float32"),
    ("swizzle_scales", {"scale": ones(5, dtype=U8)}, V, r"scale must be of shape .*, got \[5\]"),
    ("unswizzle_scales", {"columns": 4}, V, r"scale must be of shape \[1, 1, 32, 4, 4\] for 3 rows and 4 columns, got .*\[1, 2, 32, 4, 4\]"),
    ("unswizzle_scales", {"rows": -1}, V, r"rows must be at least 0, got -1"),
    # sampling
    ("adjust_logits", {"tokens": torch.tensor([[1, 7], [5, 5]], dtype=torch.int32)}, V, r"tokens must be each token at most once in a row, got 5 twice in row 1"),
    ("adjust_logits", {"tokens": ints(1, 2)}, V, r"tokens must be of shape \[rows, listed\]"),
    ("adjust_logits", {"presence_penalty": ones(2, dtype=F32)}, V, r"counts must be given, because presence_penalty is, got None"),
    ("adjust_logits", {"logit_bias": ones(2, 2)}, T, r"logit_bias must be a tensor of float32, got bfloat16"),
    ("argmax", {"logits": ones(3, 0)}, V, r"logits must be of shape \[rows, vocab\] with vocab > 0, got \[3, 0\]"),
    ("argmax", {"out": ones(3, dtype=F32)}, T, r"out must be int(32|64), got a float32 tensor"),
    ("argmax_with_value", {"first_token": -1}, V, r"first_token must be from 0 to 2\^31 - 1 - 8, got -1"),
    ("argmax_with_value", {"tokens_out": torch.ones(3).long()}, T, r"tokens_out must be int32, got a int64 tensor"),
    ("merge_argmax", {"values": ones(0, 3, dtype=F32), "tokens": torch.ones(0, 3).int()}, V, r"values must be of shape .* parts > 0"),
    ("merge_argmax", {"tokens": ints(0, 1, 2)}, V, r"tokens must be of shape \[parts, rows\]"),
    ("merge_argmax", {"out_dtype": torch.int16}, V, r"out_dtype must be .*, got .*int16"),
    ("token_logprobs", {"top_k": 9}, V, r"top_k must be from 0 to the 8 tokens of logits, got 9"),
    ("token_logprobs", {"tokens": ones(3)}, T, r"tokens must be a tensor of int32 or int64, got bfloat16"),
    ("token_logprobs", {"first_token": 2**31 - 8}, V, r"first_token must be from 0 to 2\^31 - 1 - 8, got 2147483640"),
    ("token_logprobs", {"temperature": ones(2, dtype=F32)}, V, r"temperature must be of shape \[rows\] where rows is 3 in logits"),
    ("merge_token_logprobs", {"lse": ones(3, 3, dtype=F32)}, V, r"lse must be of shape \[parts, rows\] where parts is 2"),
    ("merge_token_logprobs", {"top_tokens": ints([[0], [1], [2]])}, V, r"top_tokens must be of shape .* where parts is 2"),
    ("sample_top_k_top_p", {"top_p": torch.tensor([1.0, 0.0, 1.0])}, V, r"top_p must be more than 0 and at most 1, got 0 in row 1"),
    ("sample_top_k_top_p", {"temperature": torch.tensor([1.0, 1.0, -1.0])}, V, r"temperature must be finite and not negative, got -1 in row 2"),
    ("sample_top_k_top_p", {"top_k": ints(0, -1, 2)}, V, r"top_k must be 0 for all tokens, or how many to keep, got -1 in row 1"),
    ("sample_top_k_top_p", {"min_p": torch.tensor([0.0, 1.5, 0.0])}, V, r"min_p must be at least 0 and at most 1, got 1.5 in row 1"),
    ("sample_top_k_top_p", {"out_dtype": torch.int16}, V, r"out_dtype must be .*, got .*int16"),
    ("sample_top_k_top_p", {"seed": ints(1, 2, 3)}, T, r"seed must be a tensor of int64, got int32"),
    ("sample_top_k_top_p", {"top_k": 5}, T, r"top_k must be a tensor, got int 5"),
    ("top_k_top_p_probs", {"min_p": torch.tensor([0.0, 1.5, 0.0])}, V, r"min_p must be at least 0 and at most 1, got 1.5 in row 1"),
    ("top_k_top_p_probs", {"logits": ones(2, 8)}, V, r"temperature must be of shape \[rows\].*"),
]  # fmt: skip


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Registers a kernel for every operator, which is always eligible and has the highest priority. Yields the list of the kernels'
    calls."""
    names: list[str] = []
    for op in operators():
        flags = {name for case in op.all_cases() if not case.large for name in _flags(op, case)}

        def spy(*args: Any, op: Any = op) -> Any:
            names.append(op.mode)
            return op.reference(*args)

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in op.names]
        spy.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        traits = {name: as_constraint(any) for name in flags}
        register_kernel(op.family, op.mode, name=f"spy_{op.mode}", solution="spy", signatures=None, traits=traits, priority=19)(spy)
    yield names
    for op in operators():
        KernelRegistry.get().unregister(f"spy_{op.mode}")


def _flags(op: Any, case: Any) -> set[str]:
    traits = op.request(op.complete(case.build())).traits
    return {name for name, value in traits.items() if isinstance(value, bool)}


def test_the_table_is_large_and_covers_every_operator() -> None:
    assert len(MALFORMED) >= 60
    assert (
        {row[0] for row in MALFORMED}
        == set(VALID)
        == {op.mode for op in operators() if op.body.__module__.startswith("tokenspeed")}
    )


def test_the_valid_calls_are_valid(launched: list[str]) -> None:
    """Asserts that the unchanged calls are valid. Otherwise the table would prove nothing."""
    for name, arguments in VALID.items():
        get_operator(name).function(**_copied(arguments))
        assert launched[-1:] == [name]


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def test_every_malformed_call_raises_the_right_error(launched: list[str]) -> None:
    problems = []
    for mode, changes, error, message in MALFORMED:
        function = get_operator(mode).function
        # Each wrong call is made before and after a valid call is remembered, because the fast path must not let a wrong call
        # through. The exception is a meta tensor among CPU tensors: detecting it would slow down every call.
        on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in changes.values())
        for remembered in (False,) if on_meta else (False, True):
            if on_meta:
                memo.invalidate()
            if remembered:
                function(**_copied(VALID[mode]))
            launched.clear()
            try:
                function(**{**_copied(VALID[mode]), **changes})
            except Exception as caught:
                if not isinstance(caught, error):
                    problems.append(f"{mode} {[*changes]}: {type(caught).__name__} in place of {error.__name__}: {caught}")
                elif not re.search(rf"^{mode}: {message}" if error in (T, V) else message, str(caught)):
                    problems.append(f"{mode} {[*changes]}: {caught}\n    wanted: {message}")
            else:
                problems.append(f"{mode} {[*changes]}: no error")
            if launched:
                problems.append(f"{mode} {[*changes]}: launched")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("mode", sorted(VALID))
def test_malformed_calls_do_not_bind_and_do_not_explain(mode: str) -> None:
    function = get_operator(mode).function
    for _, changes, error, _ in (row for row in MALFORMED if row[0] == mode):
        if error is NoKernelFoundError:
            continue
        for ask in (function.bind, function.explain):
            with pytest.raises(error, match=f"^{mode}: "):
                ask(**{**VALID[mode], **changes})
