"""Attention: of whole sequences, of new tokens to a paged cache, and of partial results made one."""

from tokenspeed_kernel_base.ops.attention.attn_merge_state import attn_merge_state
from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_extend_with_kvcache import mha_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
from tokenspeed_kernel_base.ops.attention.mha_with_kvcache import mha_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_extend_with_kvcache import mla_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_prefill import mla_prefill

__all__ = [
    "attn_merge_state",
    "mha_decode_with_kvcache",
    "mha_extend_with_kvcache",
    "mha_prefill",
    "mha_with_kvcache",
    "mla_decode_with_kvcache",
    "mla_extend_with_kvcache",
    "mla_prefill",
]
