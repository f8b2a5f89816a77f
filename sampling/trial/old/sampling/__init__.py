"""Portable sampling kernels, in Triton."""
