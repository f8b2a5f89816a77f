"""The paged cache of keys and values."""

from tokenspeed_kernel.ops.kvcache import triton  # noqa: F401  (registers its kernels)
from tokenspeed_kernel.ops.kvcache.store_kv_cache import store_kv_cache

__all__ = ["store_kv_cache"]
