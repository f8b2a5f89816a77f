"""GEMM of few rows by prepared mxfp4 or nvfp4 weights."""
