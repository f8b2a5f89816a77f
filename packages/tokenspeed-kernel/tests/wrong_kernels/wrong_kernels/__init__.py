"""Kernels that are wrong on purpose."""
