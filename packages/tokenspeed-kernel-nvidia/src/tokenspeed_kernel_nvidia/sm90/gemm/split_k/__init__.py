"""GEMM of up to 32 rows by dense weights, whose k the CTAs of a cluster split."""
