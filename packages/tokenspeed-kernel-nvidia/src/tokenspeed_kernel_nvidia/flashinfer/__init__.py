"""Attention and MoE experts by FlashInfer: TensorRT-LLM's kernels, as FlashInfer exposes them, if flashinfer-python is installed.

Each pair of modules implements one operator. For example, ``decode`` declares the kernels of one operator. ``decode_device``
imports FlashInfer, and adapts this operator to one of FlashInfer's public functions. All pairs were written from FlashInfer's
source, version 0.7.2.

On Hopper, only FlashInfer's decode attention is used. It runs the XQA kernels, which read sequence lengths on the device.
FlashInfer's other Hopper attention kernels are left out. Wrappers like ``BatchPrefillWithRaggedKVCacheWrapper`` need a plan, which
they make on the host from lengths copied from the device. So every call with new lengths would wait for the device. These wrappers
support sinks only in a separate variant.
"""
