"""Portable quantisation kernels, in Triton."""
