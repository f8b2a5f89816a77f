"""GEMM operators."""
