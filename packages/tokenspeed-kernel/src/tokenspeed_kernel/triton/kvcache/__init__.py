"""Portable kernels that write to the KV cache, in Triton."""
