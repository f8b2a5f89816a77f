"""tokenspeed-kernel: operators for LLM inference, and the kernel that serves each best on the machine at hand.

Importing this declares the operators, registers their kernels, and lets installed plugins register theirs. It imports no
compiler and touches no GPU.
"""

import logging

from tokenspeed_kernel import torch as _torch_kernels
from tokenspeed_kernel import triton as _triton_kernels
from tokenspeed_kernel.plugins import (
    PluginFailure,
    PluginInfo,
    PluginWarning,
    disable_plugin,
    discover_plugins,
    list_plugins,
    plugin_failures,
)
from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.profiling import (
    capture_to_file,
    kernel_scope,
    shape_capture,
    start_profiling,
    start_shape_capture,
    stop_profiling,
    stop_shape_capture,
    time_calls,
)
from tokenspeed_kernel.workbench.recording import ShapeCapture
from tokenspeed_kernel.workbench.tuned import register_tuned_tables, tables
from tokenspeed_kernel_base import measured
from tokenspeed_kernel_base.config import ConfigurationError, Settings, reload_settings, settings
from tokenspeed_kernel_base.operator import get_operator, operators
from tokenspeed_kernel_base.ops.activation import silu_and_mul, swiglu
from tokenspeed_kernel_base.ops.attention import (
    attn_merge_state,
    mha_decode_with_kvcache,
    mha_extend_with_kvcache,
    mha_prefill,
    mha_with_kvcache,
    mla_decode_with_kvcache,
    mla_extend_with_kvcache,
    mla_prefill,
)
from tokenspeed_kernel_base.ops.embedding import apply_rope
from tokenspeed_kernel_base.ops.gemm import bmm, mm
from tokenspeed_kernel_base.ops.kvcache import store_kv_cache
from tokenspeed_kernel_base.ops.moe import MoEPlan, MoEWeights, moe_apply, moe_plan, moe_process_weights, moe_topk
from tokenspeed_kernel_base.ops.norm import qk_rmsnorm, rmsnorm
from tokenspeed_kernel_base.ops.quantization import (
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_fp8_with_scale,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from tokenspeed_kernel_base.ops.sampling import argmax, sample_top_k_top_p
from tokenspeed_kernel_base.platform import (
    ArchVersion,
    CapabilityRequirement,
    PlatformInfo,
    current_platform,
    named_platform,
    platform_of,
    use_platform,
)
from tokenspeed_kernel_base.registry import (
    KernelLoadWarning,
    KernelRegistry,
    KernelSpec,
    Priority,
    PriorityClashWarning,
    RegistrationError,
    describe_kernel,
    register_kernel,
)
from tokenspeed_kernel_base.selection import (
    Explanation,
    NoKernelFoundError,
    SelectedKernel,
    SelectionObjective,
    SelectionPolicy,
    SelectionStrategy,
    explain_selection,
    kernel_override,
    select_kernel,
    set_autotuner,
    set_selection_policy,
    warmup_selection,
)
from tokenspeed_kernel_base.signature import (
    FormatSignature,
    ScaleFormat,
    TensorFormat,
    dense_tensor_format,
    format_signature,
    format_signatures,
    tensor_format,
)
from tokenspeed_kernel_base.traits import at_least, at_most, between, multiple_of, one_of

__all__ = [
    "ArchVersion",
    "CapabilityRequirement",
    "ConfigurationError",
    "Explanation",
    "FormatSignature",
    "KernelLoadWarning",
    "KernelRegistry",
    "KernelSpec",
    "MoEPlan",
    "MoEWeights",
    "NoKernelFoundError",
    "PlatformInfo",
    "PluginFailure",
    "PluginInfo",
    "PluginWarning",
    "Priority",
    "PriorityClashWarning",
    "RegistrationError",
    "ScaleFormat",
    "SelectedKernel",
    "SelectionObjective",
    "SelectionPolicy",
    "SelectionStrategy",
    "Settings",
    "ShapeCapture",
    "TensorFormat",
    "__version__",
    "apply_rope",
    "argmax",
    "at_least",
    "at_most",
    "attn_merge_state",
    "between",
    "bmm",
    "current_platform",
    "dense_tensor_format",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
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
    "mha_decode_with_kvcache",
    "mha_extend_with_kvcache",
    "mha_prefill",
    "mha_with_kvcache",
    "mla_decode_with_kvcache",
    "mla_extend_with_kvcache",
    "mla_prefill",
    "mm",
    "moe_apply",
    "moe_plan",
    "moe_process_weights",
    "moe_topk",
    "multiple_of",
    "named_platform",
    "one_of",
    "operators",
    "platform_of",
    "plugin_failures",
    "qk_rmsnorm",
    "quantize_fp8",
    "quantize_fp8_with_scale",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "register_kernel",
    "register_tuned_tables",
    "reload_settings",
    "rmsnorm",
    "sample_top_k_top_p",
    "select_kernel",
    "set_selection_policy",
    "settings",
    "shape_capture",
    "silu_and_mul",
    "start_profiling",
    "start_shape_capture",
    "stop_profiling",
    "stop_shape_capture",
    "store_kv_cache",
    "swiglu",
    "tensor_format",
    "use_platform",
    "warmup_selection",
]

if settings().verbose:
    logging.getLogger(__name__).setLevel(logging.INFO)
    logging.getLogger(__name__).addHandler(logging.StreamHandler())
measured.use(tables)
set_autotuner("tokenspeed_kernel.workbench.tuning.autotune:autotune")
discover_plugins()
if (_capture_path := settings().capture_path) is not None:
    capture_to_file(_capture_path)
if settings().profile:
    start_profiling()
if (_profile_folder := settings().profile_folder) is not None:
    time_calls(_profile_folder)
