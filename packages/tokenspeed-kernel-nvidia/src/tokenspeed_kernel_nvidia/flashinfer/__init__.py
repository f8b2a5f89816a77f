"""Attention by FlashInfer: TensorRT-LLM's kernels, as it exposes them, where the package flashinfer-python is installed.

Each module adapts one operator to a public function of FlashInfer. What they hand over was read from FlashInfer's source, version
0.7.2, and what is declared of them (``_declarations``) is what that source serves.

On Hopper that is decoding alone, by the XQA kernels, which read the lengths on the device. FlashInfer's other kernels for Hopper
are left out: the wrappers of ``BatchPrefillWithRaggedKVCacheWrapper`` and the like want a plan, which is made on the host from
lengths that they copy there. So every call with new lengths would wait for the device, and sinks they have in a variant of their
own only.
"""
