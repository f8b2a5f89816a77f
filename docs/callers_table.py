"""Makes the table of the engines that call each operator, from the engines' sources. `hooks.py` inserts the table into a page.

python docs/callers_table.py         # prints the table
python docs/callers_table.py --none  # prints the operators without a caller, and whether they deserve one
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenspeed_kernel  # noqa: F401  # declares the operators
from tokenspeed_kernel_base.operator import operators

ROOT = Path(__file__).parents[1]
ENGINES = {
    "GPT-OSS runtime": "tools/gpt_oss/src",
    "vLLM": "tools/vllm_plugin/src",
    "SGLang": "tools/sglang_plugin/src",
    "transformers": "tools/transformers_plugin/src",
    "the example below": "docs/examples",
}
# Whether an operator without a caller deserves one. `idle_table` raises an error for an operator without such a sentence, and for a
# sentence about an operator that has a caller.
_CHECKPOINTS = "No step needs it: code that loads, converts or checks weights calls it."
_PARTS = "No step needs it alone: `linear`, `moe_apply` and the composed operators are built from it."
_SPARSE = (
    "Yes, by a backend of DeepSeek-V3.2: neither vLLM nor SGLang lets a plugin read the indexer's choice. Your own engine can."
)
_STATE = "Yes, by hybrid models: vLLM's and SGLang's layers call functions for it, which no hook replaces. Your own engine can."
_DRAFTS = "Yes, by speculative decoding: vLLM and SGLang have no hook for a kernel of it. Your own engine can."
_PAGES = "Yes, by an engine's allocator, for prefix sharing, beams and trees of drafts; vLLM and SGLang have their own allocators."
_RANKS = "Yes, by your own engine with a vocabulary divided among ranks; vLLM and SGLang gather the logits instead."
IDLE = {
    "swiglu_quantize": "Yes, by an engine whose next GEMM has fp8 inputs; the plugins' linear layers quantise in `linear`.",
    "attn_merge_state": "Yes, by cascade attention and contexts divided among ranks, which no caller has; vLLM merges by itself.",
    "dsa_indexer_scores": _SPARSE,
    "dsa_indexer_scores_with_kvcache": _SPARSE,
    "dsa_select_with_kvcache": _SPARSE,
    "mla_sparse_with_kvcache": _SPARSE,
    "top_k_indices": _SPARSE,
    "store_index_k_cache": _SPARSE,
    "all_reduce_rmsnorm_quantize": "Yes, by an engine with tensor parallelism and fp8 weights; our runtime has bf16 weights there.",
    "apply_rope_mla": "Yes, by your own engine of latent attention; vLLM and SGLang rotate before they call a backend.",
    "bmm": "Yes, by your own engine of latent attention, for the absorbed projections; vLLM and SGLang call PyTorch's.",
    "mm_add": "Yes, by an engine that adds the residual after a projection; measure it first: the next norm adds it for nothing.",
    "moe_apply_add": "Yes, where shared experts or the residual are added after the experts; measure it first, as with `mm_add`.",
    "compact_kv_cache": _DRAFTS,
    "copy_kv_pages": _PAGES,
    "expand_page_table": _PAGES,
    "zero_kv_pages": _PAGES,
    "gated_delta_rule_decode": _STATE,
    "causal_conv1d_decode": _STATE,
    "causal_conv1d_prefill": _STATE,
    "ssd_decode": _STATE,
    "ssd_prefill": _STATE,
    "layernorm": "Yes, by your own engine. In transformers, PyTorch's `LayerNorm` is one kernel already, so it stays.",
    "qk_rmsnorm": "Hardly: `qk_rmsnorm_rope_store_kv_cache` does it with all that follows, and the example below calls that.",
    "rmsnorm_quantize": "Yes, by an engine that quantises once for several fp8 linear layers; the plugins quantise in `linear`.",
    "dequantize_fp8": _CHECKPOINTS,
    "dequantize_mxfp8": _CHECKPOINTS,
    "dequantize_nvfp4": _CHECKPOINTS,
    "quantize": _CHECKPOINTS,
    "quantize_fp8_with_scale": _PARTS,
    "quantize_mxfp8": _PARTS,
    "quantize_nvfp4": _PARTS,
    "swizzle_scales": _CHECKPOINTS,
    "unswizzle_scales": _CHECKPOINTS,
    "argmax_with_value": _RANKS,
    "merge_argmax": _RANKS,
    "merge_token_logprobs": _RANKS,
    "top_k_top_p_probs": _DRAFTS,
    "build_draft_tree": _DRAFTS,
    "verify_draft_probs": _DRAFTS,
    "verify_draft_tokens": _DRAFTS,
}
# Names by which the engines' sources refer to the operators. vLLM's plugin also imports the core where it calls an operator.
NAMESPACES = {"ops", "tk", "tokenspeed_kernel"}


def callers_table() -> str:
    """A table of all operators, with the engines that call them."""
    rows = [f"| {_linked(op)} | {', '.join(callers) or 'none'} |" for op, callers in _callers()]
    return "\n".join(["| operator | called by |", "|---|---|", *rows])


def idle_table() -> str:
    """A table of the operators without a caller, and whether they deserve one."""
    idle = [op for op, callers in _callers() if not callers]
    wrong = {op.mode for op in idle} ^ set(IDLE)
    if wrong:
        raise ValueError(f"docs/callers_table.py: IDLE must have the operators without a caller; differs in {sorted(wrong)}")
    rows = [f"| {_linked(op)} | {IDLE[op.mode]} |" for op in idle]
    count = f"{len(idle)} of {len(operators())} operators have no caller."
    return "\n".join([count, "", "| operator | does it deserve one? |", "|---|---|", *rows])


def _linked(op: Any) -> str:
    return f"[`{op.mode}`][{op.body.__module__}.{op.mode}]"


def _callers() -> Iterator[tuple[Any, list[str]]]:
    """Yields all operators, each with the names of the engines that call it."""
    files = {engine: (ROOT / folder).rglob("*.py") for engine, folder in ENGINES.items()}
    calls = {engine: {name for file in found for name in _called(file)} for engine, found in files.items()}
    for op in operators():
        yield op, [engine for engine, names in calls.items() if {op.mode, f"{op.family}.{op.mode}"} & names]


def _called(file: Path) -> Iterator[str]:
    """Yields the names by which a file may refer to operators: names that it imports from the core, attributes of a namespace of
    operators, and strings, because plugins look operators up by name. A string without an underscore may be no operator's name, so
    it counts only as an argument of a call.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tokenspeed_kernel"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and _is_namespace(ast.unparse(node.value)):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
            yield node.value


def _is_namespace(expression: str) -> bool:
    """Returns whether a Python expression names the operators' module."""
    return expression.lower().rpartition(".")[2] in NAMESPACES or expression == "import_module(CORE)"


if __name__ == "__main__":
    print(idle_table() if sys.argv[1:] else callers_table())
