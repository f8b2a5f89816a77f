"""GEMM of fp8 operands with scales per token, channel or block."""
