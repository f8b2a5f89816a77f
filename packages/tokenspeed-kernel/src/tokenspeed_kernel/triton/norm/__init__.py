"""What the portable Triton normalisation kernels can do. Declarations only: a kernel's module, and Triton with it, is
imported when the kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.traits import at_most

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HERE = __name__

# -- rmsnorm -------------------------------------------------------------------------------------------------------------------

register_kernel(
    "norm",
    "rmsnorm",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", _FLOATS),
    traits={"residual": any},
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.rmsnorm:rmsnorm")

# -- qk_rmsnorm ----------------------------------------------------------------------------------------------------------------

register_kernel(
    "norm",
    "qk_rmsnorm",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k"), "dense", _FLOATS),
    traits={"head_dim": at_most(16384)},
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.qk_rmsnorm:qk_rmsnorm")
