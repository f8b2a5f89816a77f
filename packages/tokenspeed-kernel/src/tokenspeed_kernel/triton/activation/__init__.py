"""What the portable Triton activation kernels can do. Declarations only: a kernel's module, and Triton with it, is
imported when the kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import format_signatures

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HERE = __name__

# -- silu_and_mul --------------------------------------------------------------------------------------------------------------

register_kernel(
    "activation",
    "silu_and_mul",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", _FLOATS),
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.gated:silu_and_mul")

# -- swiglu --------------------------------------------------------------------------------------------------------------------

register_kernel(
    "activation",
    "swiglu",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", _FLOATS),
    traits={"interleaved": any, "limit": any},
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.gated:swiglu")
