"""What the portable Triton position embedding kernels can do. Declarations only: a kernel's module, and Triton with it, is
imported when the kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.traits import at_most

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
_HERE = __name__

# -- apply_rope ----------------------------------------------------------------------------------------------------------------

_PLAIN = format_signatures(("q", "k"), "dense", _FLOATS)
_WRITING = {
    format_signature(q=dense_tensor_format(dtype), k=dense_tensor_format(dtype), k_cache=dense_tensor_format(cache))
    for dtype in _FLOATS
    for cache in (dtype, *_FP8)
}

register_kernel(
    "embedding",
    "apply_rope",
    solution="triton",
    capability=TRITON,
    signatures=_PLAIN | _WRITING,
    traits={"interleaved": any, "cache_write": any, "head_dim": at_most(16384)},
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.apply_rope:apply_rope")
