"""Portable GEMM kernels, in Triton."""
