"""Experts of many tokens: grouped GEMM of permuted rows."""
