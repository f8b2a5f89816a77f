"""Attention and MoE experts by FlashInfer: TensorRT-LLM's kernels, as FlashInfer exposes them, if flashinfer-python is installed.

Each pair of modules is one operator: ``decode`` declares the kernels, and ``decode_device``, which imports FlashInfer, adapts the
operator to one of its public functions. Both were written from FlashInfer's source, version 0.7.2.

On Hopper only decode attention is used, by the XQA kernels, which read the lengths on the device. FlashInfer's other Hopper kernels
are left out: wrappers like ``BatchPrefillWithRaggedKVCacheWrapper`` need a plan, which is made on the host from lengths that they
copy there. So every call with new lengths would wait for the device. Also, those wrappers support sinks only in a separate variant.
"""
