"""tokenspeed-kernel: operators for LLM inference, each run by the kernel that is best for the call on this machine.

Importing this package declares the operators, registers their kernels, and lets installed plugins register theirs. The import loads
no compiler and uses no GPU.

Every operator, such as `mha_prefill`, is an attribute of this package. Each operator is declared in ``tokenspeed_kernel_base.ops``.
``help(tokenspeed_kernel.mha_prefill)`` shows one operator's contract. ``tokenspeed-kernel ops`` lists all operators by family.

The operators of a decode step with a paged KV cache, in order:

* `rmsnorm`, `mm` or `linear`, and `apply_rope`;
* `positions_to_slots` and `store_kv_cache`, which write the new keys and values to the cache;
* `mha_decode_with_kvcache` (`mla_decode_with_kvcache`); `mha_prefill` for prompts, `mha_extend_with_kvcache` for chunks of
  prompts, `mha_with_kvcache` for mixed batches;
* `silu_and_mul`, or `moe_topk` and `moe_apply`;
* `argmax` or `sample_top_k_top_p`.

An operator has further functions as attributes:

* ``explain(...)``: which kernel a call would run, and why not the others;
* ``bind(...)``: the kernel itself, for calls of the same shapes, dtypes and options;
* ``plan(...)`` and ``prepare(...)`` of `linear`, `moe_apply` and others with prepared weights.

Other functions, by task:

* choose kernels: `kernel_override`, `set_selection_policy`, `disable_plugin`;
* explain without a call or a device: `explain_selection`, `describe_kernel`, `named_platform`, `use_platform`;
* deploy: `receipt`, `self_check`, `compile_policy`, `compilations`;
* observe calls: `shape_capture`, `watch_calls`, `start_profiling`;
* add kernels: `register_kernel`, `format_signatures`, `at_most`.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenspeed_kernel.plugins import disable_plugin, discover_plugins, list_plugins, plugin_failures
from tokenspeed_kernel.version import __version__
from tokenspeed_kernel_base import measured
from tokenspeed_kernel_base.compilation import (
    Compilation,
    CompilationForbiddenError,
    compilations,
    compile_policy,
    set_compile_policy,
)
from tokenspeed_kernel_base.config import ConfigurationError, reload_settings, settings
from tokenspeed_kernel_base.deprecation import deprecated_step
from tokenspeed_kernel_base.discovery import import_modules
from tokenspeed_kernel_base.operator import get_operator, operators
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.decoder.weights import DecoderLayer, DecoderWeights
from tokenspeed_kernel_base.ops.gemm.linear_plan import LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.ops.kvcache.host_pages import HostPages
from tokenspeed_kernel_base.ops.kvcache.latent_groups import MlaCacheViews, mla_cache_views
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.aliases import ALIASES, alias
from tokenspeed_kernel_base.ops.quantization.value import Quantization
from tokenspeed_kernel_base.platform import (
    ArchVersion,
    CapabilityRequirement,
    PlatformInfo,
    current_platform,
    named_platform,
    use_platform,
)
from tokenspeed_kernel_base.reach import why_unreachable
from tokenspeed_kernel_base.registry import KernelRegistry, describe_kernel, register_kernel
from tokenspeed_kernel_base.selection import (
    Explanation,
    NoKernelFoundError,
    SelectionObjective,
    SelectionPolicy,
    SelectionStrategy,
    explain_selection,
    kernel_override,
    select_kernel,
    set_selection_policy,
    warmup_selection,
)
from tokenspeed_kernel_base.signature import (
    ScaleFormat,
    dense_tensor_format,
    format_signature,
    format_signatures,
    tensor_format,
)
from tokenspeed_kernel_base.spec import Priority, RegistrationError
from tokenspeed_kernel_base.traits import at_least, at_most, between, multiple_of, one_of
from tokenspeed_kernel_base.watch import watch_calls

if TYPE_CHECKING:  # for editors and type checkers only; an operator that is not listed here works, too
    from tokenspeed_kernel.workbench.receipts import receipt
    from tokenspeed_kernel.workbench.self_check import self_check
    from tokenspeed_kernel.workbench.tuned import register_tuned_tables
    from tokenspeed_kernel.workbench.watching import (
        kernel_scope,
        shape_capture,
        start_profiling,
        start_shape_capture,
        stop_profiling,
        stop_shape_capture,
    )
    from tokenspeed_kernel_base.ops.activation.gelu_and_mul import gelu_and_mul
    from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
    from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
    from tokenspeed_kernel_base.ops.activation.swiglu_quantize import swiglu_quantize
    from tokenspeed_kernel_base.ops.attention.attn_merge_state import attn_merge_state
    from tokenspeed_kernel_base.ops.attention.dsa_indexer_scores import dsa_indexer_scores
    from tokenspeed_kernel_base.ops.attention.dsa_indexer_scores_with_kvcache import dsa_indexer_scores_with_kvcache
    from tokenspeed_kernel_base.ops.attention.dsa_select_with_kvcache import dsa_select_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mha_extend_with_kvcache import mha_extend_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
    from tokenspeed_kernel_base.ops.attention.mha_with_kvcache import mha_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mla_extend_with_kvcache import mla_extend_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mla_prefill import mla_prefill
    from tokenspeed_kernel_base.ops.attention.mla_sparse_with_kvcache import mla_sparse_with_kvcache
    from tokenspeed_kernel_base.ops.attention.qk_rmsnorm_rope_store_kv_cache import qk_rmsnorm_rope_store_kv_cache
    from tokenspeed_kernel_base.ops.attention.rmsnorm_qkv_rope import rmsnorm_qkv_rope
    from tokenspeed_kernel_base.ops.attention.top_k_indices import top_k_indices
    from tokenspeed_kernel_base.ops.comm.all_gather import all_gather
    from tokenspeed_kernel_base.ops.comm.all_reduce import all_reduce
    from tokenspeed_kernel_base.ops.comm.all_reduce_rmsnorm import all_reduce_rmsnorm
    from tokenspeed_kernel_base.ops.comm.all_reduce_rmsnorm_quantize import all_reduce_rmsnorm_quantize
    from tokenspeed_kernel_base.ops.comm.moe_combine import moe_combine
    from tokenspeed_kernel_base.ops.comm.moe_dispatch import moe_dispatch
    from tokenspeed_kernel_base.ops.comm.reduce_scatter import reduce_scatter
    from tokenspeed_kernel_base.ops.decoder.decoder_layers import decoder_layers
    from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope
    from tokenspeed_kernel_base.ops.embedding.apply_rope_mla import apply_rope_mla
    from tokenspeed_kernel_base.ops.gemm.bmm import bmm
    from tokenspeed_kernel_base.ops.gemm.linear import linear
    from tokenspeed_kernel_base.ops.gemm.mm import mm
    from tokenspeed_kernel_base.ops.gemm.mm_add import mm_add
    from tokenspeed_kernel_base.ops.kvcache.compact_kv_cache import compact_kv_cache
    from tokenspeed_kernel_base.ops.kvcache.copy_kv_pages import copy_kv_pages
    from tokenspeed_kernel_base.ops.kvcache.expand_page_table import expand_page_table
    from tokenspeed_kernel_base.ops.kvcache.positions_to_slots import positions_to_slots
    from tokenspeed_kernel_base.ops.kvcache.store_index_k_cache import store_index_k_cache
    from tokenspeed_kernel_base.ops.kvcache.store_kv_cache import store_kv_cache
    from tokenspeed_kernel_base.ops.kvcache.store_mla_kv_cache import store_mla_kv_cache
    from tokenspeed_kernel_base.ops.kvcache.zero_kv_pages import zero_kv_pages
    from tokenspeed_kernel_base.ops.linear_attention.gated_delta_rule_decode import gated_delta_rule_decode
    from tokenspeed_kernel_base.ops.linear_attention.gated_delta_rule_prefill import gated_delta_rule_prefill
    from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
    from tokenspeed_kernel_base.ops.moe.moe_apply_add import moe_apply_add
    from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk
    from tokenspeed_kernel_base.ops.moe.moe_topk_apply import moe_topk_apply
    from tokenspeed_kernel_base.ops.moe.rmsnorm_moe_topk import rmsnorm_moe_topk
    from tokenspeed_kernel_base.ops.norm.layernorm import layernorm
    from tokenspeed_kernel_base.ops.norm.qk_rmsnorm import qk_rmsnorm
    from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
    from tokenspeed_kernel_base.ops.norm.rmsnorm_gated import rmsnorm_gated
    from tokenspeed_kernel_base.ops.norm.rmsnorm_quantize import rmsnorm_quantize
    from tokenspeed_kernel_base.ops.quantization.fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_with_scale
    from tokenspeed_kernel_base.ops.quantization.mx import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
    from tokenspeed_kernel_base.ops.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
    from tokenspeed_kernel_base.ops.quantization.quantize import quantize
    from tokenspeed_kernel_base.ops.quantization.swizzle import swizzle_scales, unswizzle_scales
    from tokenspeed_kernel_base.ops.sampling.adjust_logits import adjust_logits
    from tokenspeed_kernel_base.ops.sampling.argmax import argmax
    from tokenspeed_kernel_base.ops.sampling.argmax_with_value import argmax_with_value
    from tokenspeed_kernel_base.ops.sampling.merge_argmax import merge_argmax
    from tokenspeed_kernel_base.ops.sampling.merge_token_logprobs import merge_token_logprobs
    from tokenspeed_kernel_base.ops.sampling.sample_top_k_top_p import sample_top_k_top_p
    from tokenspeed_kernel_base.ops.sampling.token_logprobs import token_logprobs
    from tokenspeed_kernel_base.ops.sampling.top_k_top_p_probs import top_k_top_p_probs
    from tokenspeed_kernel_base.ops.speculation.build_draft_tree import build_draft_tree
    from tokenspeed_kernel_base.ops.speculation.verify_draft_probs import verify_draft_probs
    from tokenspeed_kernel_base.ops.speculation.verify_draft_tokens import verify_draft_tokens
    from tokenspeed_kernel_base.ops.state_space.causal_conv1d_decode import causal_conv1d_decode
    from tokenspeed_kernel_base.ops.state_space.causal_conv1d_prefill import causal_conv1d_prefill
    from tokenspeed_kernel_base.ops.state_space.ssd_decode import ssd_decode
    from tokenspeed_kernel_base.ops.state_space.ssd_prefill import ssd_prefill

__all__ = [
    "ArchVersion",
    "CapabilityRequirement",
    "Compilation",
    "CompilationForbiddenError",
    "ConfigurationError",
    "DecoderLayer",
    "DecoderWeights",
    "Explanation",
    "HostPages",
    "KernelRegistry",
    "LinearPlan",
    "LinearWeights",
    "MlaCacheViews",
    "MoEPlan",
    "MoEWeights",
    "NoKernelFoundError",
    "PlatformInfo",
    "Priority",
    "ProcessGroup",
    "Quantization",
    "RegistrationError",
    "ScaleFormat",
    "SelectionObjective",
    "SelectionPolicy",
    "SelectionStrategy",
    "__version__",
    "at_least",
    "at_most",
    "between",
    "compilations",
    "compile_policy",
    "current_platform",
    "dense_tensor_format",
    "describe_kernel",
    "disable_plugin",
    "discover_plugins",
    "explain_selection",
    "format_signature",
    "format_signatures",
    "get_operator",
    "kernel_override",
    "kernel_scope",
    "list_plugins",
    "mla_cache_views",
    "multiple_of",
    "named_platform",
    "one_of",
    "operators",
    "plugin_failures",
    "receipt",
    "register_kernel",
    "register_tuned_tables",
    "reload_settings",
    "select_kernel",
    "self_check",
    "set_compile_policy",
    "set_selection_policy",
    "settings",
    "shape_capture",
    "start_profiling",
    "start_shape_capture",
    "stop_profiling",
    "stop_shape_capture",
    "tensor_format",
    "use_platform",
    "warmup_selection",
    "watch_calls",
    "why_unreachable",
]

# Imported at first use: the workbench is large, and most programs never use it.
_WORKBENCH = {
    "receipt": "receipts",
    "self_check": "self_check",
    "kernel_scope": "watching",
    "register_tuned_tables": "tuned",
    "shape_capture": "watching",
    "start_profiling": "watching",
    "start_shape_capture": "watching",
    "stop_profiling": "watching",
    "stop_shape_capture": "watching",
}

# Deprecated names of operators' steps (`plan`, `prepare`), kept for one release.
_STEPS = {
    "linear_plan": "linear.plan",
    "linear_process_weights": "linear.prepare",
    "moe_plan": "moe_apply.plan",
    "moe_process_weights": "moe_apply.prepare",
}


def __getattr__(name: str) -> Any:
    if name in ALIASES:
        value = globals()[name] = alias(name)
        return value
    if name in _STEPS:
        value = globals()[name] = deprecated_step(name, _STEPS[name])
        return value
    if name not in _WORKBENCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.workbench.{_WORKBENCH[name]}"), name)
    return value


if settings().verbose:
    logging.getLogger(__name__).setLevel(logging.INFO)
    logging.getLogger(__name__).addHandler(logging.StreamHandler())
import_modules("tokenspeed_kernel_base.ops")
globals().update({operator.mode: operator.function for operator in operators()})
__all__ += [operator.mode for operator in operators()]
__all__.extend(ALIASES)  # deprecated names of operators, kept for one release
measured.use("tokenspeed_kernel.workbench.source")
discover_plugins()
if settings().watches_calls:
    import_module("tokenspeed_kernel.workbench.watching").begin(settings())
