"""GEMM of few rows by 16-bit and quantised weights, with split-K in a cluster."""
