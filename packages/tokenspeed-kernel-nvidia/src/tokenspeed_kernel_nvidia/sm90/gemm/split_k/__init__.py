"""GEMM of up to 64 rows by dense weights, whose k the CTAs of a cluster split."""
