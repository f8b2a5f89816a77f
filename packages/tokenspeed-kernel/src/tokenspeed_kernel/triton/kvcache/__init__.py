"""What the portable Triton KV cache kernels can do. Declarations only: a kernel's module, and Triton with it, is
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

# -- store_kv_cache ------------------------------------------------------------------------------------------------------------

_COPIED = format_signatures(("k", "k_cache"), "dense", (*_FLOATS, *_FP8))
_ENCODED = {
    format_signature(k=dense_tensor_format(values), k_cache=dense_tensor_format(cache)) for values in _FLOATS for cache in _FP8
}

register_kernel(
    "kvcache",
    "store_kv_cache",
    solution="triton",
    capability=TRITON,
    signatures=_COPIED | _ENCODED,
    traits={"scaled": any, "per_head_scale": any, "head_dim": at_most(16384)},
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.store_kv_cache:store_kv_cache")
