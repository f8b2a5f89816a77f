"""Operand formats and traits that several of the portable attention kernels declare."""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import FLOATS
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.traits import at_most

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Dtypes of (queries, cache). The cache's dtype may be narrower than the queries'.
_PAIRS = (
    *((dtype, dtype) for dtype in FLOATS),
    *((dtype, cache) for dtype in (*FLOATS, *_FP8) for cache in _FP8),
)

CACHED = frozenset(
    format_signature(q=dense_tensor_format(q), k_cache=dense_tensor_format(cache), v_cache=dense_tensor_format(cache))
    for q, cache in _PAIRS
)
"""Formats of queries and caches in multi-head attention over a paged cache."""

LATENT = frozenset(format_signature(q=dense_tensor_format(q), kv_cache=dense_tensor_format(cache)) for q, cache in _PAIRS)
"""Formats of queries and caches in MLA over a paged cache of latents."""

LATENT_GROUPS = frozenset(
    format_signature(
        q=dense_tensor_format(dtype), kv_cache=dense_tensor_format(torch.float8_e4m3fn), rope_cache=dense_tensor_format(dtype)
    )
    for dtype in (torch.float16, torch.bfloat16)
)
"""Formats of queries and caches in MLA if the cached latents have group scales and the rotary parts are in a separate tensor."""

MHA = {
    "head_dim": at_most(256),
    "v_head_dim": at_most(256),
    "logit_cap": any,
    "return_lse": any,
    "sliding_window": any,
    "sinks": any,
}
"""Traits that every multi-head attention kernel of this folder declares."""

MLA = {
    "head_dim": at_most(576),
    "v_head_dim": at_most(512),
    "logit_cap": any,
    "return_lse": any,
    "scaled": any,
    "sliding_window": any,
}
"""Traits that every kernel of this folder for MLA over a cache declares."""
