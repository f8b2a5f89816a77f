"""GEMM kernels for gfx950."""
