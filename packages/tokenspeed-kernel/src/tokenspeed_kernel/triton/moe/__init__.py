"""Portable mixture-of-experts kernels, in Triton."""
