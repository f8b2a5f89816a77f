"""Portable kernels of speculative decoding, in Triton."""
