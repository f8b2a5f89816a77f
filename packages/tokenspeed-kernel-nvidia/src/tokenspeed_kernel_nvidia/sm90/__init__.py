"""Kernels for Hopper (sm_90), in CuteDSL."""
