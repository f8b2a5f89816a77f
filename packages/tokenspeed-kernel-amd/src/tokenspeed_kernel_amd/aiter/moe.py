"""Declaration of AITER's ``fused_moe`` for moe_apply with dense bf16 weights, without biases and SwiGLU limits.

The adapter, which also shuffles the weights, is in ``moe_device``. ``moe_mxfp4`` declares the kernels for mxfp4 weights. AITER's
kernel with fp8 block scales is not declared. Its activations have one scale per 128 features, while the operator's have one per
token. fp16 is not declared either, because no step clamps activations to fp16's range.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel_amd.aiter.package import UNTRIED
from tokenspeed_kernel_amd.capability import AITER
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.traits import multiple_of

_DEVICE = f"{__name__}_device"
_BFLOAT16 = dense_tensor_format(torch.bfloat16)

register_kernel(
    "moe",
    "moe_apply",
    name="aiter_moe_apply_dense",
    solution="aiter",
    capability=AITER,
    signatures={format_signature(x=_BFLOAT16, w13=_BFLOAT16, w2=_BFLOAT16)},
    traits={
        "weight_layout": "aiter_dense",
        "processed_weights": True,
        "activation": "swiglu",
        "w13_interleaved": any,
        # AITER's tile width.
        "hidden_size": multiple_of(128),
        "intermediate_size": multiple_of(128),
    },
    priority=UNTRIED,
    weight_preprocessor=f"{_DEVICE}:prepare_dense",
)(f"{_DEVICE}:moe_apply")
