"""Quantises an indexer's keys to fp8 with one scale per key, and stores keys and scales to the paged cache.

A program handles a few tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, next_power_of_2
from tokenspeed_kernel.triton.kvcache._write import Encoding, as_storable, encoding_for
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# 16 elements per thread, as in `store_mla_kv_cache`.
_ELEMENTS, _WARPS = 1024, 2


@register_kernel(
    "kvcache",
    "store_index_k_cache",
    solution="triton",
    capability=TRITON,
    signatures=frozenset(
        format_signature(k=dense_tensor_format(dtype), k_cache=dense_tensor_format(torch.float8_e4m3fn)) for dtype in FLOATS
    ),
    traits={"head_dim": at_most(1024)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def store_index_k_cache(k: Tensor, k_cache: Tensor, k_scale_cache: Tensor, slot_mapping: Tensor, scale_format: str) -> None:
    """Implements the operator `tokenspeed_kernel.store_index_k_cache`, which documents the arguments."""
    tokens, head_dim = k.shape
    if not tokens or not k_cache.numel():
        return
    encoding: Encoding = encoding_for(k, k_cache)
    columns = next_power_of_2(head_dim)
    at_once = max(1, _ELEMENTS // columns)
    device_code.store_index_k_cache_kernel[(cdiv(tokens, at_once),)](
        k,
        as_storable(k_cache),
        k_scale_cache,
        slot_mapping,
        tokens,
        *k.stride(),
        *k_cache.stride(),
        *k_scale_cache.stride(),
        slot_mapping.stride(0),
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[1],
        POWER_OF_2=scale_format == "e8m0",
        ENCODING=encoding,
        TOKENS=at_once,
        COLUMNS=columns,
        num_warps=_WARPS,
    )
