"""The paged cache of keys and values."""

from tokenspeed_kernel_base.ops.kvcache.store_kv_cache import store_kv_cache

__all__ = ["store_kv_cache"]
