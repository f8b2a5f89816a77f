"""What the portable Triton mixture-of-experts kernels can do. Declarations only: a kernel's module, and Triton with it, is imported
when the kernel is first selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.traits import at_most

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HERE = __name__

# -- moe_topk ------------------------------------------------------------------------------------------------------------------

register_kernel(
    "moe",
    "moe_topk",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", _FLOATS),
    traits={
        # A token's experts lie in the registers of one program, and top_k rounds go over them.
        "num_experts": at_most(8192),
        "sigmoid": any,
        "renormalize": any,
        "correction_bias": any,
        "grouped": any,
        "scaled": any,
    },
    priority=Priority.PORTABLE,
    tags={"determinism", "portability"},
)(f"{_HERE}.moe_topk:moe_topk")

# -- moe_apply: weights as they are (dense, fp8 blocks, mxfp4 with narrow activations) -----------------------------------------

# Prepared mxfp4 weights are served faster below; this takes them where they were left as they are.
register_kernel(
    "moe",
    "moe_apply",
    solution="triton",
    capability=TRITON,
    signatures=[
        format_signature(x=dense_tensor_format(dtype), w13=weight, w2=weight)
        for dtype in _FLOATS
        for weight in (dense_tensor_format(dtype), fp8_format(torch.float8_e4m3fn, "block", (128, 128)), mxfp4_format())
    ],
    traits={
        "activation": "swiglu",
        "bias": any,
        "w13_interleaved": any,
        "swiglu_limit": any,
        "swiglu_alpha_beta": any,
        "fp8_activations": any,
        "mxfp4_activations": any,
        "weight_layout": "canonical",
    },
    priority=Priority.PORTABLE,
    tags={"determinism", "portability"},
)(f"{_HERE}.moe_apply:moe_apply")

# -- moe_apply: mxfp4 weights, prepared ----------------------------------------------------------------------------------------


def _near(request: Any, config: Mapping[str, Any]) -> str | None:
    """Sums in parts are for few pairs: their memory grows with the pairs. Tiles of many columns are mostly empty there."""
    pairs = request.sizes["tokens"] * request.traits["top_k"]
    if config["regime_index"] < 2 and pairs > 256:
        return f"sums in parts of {pairs} pairs"
    if config["regime_index"] > 3 and pairs < 64:
        return f"tiles for many pairs, and there are {pairs}"
    return None


register_kernel(
    "moe",
    "moe_apply",
    name="triton_moe_apply_mxfp4",
    solution="triton",
    capability=TRITON,
    signatures={
        format_signature(x=dense_tensor_format(dtype), w13=mxfp4_format(), w2=mxfp4_format())
        for dtype in (torch.float16, torch.bfloat16)
    },
    traits={
        "weight_layout": "triton_mxfp4",
        "processed_weights": True,
        "activation": "swiglu",
        "bias": any,
        "w13_interleaved": any,
        "swiglu_limit": any,
        "swiglu_alpha_beta": any,
        "fp8_activations": any,
        "mxfp4_activations": any,
    },
    priority=Priority.PORTABLE + 1,  # before the kernel that takes these weights as they are
    tags={"determinism", "portability"},
    weight_preprocessor=f"{_HERE}._mxfp4_layout:prepare_weights",
    tunables={"regime_index": [0, 1, 2, 3, 4, 5]},
    tunable_if=_near,
)(f"{_HERE}.moe_apply_mxfp4:moe_apply")
