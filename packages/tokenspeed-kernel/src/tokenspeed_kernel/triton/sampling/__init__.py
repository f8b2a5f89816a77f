"""What the portable Triton sampling kernels can do. Declarations only: a kernel's module, and Triton with it, is imported when the
kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.traits import at_most

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HERE = __name__

# -- argmax --------------------------------------------------------------------------------------------------------------------

register_kernel(
    "sampling",
    "argmax",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", _FLOATS),
    traits={"vocab": at_most(2**31 - 2**15)},
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.argmax:argmax")

# -- sample_top_k_top_p --------------------------------------------------------------------------------------------------------

register_kernel(
    "sampling",
    "sample_top_k_top_p",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", _FLOATS),
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.sample_top_k_top_p:sample_top_k_top_p")
