"""Kernels for gfx942 (CDNA3: AMD Instinct MI300X, MI325X), in Gluon."""
