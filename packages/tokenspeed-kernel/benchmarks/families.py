"""The calls that ``measure_families.py`` measures: calls of real models by family, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention._inputs import paged
from tokenspeed_kernel_base.ops.gemm._inputs import fp8, micro


@dataclass(frozen=True)
class Shape:
    """One call to measure.

    Attributes:
        family: the name that ``--family`` selects, and the heading in tables.
        operator: the mode of the operator that is called, such as ``"mm"``.
        case: the case that makes the call's arguments.
    """

    family: str
    operator: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.operator}: {self.case.name}"


_LATENT: dict[str, Any] = {"heads": 128, "head_dim": 576, "kv_lora_rank": 512, "page_size": 64, "softmax_scale": 0.1352}
_WEIGHTS_ALONE: dict[str, Any] = {"a": "dense", "b": "nvfp4", "layout": "128x4"}
_BLOCKS: dict[str, Any] = {"a_scale": "block", "b_scale": "block"}

# The cases to measure, by family and operator: cases, or names of cases that the operator declares. The most important cases come
# first, because the time limit may end the run.
_MEASURED: Mapping[str, Mapping[str, Sequence[str | Case]]] = {
    "linear attention": {
        "gated_delta_rule_prefill": ("qwen3-next 1 x 8192", "qwen3-next 8 x 1024", "kimi linear 1 x 8192", "kimi linear 8 x 1024"),
        "gated_delta_rule_decode": (
            "qwen3-next decode 64", "kimi linear decode 64", "qwen3-next decode 256", "kimi linear decode 256",
            "qwen3-next decode 1", "qwen3-next decode 64, 4 tokens in a state each",
        ),
        "rmsnorm_gated": ("qwen3-next prefill 8192", "qwen3-next decode 64", "gate first, 8192 rows of 4096"),
    },
    "state space": {
        "ssd_prefill": ("nemotron-h 8 x 1024", "nemotron-h 1 x 8192", "granite-4 2 x 4096, bfloat16 states"),
        "ssd_decode": ("nemotron-h 64", "nemotron-h 256", "nemotron-h 1", "granite-4 128, bfloat16 states"),
        "causal_conv1d_prefill": ("qwen3-next 1 x 8192", "nemotron-h 4 x 4096, bias"),
        "causal_conv1d_decode": ("qwen3-next 64", "nemotron-h 128, bias"),
    },
    "sparse attention": {
        "mla_sparse_with_kvcache": (
            "deepseek-v3.2 decode 64 x 8192", "deepseek-v3.2, 16 of its heads, decode 128 x 32768",
            "deepseek-v3.2 decode 1 x 65536", "deepseek-v3.2 prefill 1024 of 4096",
            "deepseek-v3.2 decode 64 x 8192, a scale for each 128",
        ),
        "top_k_indices": (
            "deepseek-v3.2 decode 64 x 65536", "deepseek-v3.2 decode 1 x 65536", "deepseek-v3.2 decode 64 of 4096 to 65536",
            "deepseek-v3.2 prefill 2048 of 16384", "half of 65536 are equal, 16 rows",
        ),
        "dsa_indexer_scores_with_kvcache": (
            "deepseek-v3.2 decode 64 x 65536, fp8", "deepseek-v3.2 decode 64 x 8192, fp8", "deepseek-v3.2 decode 1 x 65536, fp8",
        ),
        "dsa_indexer_scores": ("deepseek-v3.2 prefill 4096, fp8", "deepseek-v3.2 prefill 2048 of 65536, fp8"),
        "dsa_select_with_kvcache": ("deepseek-v3.2 decode 64 x 65536, fp8",),
        "store_index_k_cache": ("deepseek-v3.2 prefill 16384, scales in e8m0",),
        "positions_to_slots": ("deepseek-v3.2 prefill 4096",),
    },
    "latent attention": {
        "mla_decode_with_kvcache": (
            "deepseek-v3 64 x 8192", "deepseek-v3, 16 of its heads, 64 x 8192", "deepseek-v3 128 x 4096",
            Case("deepseek-v3 16 x 32768", paged([32768] * 16, **_LATENT)),
            Case("deepseek-v3 1 x 8192", paged([8192], **_LATENT)),
            "deepseek-v3, 16 of its heads, 128 x 4096", "deepseek-v3 128 x 4096, fp8 cache",
            "deepseek-v3 64 x 8192, fp8 q and cache", "deepseek-v3, 16 of its heads, 64 x 8192, fp8 q and cache",
        ),
        "mla_prefill": (
            "deepseek-v3 4 x 4096", "deepseek-v3, 16 of its heads, 2 x 8192", "deepseek-v3, 16 of its heads, 2 x 8192, fp8",
        ),
        "mla_extend_with_kvcache": ("deepseek-v3 4 x 512 of 4096", "deepseek-v3, 16 of its heads, 8 x 1024 of 8192"),
        "apply_rope_mla": ("deepseek-v3 decode 256, fp8 q and cache", "deepseek-v3 extend 2048"),
        "store_mla_kv_cache": ("deepseek-v3 prefill 16384", "deepseek-v3.2 prefill 16384, a scale for each 128"),
    },
    "fp8 attention": {
        "mha_prefill": ("llama-70b 2 x 8192, fp8", "llama-70b 2 x 8192", "gpt-oss-120b full layer 4 x 8192, fp8"),
        "mha_decode_with_kvcache": ("gpt-oss-120b full layer 64 x 8192, fp8 cache", "llama-70b 32 x 4096, fp8 cache"),
        "mha_extend_with_kvcache": ("llama-70b 8 x 1024 of 8192, fp8 cache",),
    },
    "fused prologues": {
        "qk_rmsnorm_rope_store_kv_cache": (
            "qwen3-32b prefill 16384", "qwen3-8b decode 64", "llama-3-70b decode 256, fp8 cache",
            "qwen3-vl-8b prefill 16384", "llama-3-8b decode 64",
        ),
        "rmsnorm_quantize": (
            "fp8: llama-3-8b prefill 8192, per token", "mxfp8: qwen3-32b prefill 8192, scales in tiles",
            "nvfp4: qwen3-235b prefill 8192, scales in tiles", "fp8_with_scale: llama-3-70b prefill 8192",
            "fp8: deepseek-v3 decode 128, blocks of 128", "mxfp8: qwen3-32b decode 64, scales in tiles",
            "nvfp4: qwen3-235b decode 64, scales in tiles", "fp8: llama-3-70b decode 64, per token",
            "fp8: deepseek-v3.1 prefill 4096, blocks of 128, packed e8m0", "mxfp8: qwen3-32b prefill 8192",
            "nvfp4: qwen3-235b prefill 8192",
        ),
        "swiglu_quantize": (
            "silu_and_mul, fp8: llama-3-8b prefill 8192, per token", "mxfp8: gpt-oss-120b prefill 4096, top-4, scales in tiles",
            "silu_and_mul, mxfp8: qwen3-32b prefill 8192, scales in tiles",
            "silu_and_mul, nvfp4: qwen3-32b prefill 8192, scales in tiles",
            "silu_and_mul, fp8_with_scale: llama-3-8b prefill 8192", "silu_and_mul, fp8: qwen3-32b decode 64, per token",
            "silu_and_mul, fp8: deepseek-v3 prefill 4096, blocks of 128", "silu_and_mul, mxfp8: qwen3-32b prefill 8192",
            "silu_and_mul, nvfp4: qwen3-32b prefill 8192",
        ),
    },
    "GEMMs": {
        "mm": (
            Case("nvfp4 weights in tiles, 64 x 8192 x 8192", micro(64, 8192, 8192, **_WEIGHTS_ALONE)),
            Case("nvfp4 weights in tiles, 4096 x 8192 x 8192", micro(4096, 8192, 8192, **_WEIGHTS_ALONE)),
            Case("nvfp4 weights in tiles, 1 x 8192 x 8192", micro(1, 8192, 8192, **_WEIGHTS_ALONE)),
            "llama-70b o, nvfp4 in tiles, prefill 4096", "llama-70b o, nvfp4 in tiles, decode 64",
            Case("mxfp4 weights, 64 x 8192 x 8192", micro(64, 8192, 8192, a="dense", b="mxfp4")),
            "deepseek-v3 down, fp8 per block, prefill 4096",
            Case("fp8 in blocks of 64, 4096 x 7168 x 4096", fp8(4096, 7168, 4096, **_BLOCKS, block=64)),
            Case("fp8, e8m0 scales a row of 128, 4096 x 7168 x 4096", fp8(
                4096, 7168, 4096, a_scale="block", b_scale="block1d", scales="e8m0"
            )),
            "llama-70b o, mxfp8, prefill 4096", "fp8 per token, 8192 x 8192 x 8192", "fp8 per block, decode 64",
        ),
    },
    "scales and quantisation": {
        "swizzle_scales": ("llama-70b weight 28672 x 8192, nvfp4",),
        "unswizzle_scales": ("llama-70b weight 28672 x 8192, nvfp4",),
        "quantize_fp8": ("deepseek-v3.1 prefill 4096, blocks of 128, packed e8m0",),
        "quantize_nvfp4": ("llama-70b prefill 8192, scales in tiles", "llama-70b prefill 8192"),
        "quantize_mxfp8": ("gpt-oss-120b prefill 16384, scales in tiles", "gpt-oss-120b prefill 16384"),
    },
    "sampling": {
        "sample_top_k_top_p": (
            "gpt-oss-120b decode 64, top-k 40, top-p 0.95", "gpt-oss-120b decode 64, flat", "gpt-oss-120b decode 64, min-p 0.05",
            "gpt-oss-120b decode 256, top-p 0.9",
        ),
        "top_k_top_p_probs": ("gpt-oss-120b, 16 x 5 nodes, top-k 40, top-p 0.95", "gpt-oss-120b, 16 x 5 nodes, top-p 0.9"),
        "adjust_logits": ("gpt-oss-120b decode 64, 1024 listed",),
        "token_logprobs": ("gpt-oss-120b decode 64, 20 top tokens", "llama-3 prompt 1024, 5 top tokens, bfloat16"),
        "argmax_with_value": ("gpt-oss-120b decode 64, the whole vocabulary, float32",),
        "merge_token_logprobs": ("decode 256, 16 parts, 64 top tokens",),
    },
    "speculation": {
        "verify_draft_probs": ("gpt-oss-120b, a chain of 4, 16 sequences", "llama-3, a tree of 16 nodes, 16 sequences"),
        "verify_draft_tokens": ("llama-3, a tree of 64 nodes, 64 sequences",),
        "build_draft_tree": ("llama-3, eagle-2, 64 sequences",),
    },
    "cache movement": {
        "compact_kv_cache": ("llama-3, trees of 64, 64 sequences",),
        "copy_kv_pages": ("gpt-oss-120b, 2048 pages gathered", "llama-3, 256 pages part"),
        "zero_kv_pages": ("llama-3, 256 pages",),
        "expand_page_table": ("256 sequences of 131072 tokens, pages of 256 as pages of 16",),
    },
}  # fmt: skip

FAMILIES = tuple(_MEASURED)


def _calls_of(family: str, operator: str) -> Iterator[Shape]:
    known = {case.name: case for case in get_operator(operator).all_cases()}
    for each in _MEASURED[family][operator]:
        yield Shape(family, operator, each if isinstance(each, Case) else known[each])


def interleaved(lists: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Yields the first element of each list, then the second element of each, and so on."""
    for row in zip_longest(*lists):
        yield from (each for each in row if each is not None)


def shapes(families: Sequence[str] = FAMILIES) -> list[Shape]:
    """Returns all calls of these families: the first call of each operator, then the second call of each operator, and so on. So
    every operator has results if the time limit ends the run. Operators of different families alternate."""
    operators = interleaved([[(family, operator) for operator in _MEASURED[family]] for family in families])
    return list(interleaved([list(_calls_of(*each)) for each in operators]))
