"""moe_apply by FlashInfer: the declarations. The adapter, which also arranges weights, is in ``moe_device``.

These kernels are TensorRT-LLM's grouped CUTLASS GEMMs (``cutlass_fused_moe``). They support dense weights on Hopper and Blackwell.
On Hopper only, they support mxfp4 weights with bfloat16 tokens, and fp8 block-scaled weights with fp8 tokens. FlashInfer's
generated kernels for Blackwell (``trtllm_*_moe``) are left out. The shuffle of their weights is documented only for weights that
FlashInfer itself has quantised, not for a checkpoint's weights.

These kernels have not been measured. The first call compiles some 250 files with nvcc, unless FlashInfer's prebuilt kernels are
installed. So these kernels are ranked below the portable kernels, and are used on request only.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.traits import multiple_of
from tokenspeed_kernel_nvidia.capability import blackwell, blackwell_workstation, flashinfer_gap, hopper

_PRIORITY = 2
_DEVICE = f"{__name__}_device"
_ADAPTER = f"{_DEVICE}:moe_apply"
# FlashInfer's function takes alpha, beta and limit as one value per expert. The largest float stands for no limit.
_OPTIONS = {"activation": "swiglu", "swiglu_limit": any, "swiglu_alpha_beta": any, "bias": any, "w13_interleaved": any}
# Bulk copies need rows that are multiples of 16 bytes.
_HALVES = {"hidden_size": multiple_of(8), "intermediate_size": multiple_of(8)}
_BFLOAT16 = dense_tensor_format(torch.bfloat16)
_FP8_BLOCKS = fp8_format(torch.float8_e4m3fn, "block", (128, 128))

for _arch, _capability in (
    ("sm90", hopper(flashinfer_gap)),
    ("sm100", blackwell(flashinfer_gap)),
    ("sm120", blackwell_workstation(flashinfer_gap)),
):
    register_kernel(
        "moe",
        "moe_apply",
        name=f"flashinfer_moe_apply_dense_{_arch}",
        solution="flashinfer",
        capability=_capability,
        signatures={format_signature(x=each, w13=each, w2=each) for each in (_BFLOAT16, dense_tensor_format(torch.float16))},
        traits={"weight_layout": "flashinfer_dense", "processed_weights": True, **_OPTIONS, **_HALVES},
        priority=_PRIORITY,
        weight_preprocessor=f"{_DEVICE}:prepare_dense",
    )(_ADAPTER)

register_kernel(
    "moe",
    "moe_apply",
    name="flashinfer_moe_apply_mxfp4_sm90",
    solution="flashinfer",
    capability=hopper(flashinfer_gap),
    signatures={format_signature(x=_BFLOAT16, w13=mxfp4_format(), w2=mxfp4_format())},
    traits={"weight_layout": "flashinfer_mxfp4", "processed_weights": True, **_OPTIONS},
    priority=_PRIORITY,
    weight_preprocessor=f"{_DEVICE}:prepare_mxfp4",
)(_ADAPTER)

register_kernel(
    "moe",
    "moe_apply",
    name="flashinfer_moe_apply_fp8_blocks_sm90",
    solution="flashinfer",
    capability=hopper(flashinfer_gap),
    signatures={format_signature(x=_BFLOAT16, w13=_FP8_BLOCKS, w2=_FP8_BLOCKS)},
    traits={
        "weight_layout": "flashinfer_fp8_blocks",
        "processed_weights": True,
        "activation": "swiglu",
        "fp8_activations": {True},
        "hidden_size": multiple_of(128),
        "intermediate_size": multiple_of(128),
    },
    priority=_PRIORITY,
    only_by_name="activations are rounded to fp8 with a scale for every 128 features, where the operator has one a token",
    weight_preprocessor=f"{_DEVICE}:prepare_fp8_blocks",
)(_ADAPTER)
