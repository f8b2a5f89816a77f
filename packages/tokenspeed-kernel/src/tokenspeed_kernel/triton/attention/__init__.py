"""What the portable Triton attention kernels can do. Declarations only: a kernel's module, and Triton with it, is imported when the
kernel is first selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.traits import at_most

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HERE = __name__
# Of queries, and of what a cache holds, which may be narrower.
_CACHED_FORMATS = (
    *((dtype, dtype) for dtype in _FLOATS),
    *((dtype, cache) for dtype in (*_FLOATS, *_FP8) for cache in _FP8),
)
_CACHED = frozenset(
    format_signature(q=dense_tensor_format(q), k_cache=dense_tensor_format(cache), v_cache=dense_tensor_format(cache))
    for q, cache in _CACHED_FORMATS
)
_LATENT = frozenset(format_signature(q=dense_tensor_format(q), kv_cache=dense_tensor_format(cache)) for q, cache in _CACHED_FORMATS)
_MHA = {
    "head_dim": at_most(256),
    "v_head_dim": at_most(256),
    "logit_cap": any,
    "return_lse": any,
    "sliding_window": any,
    "sinks": any,
}
_MLA = {"head_dim": at_most(576), "v_head_dim": at_most(512), "logit_cap": any, "return_lse": any, "scaled": any}

# -- mha_prefill ---------------------------------------------------------------------------------------------------------------


def _tiles_of_rows(request: Any, config: Mapping[str, Any]) -> str | None:
    """Twice as many warps are for twice as many rows. In a narrow window tiles are bands, which have no choice."""
    if config["num_warps"] * 16 > config["block_m"]:
        return f"{config['num_warps']} warps have less than 16 rows each in a tile of {config['block_m']}"
    if request.traits["head_dim"] > 128 and config["num_stages"] > 2:
        return "three blocks of keys of more than 128 columns do not fit into shared memory"
    return None


register_kernel(
    "attention",
    "mha_prefill",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k", "v"), "dense", _FLOATS),
    traits=_MHA,
    priority=Priority.PORTABLE,
    tags={"determinism"},
    tunables={"block_m": [64, 128], "num_warps": [4, 8], "num_stages": [2, 3]},
    tunable_if=_tiles_of_rows,
)(f"{_HERE}.mha_prefill:mha_prefill")

# -- mha_extend_with_kvcache ---------------------------------------------------------------------------------------------------

register_kernel(
    "attention",
    "mha_extend_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=_CACHED,
    traits={**_MHA, "scaled": any, "is_causal": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)(f"{_HERE}.mha_extend_with_kvcache:mha_extend_with_kvcache")

# -- mha_decode_with_kvcache ---------------------------------------------------------------------------------------------------

register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=_CACHED,
    traits={**_MHA, "scaled": any, "multi_query": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
    tunables={"block_n": [32, 64, 128], "num_warps": [1, 2, 4]},
)(f"{_HERE}.mha_decode_with_kvcache:mha_decode_with_kvcache")

# -- mha_with_kvcache ----------------------------------------------------------------------------------------------------------

register_kernel(
    "attention",
    "mha_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=_CACHED,
    traits={**_MHA, "scaled": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)(f"{_HERE}.mha_with_kvcache:mha_with_kvcache")

# -- attn_merge_state ----------------------------------------------------------------------------------------------------------

register_kernel(
    "attention",
    "attn_merge_state",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("out_a", "out_b"), "dense", _FLOATS),
    traits={"v_head_dim": at_most(4096)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)(f"{_HERE}.attn_merge_state:attn_merge_state")

# -- mla_prefill ---------------------------------------------------------------------------------------------------------------

register_kernel(
    "attention",
    "mla_prefill",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k", "v"), "dense", _FLOATS),
    traits={"head_dim": at_most(256), "v_head_dim": at_most(256), "logit_cap": any, "return_lse": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)(f"{_HERE}.mla_prefill:mla_prefill")

# -- mla_extend_with_kvcache ---------------------------------------------------------------------------------------------------

register_kernel(
    "attention",
    "mla_extend_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=_LATENT,
    traits={**_MLA, "is_causal": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)(f"{_HERE}.mla_extend_with_kvcache:mla_extend_with_kvcache")

# -- mla_decode_with_kvcache ---------------------------------------------------------------------------------------------------

register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=_LATENT,
    traits={**_MLA, "multi_query": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)(f"{_HERE}.mla_decode_with_kvcache:mla_decode_with_kvcache")
