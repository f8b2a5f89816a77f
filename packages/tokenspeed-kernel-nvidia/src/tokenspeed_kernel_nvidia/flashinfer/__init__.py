"""Attention and experts by FlashInfer: TensorRT-LLM's kernels, as it exposes them, where flashinfer-python is installed.

Each pair of modules is one operator: ``decode`` declares what FlashInfer serves; ``decode_device``, which imports it, adapts the
operator to one of its public functions. Both were written from FlashInfer's source, version 0.7.2.

Of attention on Hopper that is decoding alone, by the XQA kernels, which read the lengths on the device. FlashInfer's other kernels
for Hopper are left out: wrappers like ``BatchPrefillWithRaggedKVCacheWrapper`` want a plan, which is made on the host
from lengths that they copy there. So every call with new lengths would wait for the device, and sinks they have in a variant of
their own only.
"""
