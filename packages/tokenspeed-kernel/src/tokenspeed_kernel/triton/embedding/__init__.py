"""Portable position embedding kernels, in Triton."""
