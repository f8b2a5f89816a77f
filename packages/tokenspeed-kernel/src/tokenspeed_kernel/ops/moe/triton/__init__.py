"""What the portable Triton mixture-of-experts kernels can do. Declarations only: a kernel's module, and Triton with it, is imported when the
kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.triton_common import TRITON
from tokenspeed_kernel.registry import Priority, register_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel.traits import at_most

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

# -- moe_apply: mxfp4 weights, prepared ----------------------------------------------------------------------------------------

