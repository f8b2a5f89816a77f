"""Portable matrix product kernels, in Triton."""
